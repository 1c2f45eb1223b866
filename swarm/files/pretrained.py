"""Weight and tokenizer files of a model whose small files are in a folder. With or without an
index of weights. Code that comes with it is never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from safetensors import SafetensorError, safe_open

from swarm.base.errors import UnknownModel, UnsupportedModel
from swarm.files.gguf.folder import POINTER, TensorTable
from swarm.files.hub_errors import explain
from swarm.files.parts.reading import header_file

if TYPE_CHECKING:
    from swarm.files.hub import Hub


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


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEXT_PART = r"(?:language|text)_model\."
"""Prefix of the language model's tensors in a multimodal checkpoint; alone, the language model's names lack it."""
HEADERS_AT_ONCE = 8
SAYS_WHAT_FITS: Final[dict[str, Any]] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""How `from_pretrained` leaves it to `misfit` to say what does not fit."""
OTHER_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".pt", ".pth"}


def choose_files(present: Collection[str], model: str) -> list[str]:
    """The files that hold a model's weights where neither an index nor the usual name says so.

    Numbered shards go together: those called model-…, else the only ones. A single file is taken whatever its name.
    Mistral's own file is left aside where there are others.

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


def check_own_code(file: Path, model: str) -> None:
    """Refuse a config or tokenizer that could be read only by code that comes with the model.

    Args:
        file: what could not be read.

    Raises:
        UnsupportedModel: it asks for such code.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(content, dict) and "auto_map" in content:
        reason = f"needs code that comes with it ({file.name}), and such code is never run"
        raise UnsupportedModel(f"{model}: {reason}; choose another model") from None


def weight_files(folder: Path, hub: Hub | None, model: str) -> list[str]:
    """Names of the files that hold a model's weights, here or on the hub.

    A single file of the usual name goes before an index, as in transformers. Without either, numbered shards do.

    Raises:
        UnknownModel: a shard is missing.
        UnsupportedModel: they are neither safetensors nor GGUF, or it is not clear which files are meant.
        HubError: there is no index, and the hub does not say which files there are.
    """
    if (folder / POINTER).exists():
        return sorted(TensorTable.read(folder).sizes)
    present = {path.name for path in folder.iterdir()} | (hub.file_names() if hub else set())
    if SINGLE in present:
        return [SINGLE]
    if INDEX in present:
        return sorted(set(_index(folder, model).values()))
    try:
        files = choose_files(present, model)
    except UnknownModel:
        if hub is None or hub.failure is None:
            raise
        files = []
    if files:
        return files
    if hub is not None and hub.failure is not None:
        raise explain(hub.failure, hub.repo, "its weights") from hub.failure
    others = sorted(name for name in present if Path(name).suffix in OTHER_WEIGHTS and name != "training_args.bin")
    found = f"; it has {others[0]}" if others else ""
    raise UnsupportedModel(f"{model}: no {SINGLE} and no {INDEX}{found}; only safetensors are read")


def weight_map(folder: Path, hub: Hub | None, model: str) -> Mapping[str, str]:
    """Which file holds each tensor. Of files on the hub that no index describes only the headers are read.

    Raises:
        UnknownModel: a shard is missing.
        UnsupportedModel: the weights are no safetensors, cannot be read, or have names of another format.
        HubError: a header cannot be fetched.
    """
    files = weight_files(folder, hub, model)
    if files != [SINGLE] and (folder / INDEX).exists():
        file_of = _index(folder, model)
    else:
        with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
            headers = pool.map(lambda file: _header(folder, hub, file, model), files)
            file_of = merge_headers(dict(zip(files, headers, strict=True)), model)
    check_names(file_of, model)
    return file_of


def _header(folder: Path, hub: Hub | None, file: str, model: str) -> list[str]:
    try:
        here = header_file(folder / file, file, hub)
        if here is None and hub is not None:
            return hub.tensor_names(file)
        with safe_open(here or folder / file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise unreadable_weights(model, folder / file, error) from error


def unreadable_weights(model: str, file: Path, error: Exception) -> UnsupportedModel:
    """The error for a damaged weight file."""
    return UnsupportedModel(f"{model}: {file} cannot be read ({first_line(error)}); delete it and fetch it again")


def misfit(info: Mapping[str, Iterable[object]]) -> str | None:
    """Which tensors do not fit their class, as `from_pretrained` says with `output_loading_info`; None where all do."""
    for problem in ("missing_keys", "unexpected_keys"):
        if loose := sorted(map(str, info[problem])):
            return f"{len(loose)} {problem.replace('_', ' ')}, such as {loose[0]}"
    others = sorted((str(name), *map(list, shapes)) for name, *shapes in cast("Any", info["mismatched_keys"]))
    if not others:
        return None
    name, found, expected = others[0]
    more = f" ({len(others)} do not fit)" if len(others) > 1 else ""
    return f"{name} has the shape {found}, and by the config {expected}{more}"


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its type's name."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _index(folder: Path, model: str) -> dict[str, str]:
    try:
        content: Any = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files: dict[str, str] = dict(content["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsupportedModel(f"{model}: {INDEX} cannot be read ({first_line(error)})") from error
    for file in files.values():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise UnsupportedModel(f"{model}: {INDEX} names {file!r}; only safetensors are read, beside the index")
    return files
