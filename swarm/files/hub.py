"""A model's files, here or from one commit of the hub. Fetches safetensors, GGUF and small text files, nothing else.

    find_model ──▶ config, index and tokenizer are in a folder ──▶ Hub.fetch puts chosen weight files beside them

Files lie in Hugging Face's own cache, which other programs share. Code that comes with a model is never fetched.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported where mypy does not look
    WeakFileLock,
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    silent_tqdm,
)

from swarm.base.errors import HubError, SwarmError, UnknownModel, UnsupportedModel
from swarm.files.gguf.container import GgufHeader, ShortHeader, parse_header, read_header
from swarm.files.gguf.folder import GgufFile, local_folder, model_folder, remember, remembered
from swarm.files.gguf.naming import SUFFIX, hub_files, hub_name, is_safe, local_files, split_hub_name
from swarm.files.hub_errors import FETCH_ERRORS, StorePlace, check_token, explain
from swarm.files.parts.byte_ranges import ByteRanges
from swarm.files.parts.part_file import PartFile, part_names, parts_folder
from swarm.files.parts.range_download import AnotherFile, RangeDownload
from swarm.files.tensor_header import TensorHeader
from swarm.protocol.manifest import SHA256

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling


SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""Files of a hub model that are fetched first: config, index, tokenizer."""
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
"""Of an adapter of PEFT, which reading its config refuses."""
WEIGHTS = "*.safetensors"
FIRST_BYTES = 1 << 20
"""Of a GGUF file's beginning, which are fetched to read its header; four times as many while it goes on."""
MAX_CONFIG_BYTES = 1 << 20
"""Of a config that is fetched for a plan: its name came from a swarm."""
ANSWER_TIMEOUT_S = 10
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes of all files that are here, and the bytes of all files."""


class DamagedFile(Exception):
    """The bytes that arrived are not those of the file."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """Where a file of a snapshot goes.

    Attributes:
        snapshot_path: the file's path in the snapshot of its commit.
        digest: SHA-256 or git's blob id, and the file's name among the blobs; empty if unknown.
    """

    snapshot_path: Path
    digest: str
    size_bytes: int

    @property
    def blob(self) -> Path:
        """The file's contents; equal files of several commits share one blob."""
        return self._cache / "blobs" / self.digest

    @property
    def partial(self) -> Path:
        """The part that has arrived, while it is not complete."""
        return self.blob.with_name(f"{self.digest}.incomplete")

    @property
    def lock(self) -> Path:
        """Lock file of the one program that downloads it."""
        return self._cache.parent / ".locks" / self._cache.name / f"{self.digest}.lock"

    @property
    def _cache(self) -> Path:
        return next(path.parent for path in self.snapshot_path.parents if path.name == "snapshots")

    def bytes_here(self) -> int:
        """How many bytes of it need no download."""
        here = next((path.stat().st_size for path in (self.blob, self.partial) if path.is_file()), 0)
        return min(here, self.size_bytes)


