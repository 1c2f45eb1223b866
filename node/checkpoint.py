"""Where a model's files are, which of them hold a span's tensors, and whether there is room. Builds no model.

Only safetensors are read, and no code that comes with a model is ever run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from swarm.errors import NotEnoughSpace, UnknownModel, UnsupportedModel

if TYPE_CHECKING:
    from swarm.layers import Span

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEXT_PART = "language_model."
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
"""What is fetched of a hub model before anything is known of it: config, index, tokenizer."""

Progress = Callable[[str, int, int], None]
"""Called with a file's name, how many files are done and how many there are."""


@dataclass(frozen=True, slots=True)
class Hub:
    """Where on the hub a checkpoint comes from: exactly one commit; sizes of its files in bytes, where known."""

    repo: str
    commit: str
    file_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk or on the hub; `weight_map` says which file holds each tensor."""

    name: str
    folder: Path
    config: PreTrainedConfig
    weight_map: Mapping[str, str]
    hub: Hub | None = None

    def files(self, tensors: Iterable[str]) -> list[str]:
        """The files that hold some tensors."""
        return sorted({self.weight_map[name] for name in tensors})

    def missing_files(self, tensors: Iterable[str]) -> list[str]:
        """Those of them that are not on this machine."""
        return [file for file in self.files(tensors) if not (self.folder / file).exists()]

    def fetch(self, tensors: Iterable[str], progress: Progress | None = None) -> None:
        """Download the files that hold some tensors, and no other.

        Raises:
            UnknownModel: a file is neither here nor to be had.
        """
        missing = self.missing_files(tensors)
        for done, file in enumerate(missing):
            if progress is not None:
                progress(file, done, len(missing))
            if self.hub is None:
                raise UnknownModel(f"{self.folder}: {file} is missing, which holds some of these layers")
            try:
                hf_hub_download(self.hub.repo, file, revision=self.hub.commit)
            except (OSError, HfHubHTTPError, OfflineModeIsEnabled) as error:
                raise UnknownModel(f"{self.name}: {file} cannot be downloaded ({_first_line(error)})") from error

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read some tensors, fetching their files first."""
        wanted = set(names)
        self.fetch(wanted)
        found: dict[str, torch.Tensor] = {}
        for file in self.files(wanted):
            with safe_open(self.folder / file, framework="pt") as opened:
                stored = {_text_name(name): name for name in opened.keys()}  # noqa: SIM118 - it is no dict
                found |= {name: opened.get_tensor(stored[name]) for name in wanted & stored.keys()}
        return found


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Find a model: a folder, or a hub id, of which only the small files are fetched.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: it has no safetensors.
    """
    folder, hub = Path(model).expanduser(), None
    if not folder.is_dir():
        folder, hub = _open_hub(str(model), revision)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UnknownModel(f"{model}: no config.json that transformers knows ({_first_line(error)})") from error
    weight_map = _text_only(_weight_map(folder, hub))
    return Checkpoint(folder.name if hub is None else hub.repo, folder, config, weight_map, hub)


def check_memory(span: Span, needs_bytes: int, layer_bytes: int, device: torch.device | str = "cpu") -> None:
    """Refuse a span that does not fit the device's free memory.

    Raises:
        NotEnoughSpace: says needs, has and how many layers would fit.
    """
    device = torch.device(device)
    has = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    _check("memory", span, (needs_bytes, has), layer_bytes)


def check_disk(checkpoint: Checkpoint, span: Span, tensors: Iterable[str]) -> None:
    """Refuse a download that does not fit the disk.

    Raises:
        NotEnoughSpace: says needs, has and how many layers would fit.
    """
    sizes = {} if checkpoint.hub is None else checkpoint.hub.file_bytes
    needs = sum(sizes.get(file, 0) for file in checkpoint.missing_files(tensors))
    cache = Path(HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    _check("disk", span, (needs, shutil.disk_usage(existing).free), needs // len(span))


def _check(what: str, span: Span, needs_has: tuple[int, int], layer_bytes: int) -> None:
    needs, has = needs_has
    if needs <= has:
        return
    over = -(-(needs - has) // max(layer_bytes, 1))
    fit = max(0, len(span) - over)
    hint = f"{fit} layers would fit: --layers {span.start}-{span.start + fit}" if fit else "not one layer would fit"
    raise NotEnoughSpace(f"layers {span} need {_gib(needs)} of {what}, {_gib(has)} are free; {hint}")


def _open_hub(model: str, revision: str | None) -> tuple[Path, Hub]:
    if model.startswith((".", "/", "~")):
        raise UnknownModel(f"{model}: no such folder")
    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        folder = Path(snapshot_download(model, revision=info.sha, allow_patterns=SMALL_FILES))
        return folder, Hub(model, info.sha or folder.name, sizes)
    except HFValidationError as error:
        raise UnknownModel(f"{model}: neither a folder nor a hub id") from error
    except (OSError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        try:  # what was downloaded before still serves without the hub
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except (OSError, LocalEntryNotFoundError):
            raise UnknownModel(f"{model}: no such folder, and the hub says: {_first_line(error)}") from error
        return folder, Hub(model, folder.name)


def _weight_map(folder: Path, hub: Hub | None) -> dict[str, str]:
    if (folder / INDEX).exists():
        index: dict[str, dict[str, str]] = json.loads((folder / INDEX).read_text())
        return index["weight_map"]
    try:
        if (folder / SINGLE).exists():
            with safe_open(folder / SINGLE, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), SINGLE)
        if hub is not None and SINGLE in hub.file_bytes:
            header = HfApi().parse_safetensors_file_metadata(hub.repo, SINGLE, revision=hub.commit)
            return dict.fromkeys(header.tensors, SINGLE)
    except (OSError, HfHubHTTPError, SafetensorError) as error:
        raise UnsupportedModel(f"{folder.name}: {SINGLE} cannot be read ({_first_line(error)})") from error
    raise UnsupportedModel(f"{folder.name}: no {SINGLE} and no {INDEX}; only safetensors are read")


def _text_only(weight_map: Mapping[str, str]) -> Mapping[str, str]:
    """Of a model that also sees or hears, the language model, under the names that it has when it is alone."""
    if not any(TEXT_PART in name for name in weight_map):
        return weight_map
    return {_text_name(name): file for name, file in weight_map.items() if TEXT_PART in name or "lm_head" in name}


def _text_name(tensor: str) -> str:
    return tensor.replace(TEXT_PART, "")


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
