"""Weight files without an index: which of a model's files hold its weights, and whether their names are readable.

Reads no file: it is given names of files, and names of tensors from their headers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from swarm.errors import UnknownModel, UnsupportedModel

WEIGHTS = ".safetensors"
MISTRAL_FILE = "consolidated"
"""How Mistral's own weight files begin, which lie beside Hugging Face's or alone."""

MAX_SHARDS = 1000
"""Files without an index whose headers are read, at most."""
NAMED = 3
"""Files that a message names, at most."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors")
_FOREIGN = {
    re.compile(r"^(?:tok_embeddings\.|layers\.\d+\.attention\.w[qkvo]\.)"): (
        "Mistral's own names of tensors",
        "fetch the same model's files with Hugging Face's names (model….safetensors)",
    ),
    re.compile(r"\.lora_[AB]\."): ("a LoRA adapter", "merge it into its model first"),
}


def choose_files(present: Collection[str], model: str) -> list[str]:
    """The files that hold a model's weights where neither an index nor the usual name says so.

    Numbered shards go together: those called model-…, else the only ones. A single file is taken whatever its name.
    Mistral's own file is left aside where there are others.

    Args:
        present: names of all files.
        model: for messages.

    Returns:
        Their names; none where there are no safetensors.

    Raises:
        UnknownModel: a shard is missing.
        UnsupportedModel: it is not clear which files are meant, or there are too many.
    """
    named = sorted(name for name in present if name.endswith(WEIGHTS))
    files = [name for name in named if not name.startswith(MISTRAL_FILE)] or named
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in files:
        if shard := _SHARD.fullmatch(name):
            sets.setdefault((shard["stem"], int(shard["count"])), {})[int(shard["number"])] = name
    usual = [key for key in sets if key[0] == "model"] or list(sets)
    if len(usual) == 1:
        return _complete(sets[usual[0]], usual[0][1], model)
    if usual or len(files) > 1:
        found = _some([next(iter(sets[key].values())) for key in usual] or files)
        advice = "leave one set of shards there" if usual else "rename the one that is meant to model.safetensors"
        raise UnsupportedModel(f"{model}: no index says which weights are meant: {found}; {advice}")
    return files


def merge_headers(held: Mapping[str, Iterable[str]], model: str) -> dict[str, str]:
    """Which file holds each tensor.

    Args:
        held: the tensors of each file.
        model: for messages.

    Raises:
        UnsupportedModel: two files hold a tensor of the same name.
    """
    file_of: dict[str, str] = {}
    for file, tensors in held.items():
        for name in tensors:
            if name in file_of:
                both = f"{name} lies in {file_of[name]} and in {file}"
                raise UnsupportedModel(f"{model}: {both}; remove the file that is not the model's, or add its index")
            file_of[name] = file
    return file_of


def check_names(file_of: Mapping[str, str], model: str) -> None:
    """Refuse tensors under names of another format.

    Raises:
        UnsupportedModel: says which format and what to do.
    """
    for pattern, (what, advice) in _FOREIGN.items():
        if name := next(filter(pattern.search, file_of), None):
            raise UnsupportedModel(f"{model}: {file_of[name]} has {what} ({name}); {advice}")


def _complete(shards: Mapping[int, str], count: int, model: str) -> list[str]:
    """All shards in order; some number them from 0."""
    if count > MAX_SHARDS:
        raise UnsupportedModel(f"{model}: {count} shards without an index; at most {MAX_SHARDS} are read so")
    numbers = range(count) if 0 in shards else range(1, count + 1)
    missing = [number for number in numbers if number not in shards]
    if missing:
        template = next(iter(shards.values()))
        lacks = _some([_numbered(template, number) for number in missing])
        raise UnknownModel(f"{model}: {lacks} missing, and no index says what is in it; fetch all {count} shards")
    return [shards[number] for number in numbers]


def _numbered(shard: str, number: int) -> str:
    match = _SHARD.fullmatch(shard)
    assert match is not None
    width = len(match["number"])
    return f"{match['stem']}-{number:0{width}}-of-{match['count']}{WEIGHTS}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
