"""Which GGUF files a user means: a file, a folder with one model, a model of the hub with a file or its quantisation.

FILE.gguf    FOLDER    OWNER/MODEL:FILE.gguf    OWNER/MODEL:Q4_K_M
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from swarm.base.errors import UnknownModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SUFFIX: Final = ".gguf"
MAGIC: Final = b"GGUF"
"""With which each file begins; here, as whoever looks for files needs nothing that reads weights."""
NAMED: Final = 12
"""Files that a message names, at most."""
MAX_PARTS: Final = 4096
PIECE: Final = re.compile(r"(?P<whole>.+\.gguf)(?:\.part\d+of\d+|-split-[a-z]+)", re.IGNORECASE)
"""Names of pieces of a file that was too large for a server."""

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_HUB_PART: Final = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<part>[\w./-]+)")
_TAG: Final = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|F16|F32)(?:_[A-Z0-9]+)*)$", re.IGNORECASE
)
_SAFE: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][\w.+-]*(?:/[A-Za-z0-9_][\w.+-]*){0,3}")


def split_hub_name(model: str) -> tuple[str, str] | None:
    """Hub id and what follows its colon; None where a name is not of this form."""
    match = _HUB_PART.fullmatch(model)
    return None if match is None else (match["repo"], match["part"])


def local_files(model: Path) -> list[Path] | None:
    """The files of a model on this machine, the first one first; None where there is no GGUF of that name.

    Raises:
        UnknownModel: the file is not there, parts of it are missing, or a folder has several models.
    """
    if model.is_dir():
        return _in_folder(model)
    if PIECE.fullmatch(model.name) and model.exists():
        raise _in_pieces(str(model.parent), (one.name for one in model.parent.iterdir()))
    if model.suffix.lower() != SUFFIX:
        return [model] if _begins_as_gguf(model) else None
    if not model.exists():
        if split_hub_name(str(model)) is not None:
            return None
        raise UnknownModel(f"{model}: no such file")
    return [model.parent / name for name in whole_set(model.name, {one.name for one in model.parent.iterdir()})]


def _in_folder(folder: Path) -> list[Path] | None:
    present = {path.name for path in folder.iterdir()}
    if any(name.endswith(".safetensors") or name.endswith(".safetensors.index.json") for name in present):
        return None
    models = _first_files(present)
    if not models:
        if any(map(PIECE.fullmatch, present)):
            raise _in_pieces(str(folder), present)
        return None
    if len(models) > 1:
        raise UnknownModel(f"{folder}: it has several GGUF files: {_listed(models)}; give one of them")
    return [folder / name for name in whole_set(models[0], present)]


def _begins_as_gguf(file: Path) -> bool:
    """Whether a file of any name is a GGUF file by its first bytes, as Ollama's are."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _in_pieces(where: str, names: Iterable[str]) -> UnknownModel:
    """The error for a file that was cut into pieces of bytes, which no reader of the format joins."""
    pieces = sorted(filter(PIECE.fullmatch, names))
    found = PIECE.fullmatch(pieces[0])
    whole = found["whole"] if found is not None else pieces[0]
    own = [one for one in pieces if one.startswith(whole)]
    return UnknownModel(
        f"{where}: {whole} lies in pieces; fetch all and join them: cat {' '.join(own[:NAMED])} > {whole}"
    )


def hub_files(repo: str, part: str, names: Iterable[str]) -> list[str]:
    """The files of a model on the hub, the first one first.

    Args:
        part: a file's name, or how one ends: `Q4_K_M`; empty for the only one that there is.

    Raises:
        UnknownModel: none or several are meant; the message says which there are.
    """
    names = list(names)
    present = {name for name in names if name.lower().endswith(SUFFIX)}
    models = _first_files(present)
    if not models and any(map(PIECE.fullmatch, names)):
        raise _in_pieces(repo, names)
    choices = f"it has {_listed(models, repo)}" if models else "it has no GGUF files"
    if not part and len(models) == 1:
        return whole_set(models[0], present)
    if not part:
        raise UnknownModel(f"{repo}: which of its GGUF files? {choices}")
    exact = sorted(name for name in present if part in (name, PurePosixPath(name).name, stem_of(name)))
    found = exact[:1] if exact else [name for name in models if _ends_with(stem_of(name), part)]
    if not found:
        raise UnknownModel(f"{repo}: no file {part!r}; {choices}")
    if len(found) > 1:
        raise UnknownModel(f"{repo}: several files {part!r}: {_listed(found)}; give the name of one")
    return whole_set(found[0], present)


def whole_set(name: str, present: Iterable[str]) -> list[str]:
    """All parts of a file that is split, by one of their names; a file alone is its own.

    Raises:
        UnknownModel: a part is missing.
    """
    path = PurePosixPath(name)
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [name]
    count, there = int(match["count"]), set(present)
    if not 0 < count <= MAX_PARTS:
        raise UnknownModel(f"{name}: {count} parts of one model cannot be")
    parts = [str(path.with_name(f"{match['stem']}-{one:05}-of-{count:05}{path.suffix}")) for one in range(1, count + 1)]
    if missing := [one for one in parts if one not in there]:
        raise UnknownModel(f"{name}: {len(missing)} of its {count} parts are missing, such as {missing[0]}")
    return parts


def stem_of(name: str) -> str:
    """A file's name without suffix, folder and the number of its part."""
    stem = PurePosixPath(name).stem
    match = _PART.fullmatch(stem)
    return stem if match is None else match["stem"]


def hub_name(repo: str, file: str, names: Iterable[str]) -> str:
    """What a model of the hub is called in a swarm: by its quantisation where this names one file, else by its file."""
    tag = _tag_of(file)
    others = [one for one in _first_files({*names, file}) if _tag_of(one) == tag]
    return f"{repo}:{tag if tag and len(others) == 1 else stem_of(file)}"


def is_safe(name: str) -> bool:
    """Whether a file of the hub may be kept under its name."""
    return len(name) <= 250 and _SAFE.fullmatch(name) is not None


def _tag_of(name: str) -> str:
    match = _TAG.search(stem_of(name))
    return "" if match is None else match[1].upper()


def _ends_with(stem: str, part: str) -> bool:
    """Whether a part is the last word of a name; a quantisation may follow a `_`, though it has such itself."""
    before = "-._" if _TAG.fullmatch(part) else "-."
    return re.search(rf"(?:^|[{before}]){re.escape(part)}$", stem, re.IGNORECASE) is not None


def _first_files(names: Iterable[str]) -> list[str]:
    """Of all files those that name a model each: no second parts, no eyes."""
    firsts = []
    for name in names:
        path = PurePosixPath(name)
        match = _PART.fullmatch(path.stem)
        is_first = match is None or int(match["number"]) == 1
        if path.suffix.lower() == SUFFIX and is_first and not path.name.lower().startswith("mmproj"):
            firsts.append(name)
    return sorted(firsts)


def _listed(names: Sequence[str], repo: str = "") -> str:
    """Some names, as one gives them."""
    tags = [hub_name(repo, name, names) if repo else name for name in names]
    more = f" and {len(tags) - NAMED} more" if len(tags) > NAMED else ""
    return ", ".join(tags[:NAMED]) + more
