"""The manifest of a model that lies here or on the hub, without fetching what is not here.

    the hub's listing ─┐
    Hugging Face's cache ─┼─▶ WeightFiles ──▶ all are known: a Manifest, remembered for the next start
    files in a folder ─┘            └──▶ some are not: what was remembered, or what the swarm says, if it fits

Remembered manifests lie in the user's cache, one small file for each commit or folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from swarm.base.errors import LocalProtocolError, ModelMismatch, UnsupportedModel
from swarm.base.files import cache_folder, replace_file, strict_json
from swarm.files.file_digests import ReadProgress, digest_files, known_digests
from swarm.files.hub import Hub
from swarm.files.pretrained import weight_files
from swarm.protocol.manifest import MAX_WEIGHT_FILES, SHA256, Manifest, WeightFile
from swarm.protocol.wire import decode_manifest, encode_manifest

MANIFESTS_KEPT: Final = 128
"""Manifests that are remembered: the newest ones."""
FETCHED_BYTES: Final = 64 << 20
"""A file of the hub whose digest the hub does not say is fetched to be read, if it is no larger."""

ANOTHER_NAME: Final = "fetch it again, or give the folder another name to serve it as a model of its own"

logger = logging.getLogger(__name__)
MAX_FILE_BYTES: Final = 2 << 20
"""Of a remembered manifest."""
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where a model's weights are.

    Attributes:
        folder: of the files that are here.
        hub: the commit that has all of them; None for a folder of the user's.
        names: of all weight files, whatever their format, whether they are here or not.
    """

    folder: Path
    hub: Hub | None
    names: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path, hub: Hub | None, model: str) -> Self:
        """The weights of a model whose small files are in a folder.

        Args:
            hub: as `find_model` found it.

        Raises:
            UnsupportedModel: no weights that can be read, or too many files.
        """
        names = weight_files(folder, hub, model)
        if len(names) > MAX_WEIGHT_FILES:
            raise UnsupportedModel(f"{model}: {len(names)} weight files; at most {MAX_WEIGHT_FILES} are read")
        return cls(folder, hub, tuple(names))

    @property
    def key(self) -> str:
        """Under which its manifest is remembered."""
        return str(self.folder.resolve()) if self.hub is None else f"{self.hub.name}@{self.hub.commit}"

    @property
    def commit(self) -> str:
        """Of the hub; empty for a folder."""
        return "" if self.hub is None else self.hub.commit


@dataclass(frozen=True, slots=True)
class KnownWeights:
    """What is known of a model's weight files."""

    source: WeightFiles
    files: tuple[WeightFile, ...]
    missing: tuple[str, ...]

    @property
    def manifest(self) -> Manifest | None:
        """All files; None while some are not known."""
        return None if self.missing else Manifest.of(self.files, self.source.commit)

    def misfits(self, manifest: Manifest) -> list[str]:
        """Names of the files here that are none of a manifest's, in order; empty where it may be this model's."""
        return manifest.strangers(self.files)

    def may_be(self, manifest: Manifest) -> bool:
        """Whether the files here are some of a manifest's, which has as many as this model."""
        return len(manifest.files) == len(self.source.names) and not self.misfits(manifest)

    def unread(self) -> dict[str, int]:
        """Sizes in bytes of the files that are here and were not read, by name."""
        sizes = {name: self.source.folder / name for name in self.missing}
        return {name: path.stat().st_size for name, path in sizes.items() if path.is_file()}


class FileProof:
    """Refuses files that are none of a manifest's, before they are used; those that were not read are read.

    A part of a file counts as the file that the hub listed when the part was fetched: nothing here tells more of it.
    """

    def __init__(self, source: WeightFiles, manifest: Manifest, model: str, report: ReadProgress | None = None) -> None:
        """Prove nothing yet.

        Args:
            model: whose manifest it is, for messages.
        """
        self._source, self._manifest, self._model, self._report = source, manifest, model, report

    def __call__(self, names: Iterable[str]) -> None:
        """Prove some files.

        Raises:
            ModelMismatch: the first file that is another one.
            UnknownModel: a file cannot be read.
        """
        paths = {name: self._source.folder / name for name in names}
        hub = self._source.hub
        parts = {name: hub.part_file(name) for name, path in paths.items() if hub is not None and not path.exists()}
        files = [WeightFile(name, part.size_bytes, part.digest) for name, part in parts.items() if part is not None]
        whole = {name: path for name, path in paths.items() if parts.get(name) is None}
        digests = digest_files(list(whole.values()), self._report)
        files += [WeightFile(name, path.stat().st_size, digests[path]) for name, path in whole.items()]
        for name in self._manifest.strangers(files):
            what_to_do = ANOTHER_NAME if self._source.hub is None else "delete it and start again"
            raise ModelMismatch(f"{self._source.folder / name} is not of {self._model}: {what_to_do}")


