"""Which of a model's files hold a span's tensors, and whether there is room for them. Builds no model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import constants

from swarm.errors import HubError, NotEnoughSpace, UnknownModel
from swarm.inference.devices import free_bytes
from swarm.layers import name_layers
from swarm.models.hub import Hub, Progress, find_model
from swarm.models.pretrained import read_config
from swarm.models.stored.opening import open_source
from swarm.models.stored.source import StoredTensor, decoded

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from node.config import ServeConfig
    from swarm.layers import Span
    from swarm.models.stored.source import WeightSource


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk or on the hub."""

    name: str
    folder: Path
    config: PreTrainedConfig
    source: WeightSource
    """Of its tensors."""
    hub: Hub | None = None
    """Whence files are downloaded; None for a folder of the user's."""
    prove: Callable[[Iterable[str]], None] | None = None
    """Refuses files that are not this model's, before tensors are read; None: files are taken as they are."""

    @property
    def weight_map(self) -> Mapping[str, tuple[str, ...]]:
        """The files that hold each tensor, by its name."""
        return self.source.files

    def files(self, tensors: Iterable[str]) -> list[str]:
        """The files that hold some tensors."""
        return sorted({file for name in tensors for file in self.weight_map[name]})

    def missing_bytes(self, tensors: Iterable[str]) -> int:
        """How much of them is still to be downloaded."""
        return 0 if self.hub is None else self.hub.missing_bytes(self.files(tensors))

    def fetch(self, tensors: Iterable[str], progress: Progress | None = None) -> None:
        """Download the files that hold some tensors, and no other.

        Raises:
            UnknownModel: a file is neither here nor to be had.
            HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
            NotEnoughSpace: the disk is full.
            ModelMismatch: a file is not this model's.
        """
        files = self.files(tensors)
        if self.hub is not None:
            self.hub.fetch(files, progress)
        for file in files:
            if not (self.folder / file).exists():
                raise UnknownModel(f"{self.folder}: {file} is missing, which holds some of these layers")
        if self.prove is not None:
            self.prove(files)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
        """Read some tensors as they are stored, fetching their files first.

        Raises:
            UnsupportedModel: a file is damaged.
        """
        asked = set(names)
        self.fetch(asked)
        return self.source.read(asked)

    def tensors(self, names: Iterable[str], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Read some tensors, fetching their files first; what is packed is decoded to this type.

        Raises:
            UnsupportedModel: a file is damaged.
        """
        return decoded(self.read(names), dtype)


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Find a model: a folder, or a hub id, of which only the small files are fetched.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: it has no safetensors, or needs code of its own.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model, revision)
    config = read_config(folder, str(model))
    source = open_source(folder, hub, config, str(model))
    return Checkpoint(folder.name if hub is None else hub.name, folder, config, source, hub)


def open_named(name: str, config: ServeConfig) -> Checkpoint:
    """Find the model that a node serves, by the name that its user or else the swarm gives it.

    Raises:
        UnknownModel: there is no such model; the swarm's name may be a folder on another machine.
        UnsupportedModel, HubError: as `open_checkpoint`.
    """
    try:
        return open_checkpoint(name, config.revision)
    except (UnknownModel, HubError) as error:
        if config.model is not None:
            raise
        raise UnknownModel(f"the swarm calls its model {name}; give your own copy of it as MODEL ({error})") from error


def check_memory(span: Span, needs_bytes: int, layer_bytes: int, device: torch.device | str = "cpu") -> None:
    """Refuse a span that does not fit the device's free memory.

    Raises:
        NotEnoughSpace: says needs, has and how many layers would fit.
    """
    _check("memory", span, (needs_bytes, free_bytes(torch.device(device))), layer_bytes)


def check_disk(checkpoint: Checkpoint, span: Span, tensors: Iterable[str]) -> None:
    """Refuse a download that does not fit the disk.

    Raises:
        NotEnoughSpace: says needs, has and how many layers would fit.
    """
    needs = checkpoint.missing_bytes(tensors)
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    _check("disk", span, (needs, shutil.disk_usage(existing).free), needs // len(span))


def _check(what: str, span: Span, needs_has: tuple[int, int], layer_bytes: int) -> None:
    needs, has = needs_has
    if needs <= has:
        return
    over = -(-(needs - has) // max(layer_bytes, 1))
    fit = max(0, len(span) - over)
    many = "1 layer" if fit == 1 else f"{fit} layers"
    hint = f"{many} would fit: --layers {span.start}-{span.start + fit}" if fit else "not one layer would fit"
    raise NotEnoughSpace(f"{name_layers([span])} need {_gib(needs)} of {what}, {_gib(has)} are free; {hint}")


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