def download(url: str, target: SnapshotFile, report: Callable[[int], None] | None = None) -> None:
    """Download a file into the cache. A broken connection is tried again five times while nothing more arrives.

    Args:
        url: where it is; redirections are followed without the token.
        report: called with how many bytes are here; None shows Hugging Face's bar on a terminal.

    Raises:
        DamagedFile: what arrived is not the file; it was deleted.
        OSError, httpx.HTTPError: it cannot be fetched or stored; what has arrived stays for the next time.
    """
    for path in (target.blob, target.snapshot_path, target.lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(target.lock):
        if not target.blob.exists():
            _complete(url, target, report)
            target.partial.replace(target.blob)
        _link(target)


def _complete(url: str, target: SnapshotFile, report: Callable[[int], None] | None) -> None:
    with _BoundedFile(target, report) as partial:
        here = partial.tell()
        if here < target.size_bytes:
            # Compressed on the way, a file could not be resumed at a byte of its own.
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            bar = None if report is None else silent_tqdm
            http_get(url, partial, resume_size=here, headers=headers, tqdm_class=bar)
    if _digest(target) != target.digest:
        target.partial.unlink()
        raise DamagedFile


class _BoundedFile(io.BufferedWriter):
    """The partial file, opened at its end; refuses to grow beyond the file's size."""

    def __init__(self, target: SnapshotFile, report: Callable[[int], None] | None) -> None:
        super().__init__(io.FileIO(target.partial, "ab"))
        self._size, self._report = target.size_bytes, report

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self._size:
            self.truncate(0)
            raise DamagedFile
        written = super().write(data)
        if self._report is not None:
            self._report(self.tell())
        return written


def _digest(target: SnapshotFile) -> str:
    git = hashlib.sha1(f"blob {target.size_bytes}\0".encode(), usedforsecurity=False)
    with target.partial.open("rb") as opened:
        return hashlib.file_digest(opened, hashlib.sha256 if len(target.digest) == 64 else lambda: git).hexdigest()


def _link(target: SnapshotFile) -> None:
    if target.snapshot_path.exists():
        return
    target.snapshot_path.unlink(missing_ok=True)
    try:
        target.snapshot_path.symlink_to(os.path.relpath(target.blob, target.snapshot_path.parent))
    except OSError:  # a file system without links: the cache's rules put the file into the snapshot itself
        target.blob.replace(target.snapshot_path)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file on the hub.

    Attributes:
        digest: SHA-256, or git's blob id of a small file; empty where the hub does not list it.
    """

    size_bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Hub:
    """One commit of a hub model and the cache folder for its files.

    Attributes:
        folder: of the commit's snapshot in the cache.
        files: what the hub lists, by name; empty when the hub did not answer.
        failure: why it did not answer, else None.
        part: which of its GGUF models is meant; empty for a model of transformers.
    """

    repo: str
    commit: str
    folder: Path
    files: Mapping[str, HubFile] = field(default_factory=dict)
    failure: Exception | None = None
    part: str = ""

    @property
    def name(self) -> str:
        """What the model is called in a swarm: whoever gives this name finds it."""
        return f"{self.repo}:{self.part}" if self.part else self.repo

    def missing_bytes(self, names: Iterable[str]) -> int:
        """How many bytes of these files are not on this machine yet."""
        missing = [
            (name, self.files[name]) for name in names if not (self.folder / name).exists() and name in self.files
        ]
        return sum(file.size_bytes - self._target(name, file).bytes_here() for name, file in missing)

    def fetch(self, names: Iterable[str], report: Progress | None = None) -> None:
        """Download those of these files that are not here; what an interrupted download left is completed.

        Raises:
            UnknownModel: a file is neither here nor on the hub.
            HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
            NotEnoughSpace: the disk is full.
        """
        missing = [(name, self._listed(name)) for name in names if not (self.folder / name).exists()]
        before, total = 0, sum(file.size_bytes for _, file in missing)
        for name, file in missing:
            self._fetch(name, file, None if report is None else partial(_report_total, report, name, before, total))
            before += file.size_bytes

    def file_names(self) -> set[str]:
        """Of the files that the hub lists; where it does not answer, of those of which parts are here."""
        return set(self.files) if self.failure is None else part_names(self.repo, self.commit)

    def part_file(self, name: str) -> PartFile | None:
        """The part of a file that is here, or comes to be; None where nothing says which contents it is to have."""
        file = self.files.get(name)
        if file is None:
            return PartFile.named((self.repo, self.commit, name)) if self.failure is not None else None
        return PartFile(file.digest, file.size_bytes) if SHA256.fullmatch(file.digest) else None

    def fetch_ranges(self, name: str, wanted: ByteRanges, report: Callable[[int], None] | None = None) -> None:
        """Download those of these bytes of a file that are not here, into its part.

        A file that is here in full now is compared with its digest, and is then as one that was fetched whole.

        Args:
            name: of a file with a part.
            wanted: bytes of it.
            report: called with how many bytes have arrived.

        Raises:
            NoRanges: the server sends whole files alone.
            HubError: the hub refuses, cannot be reached, or has another file now.
            NotEnoughSpace: the disk is full.
        """
        part = self.part_file(name)
        assert part is not None
        if part.here().covers(wanted):
            return
        if self.failure is not None:
            raise explain(self.failure, self.repo, name) from self.failure
        url = hf_hub_url(self.repo, name, revision=self.commit)
        try:
            with part.locked():
                RangeDownload(url, part, report or (lambda _: None)).fetch(wanted, (self.repo, self.commit, name))
                if part.here().size_bytes == part.size_bytes:
                    self._complete(name, part)
        except AnotherFile:
            raise HubError(f"{self.repo}: {name}: the hub sends another file than it lists; run this again") from None
        except FETCH_ERRORS as error:
            raise explain(error, self.repo, name, StorePlace(parts_folder(), "XDG_CACHE_HOME")) from error

    def _complete(self, name: str, part: PartFile) -> None:
        """Compare a file that is here in full with its digest; put it to the whole ones, if its disk is theirs.

        The part stays until the whole file is there, so that another program finds one of them.
        """
        target = self._target(name, self.files[name])
        try:
            if part.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE and _linked(part.data, target.partial):
                download(hf_hub_url(self.repo, name, revision=self.commit), target)
            elif not part.is_right():
                raise DamagedFile
        except DamagedFile:
            part.forget()
            raise HubError(f"{self.repo}: {name} arrived damaged and was deleted; run this again") from None

    def tensor_names(self, file: str) -> list[str]:
        """The tensors of a safetensors file that stays on the hub; only its header is read.

        Raises:
            HubError: it cannot be fetched.
            UnsupportedModel: it is no safetensors file.
        """
        return list(self.tensor_headers(file))

    def tensor_headers(self, file: str) -> dict[str, TensorHeader]:
        """Types and shapes of these tensors; raises as `tensor_names`."""
        try:
            header = HfApi().parse_safetensors_file_metadata(self.repo, file, revision=self.commit)
        except SafetensorsParsingError:
            raise UnsupportedModel(f"{self.repo}: {file} cannot be read; the file on the hub is damaged") from None
        except FETCH_ERRORS as error:
            raise explain(error, self.repo, file) from error
        # The format allows no gap and nothing behind the last tensor, so sizes say where the first one begins.
        ends = max((one.data_offsets[1] for one in header.tensors.values()), default=0)
        first = self.files[file].size_bytes - ends if file in self.files else 0
        return {
            name: TensorHeader(str(one.dtype), tuple(one.shape), first + start, end - start)
            for name, one in header.tensors.items()
            for start, end in [one.data_offsets]
        }

    def head(self, name: str) -> HubFile:
        """Size and digest of a file that the hub lists without them.

        Raises:
            HubError: the hub refuses or cannot be reached.
        """
        try:
            url = hf_hub_url(self.repo, name, revision=self.commit)
            about = get_hf_file_metadata(url, timeout=ANSWER_TIMEOUT_S)
        except FETCH_ERRORS as error:
            raise explain(error, self.repo, name) from error
        digest = about.etag or ""
        return HubFile(about.size or 0, digest if DIGEST.fullmatch(digest) else "")

    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        """Some bytes of a file that stays on the hub; fewer where it ends before.

        Raises:
            HubError: they cannot be fetched.
        """
        url, wanted = hf_hub_url(self.repo, name, revision=self.commit), f"bytes={start}-{start + count - 1}"
        headers = build_hf_headers() | {"Range": wanted, "Accept-Encoding": "identity"}
        taken = bytearray()
        try:
            with get_session().stream("GET", url, headers=headers, timeout=ANSWER_TIMEOUT_S) as response:
                hf_raise_for_status(response)
                if response.status_code != 206 and start:
                    raise ValueError("no range")
                for piece in response.iter_bytes():
                    taken += piece
                    if len(taken) >= count:
                        break
        except FETCH_ERRORS as error:
            raise explain(error, self.repo, name) from error
        return bytes(taken[:count])

    def _listed(self, name: str) -> HubFile:
        is_plain = "/" not in name and "\\" not in name and any(fnmatch(name, kind) for kind in (*SMALL_FILES, WEIGHTS))
        if not is_plain and not (name.endswith(SUFFIX) and is_safe(name)):
            raise UnsupportedModel(f"{self.repo}: {name!r} is not fetched; only safetensors and GGUF are read")
        if name in self.files:
            return self.files[name]
        if self.failure is not None:
            raise explain(self.failure, self.repo, name) from self.failure
        raise UnknownModel(f"{self.repo}: {name}: the hub has no such file; the model there is incomplete")

    def _fetch(self, name: str, file: HubFile, report: Callable[[int], None] | None) -> None:
        try:
            if file.digest and file.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                download(hf_hub_url(self.repo, name, revision=self.commit), self._target(name, file), report)
            else:
                hf_hub_download(self.repo, name, revision=self.commit)
        except DamagedFile:
            raise HubError(f"{self.repo}: {name} arrived damaged and was deleted; run this again") from None
        except FETCH_ERRORS as error:
            raise explain(error, self.repo, name) from error

    def _target(self, name: str, file: HubFile) -> SnapshotFile:
        return SnapshotFile(self.folder / name, file.digest, file.size_bytes)


def _linked(source: Path, target: Path) -> bool:
    """Whether a file could be put to another name too; not on another disk."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.hardlink_to(source)
    except OSError:
        return False
    return True


def _report_total(report: Progress, name: str, before: int, total: int, here: int) -> None:
    report(name, before + here, total)


def find_model(model: str | Path, revision: str | None = None) -> tuple[Path, Hub | None]:
    """Find a model's small files, and fetch them if it is on the hub.

    Files that are in the cache already serve when the hub cannot be reached or refuses. Of a GGUF model they are made
    of the file's header, which is all that is fetched.

    Args:
        model: a folder, a GGUF file, a hub id, or a hub id, a colon and a GGUF file's name or quantisation.
        revision: branch, tag or commit on the hub; None for its default branch.

    Returns:
        The folder of the small files, and the commit on the hub for a hub id, else None.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: it is no model of transformers.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder = Path(model).expanduser()
    if (files := local_files(folder)) is not None:
        return local_folder(files), None
    if folder.is_dir():
        return folder, None
    if folder.is_file() or str(model).startswith((".", "/", "~")):
        reason = "is no GGUF file; name the folder that it is in" if folder.is_file() else "no such folder"
        raise UnknownModel(f"{model}: {reason}")
    repo, part = split_hub_name(str(model)) or (str(model), "")
    asked = f"{model}@{revision or ''}"
    try:
        hub = _open(repo, revision, f"*{SUFFIX}" if part else CONFIG)
    except SwarmError as error:
        if (known := _gguf_seen(asked, repo, error)) is not None:
            return known
        raise
    if part or _has_gguf_alone(hub):
        folder, hub = _gguf_of(hub, part)
        remember(asked, folder, hub.commit, hub.part)
        return folder, hub
    small = [name for name in hub.files if "/" not in name and any(fnmatch(name, kind) for kind in SMALL_FILES)]
    if hub.failure is None and not {CONFIG, ADAPTER}.intersection(small):
        raise UnsupportedModel(f"{model}: has no {CONFIG}, so it is no model of transformers; choose another one")
    hub.fetch(sorted(small, key=lambda name: name == CONFIG))  # last: with it, the others are there too
    return hub.folder, hub


def find_config(repo: str) -> Path:
    """The folder of a hub model's config, which alone is fetched if it is not here.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: it has no config, or one of more than a mebibyte.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    hub = _open(repo, None)
    if hub.failure is None and not 0 < hub.files.get(CONFIG, HubFile(0)).size_bytes <= MAX_CONFIG_BYTES:
        raise UnsupportedModel(f"{repo}: has no {CONFIG} that could be read")
    hub.fetch([CONFIG])
    return hub.folder


def _has_gguf_alone(hub: Hub) -> bool:
    """Whether a model of the hub has no weights of transformers', though it may have a config."""
    kinds = {Path(name).suffix for name in hub.files}
    return SUFFIX in kinds and ".safetensors" not in kinds


def _gguf_of(hub: Hub, part: str) -> tuple[Path, Hub]:
    """The folder of one of the GGUF models of the hub."""
    here = {str(path.relative_to(hub.folder)) for path in hub.folder.rglob(f"*{SUFFIX}")}
    present = {name for name in (*hub.files, *here) if is_safe(name)}
    names = hub_files(hub.repo, part, present)
    called = hub_name(hub.repo, names[0], present)
    sizes = {name: hub.files[name].size_bytes if name in hub.files else None for name in names}
    key = [hub.repo, hub.commit, sizes]
    folder = model_folder(called, key, lambda: [_gguf_file(hub, name) for name in names])
    return folder, replace(hub, part=called.partition(":")[2])


def _gguf_seen(asked: str, repo: str, error: SwarmError) -> tuple[Path, Hub] | None:
    """What a client made of a header once, where the hub does not answer and no file lies in its cache."""
    known = remembered(asked)
    if known is None:
        return None
    folder, commit, part = known
    snapshot = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "snapshots" / commit
    cause = error.__cause__
    return folder, Hub(repo, commit, snapshot, failure=cause if isinstance(cause, Exception) else error, part=part)


def _gguf_file(hub: Hub, name: str) -> GgufFile:
    path = hub.folder / name
    if path.exists():
        return GgufFile(name, path, path.stat().st_size, read_header(path), partial(hub.read_bytes, name))
    size = hub.files[name].size_bytes
    return GgufFile(name, path, size, _fetched_header(hub, name, size), partial(hub.read_bytes, name))


def _fetched_header(hub: Hub, name: str, size: int) -> GgufHeader:
    """The header of a file that stays on the hub."""
    data = bytearray()
    while len(data) < size:
        wanted = min(size, max(FIRST_BYTES, 4 * len(data))) - len(data)
        data += (piece := hub.read_bytes(name, len(data), wanted))
        try:
            return parse_header(data, size, f"{hub.repo}: {name}")
        except ShortHeader:
            if len(piece) < wanted:
                break
    raise UnsupportedModel(f"{hub.repo}: {name}: cut off: it ends within its header; choose another file")


def _open(repo: str, revision: str | None, needed: str = CONFIG) -> Hub:
    check_token()
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=ANSWER_TIMEOUT_S, files_metadata=True)
        commit = info.sha or ""
        if DIGEST.fullmatch(commit) is None:
            raise ValueError("no commit")
        files = {file.rfilename: _hub_file(file) for file in info.siblings or ()}
        cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
        hub = Hub(repo, commit, cache / "snapshots" / commit, files)
        _remember(cache, revision or constants.DEFAULT_REVISION, commit)
    except FETCH_ERRORS as error:
        return _cached(repo, revision, error, needed)
    return hub


def _hub_file(file: RepoSibling) -> HubFile:
    digest = (file.blob_id if file.lfs is None else file.lfs.sha256) or ""
    is_known = file.size is not None and DIGEST.fullmatch(digest) is not None
    return HubFile(file.size or 0, digest if is_known else "")


def _remember(cache: Path, revision: str, commit: str) -> None:
    """Note in the cache which commit a branch or tag stands for, for when the hub cannot be reached."""
    if revision != commit:
        (cache / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (cache / "refs" / revision).write_text(commit)


def _cached(repo: str, revision: str | None, failure: Exception, needed: str) -> Hub:
    """The commit as it lies in the cache, where it has files of this pattern.

    Raises:
        SwarmError: it does not; the error is the hub's failure, explained.
    """
    error: SwarmError = explain(failure, repo, "" if revision is None else f"revision {revision}")
    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[needed]))
    except (OSError, ValueError):
        raise error from failure
    if not any(path.exists() for path in folder.rglob(needed)):
        raise error from failure
    return Hub(repo, folder.name, folder, failure=failure)
