"""Which of a model's files hold a span's tensors, and whether there is room for them. Builds no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swarm.base.errors import HubError, NotEnoughSpace, UnknownModel
from swarm.base.layers import name_layers
from swarm.compute.devices import free_bytes
from swarm.files.hub import Hub, Progress, find_model
from swarm.files.model_config import read_config
from swarm.files.stored.opening import open_source
from swarm.files.stored.source import StoredTensor, decoded
from swarm.files.tensor_files import FileFetch, existing, fetch_tensors, free_disk, plan_fetch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from node.model.config import ServeConfig
    from swarm.base.layers import Span
    from swarm.files.stored.source import WeightSource

logger = logging.getLogger(__name__)


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

    def plan(self, tensors: Iterable[str]) -> list[FileFetch]:
        """What is still to be downloaded for some tensors, of each file that is not here whole.

        Raises:
            HubError: the header of a file cannot be fetched.
        """
        return [] if self.hub is None else plan_fetch(self.source, self.hub, tensors)

    def missing_bytes(self, tensors: Iterable[str]) -> int:
        """How much is still to be downloaded for some tensors; raises as `plan`."""
        return sum(one.missing_bytes for one in self.plan(tensors))

    def fetch(
        self, tensors: Iterable[str], progress: Progress | None = None, say: Callable[[str], None] = logger.info
    ) -> None:
        """Download what some tensors need, and is not here: whole files, or ranges of large ones.

        Raises:
            UnknownModel: a file is neither here nor to be had.
            HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
            NotEnoughSpace: the disk is full.
            ModelMismatch: a file is not this model's.
        """
        asked = set(tensors)
        files = self.files(asked)
        if self.hub is not None:
            fetch_tensors(self.source, self.hub, asked, progress, say)
        for file in files:
            if not self._is_here(file):
                raise UnknownModel(f"{self.folder}: {file} is missing, which holds some of these layers")
        if self.prove is not None:
            self.prove(files)

    def _is_here(self, file: str) -> bool:
        part = None if self.hub is None else self.hub.part_file(file)
        return (self.folder / file).exists() or (part is not None and part.is_here)

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
    """Refuse a download that does not fit the disk, or the two disks that it is kept on.

    Raises:
        NotEnoughSpace: says needs, has and how many layers would fit.
        HubError: the header of a file cannot be fetched.
    """
    needs: dict[int, tuple[int, int]] = {}
    for one in checkpoint.plan(tensors):
        disk = existing(one.folder).stat().st_dev
        before, _ = needs.get(disk, (0, 0))
        needs[disk] = (before + one.missing_bytes, free_disk(one.folder))
    for needs_has in needs.values():
        _check("disk", span, needs_has, needs_has[0] // len(span))


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