def known_weights(source: WeightFiles, report: ReadProgress | None = None, *, reads: bool = True) -> KnownWeights:
    """What can be known of a model's weight files here and now.

    Args:
        reads: whether files are read, and digests that the hub's listing lacks are asked for.

    Raises:
        UnknownModel: a file cannot be read.
        HubError: a file that is to be fetched cannot be.
    """
    listed = _listed(source, reads=reads)
    here = [name for name in source.names if name not in listed and (source.folder / name).is_file()]
    paths = {name: source.folder / name for name in here}
    digests = digest_files(list(paths.values()), report) if reads else known_digests(paths.values())
    files = {
        name: WeightFile(name, path.stat().st_size, digests[path]) for name, path in paths.items() if path in digests
    }
    files |= listed
    missing = tuple(name for name in source.names if name not in files)
    return KnownWeights(source, tuple(files[name] for name in source.names if name in files), missing)


def find_manifest(source: WeightFiles, report: ReadProgress | None = None, *, reads: bool = True) -> KnownWeights:
    """The same, completed by what was remembered of this commit or folder; what is complete is remembered.

    Raises:
        UnknownModel, HubError: as `known_weights`.
    """
    known = known_weights(source, report, reads=reads)
    if known.manifest is not None:
        remember(source, known.manifest)
        return known
    manifest = remembered(source)
    if manifest is None or known.unread() or not known.may_be(manifest):
        return known
    return KnownWeights(source, manifest.files, ())


def remember(source: WeightFiles, manifest: Manifest) -> None:
    """Keep a manifest for the next start; one that cannot be kept is found out again then."""
    path = _path(source)
    if _load(path) == (source.key, manifest):
        return
    files = [[file.name, file.size_bytes, file.sha256] for file in manifest.files]
    text = json.dumps({"version": _VERSION, "of": source.key, "commit": manifest.commit, "files": files})
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, text.encode())
        for file in sorted(path.parent.glob("*.json"), key=_written, reverse=True)[MANIFESTS_KEPT:]:
            file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the list of %s's weight files is not kept in %s (%s)", source.key, path.parent, error)


def remembered(source: WeightFiles) -> Manifest | None:
    """The manifest that was remembered of this commit or folder."""
    found = _load(_path(source))
    return found[1] if found is not None and found[0] == source.key else None


def remembered_commits(repo: str) -> list[str]:
    """The commits of a hub model whose manifests are remembered, the newest first."""
    files = sorted(_folder().glob("*.json"), key=_written, reverse=True)
    keys = [found[0] for file in files[:MANIFESTS_KEPT] if (found := _load(file)) is not None]
    return [key.removeprefix(f"{repo}@") for key in keys if key.startswith(f"{repo}@")]


def _listed(source: WeightFiles, *, reads: bool) -> dict[str, WeightFile]:
    """Those files whose digests the hub says."""
    hub = source.hub
    if hub is None or hub.failure is not None:
        return {}
    found = {}
    for name in source.names:
        file = hub.files.get(name)
        if file is not None and reads and not SHA256.fullmatch(file.digest) and not (source.folder / name).exists():
            file = hub.head(name)
            if not SHA256.fullmatch(file.digest) and file.size_bytes <= FETCHED_BYTES:
                hub.fetch([name])
        if file is not None and SHA256.fullmatch(file.digest):
            found[name] = WeightFile(name, file.size_bytes, file.digest)
    return found


def _folder() -> Path:
    return cache_folder() / "manifests"


def _path(source: WeightFiles) -> Path:
    return _folder() / f"{hashlib.sha256(source.key.encode()).hexdigest()[:32]}.json"


def _load(file: Path) -> tuple[str, Manifest] | None:
    """What a manifest is of, and the manifest; None where there is none that can be read."""
    try:
        with file.open("rb") as opened:
            content = strict_json(opened.read(MAX_FILE_BYTES))
        if content["version"] != _VERSION:
            return None
        manifest = Manifest.of((WeightFile(*row) for row in content["files"]), content["commit"])
        return str(content["of"]), decode_manifest(encode_manifest(manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LocalProtocolError):
        return None


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
