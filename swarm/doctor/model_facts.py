"""How large a model is: in a folder, in the hub's cache, or on the hub. Downloads nothing but a list of files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.errors import SwarmError

CPU_GROWTH: Final = 2
"""A CPU computes in fp32: twice the bytes of a checkpoint of 16-bit weights."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model that was named.

    Attributes:
        total_bytes: of its weights; None if unknown.
        missing_bytes: of them, to be downloaded yet; None if unknown.
        num_layers: None if unknown.
        growth: how many times as much the weights take in a CPU's memory.
    """

    total_bytes: int | None = None
    missing_bytes: int | None = None
    num_layers: int | None = None
    growth: int = CPU_GROWTH

    @property
    def layer_bytes(self) -> int | None:
        """About what a layer takes in a CPU's memory, embeddings shared out among all; None if unknown."""
        if not self.total_bytes or not self.num_layers:
            return None
        return self.growth * self.total_bytes // self.num_layers


def facts_of_folder(folder: Path, missing_bytes: int | None = 0, total_bytes: int | None = None) -> ModelFacts:
    """What a folder with a `config.json` says.

    Args:
        folder: of the model, or of its snapshot in the cache.
        missing_bytes: as `ModelFacts` has it.
        total_bytes: of the weights, where not all of them lie there.
    """
    if total_bytes is None:
        total_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layers = config.get("num_hidden_layers", (config.get("text_config") or {}).get("num_hidden_layers"))
    except (OSError, ValueError, AttributeError):
        layers = None
    return ModelFacts(total_bytes, missing_bytes, layers if isinstance(layers, int) and layers > 0 else None)


def facts_of_file(file: Path) -> ModelFacts:
    """What a GGUF file on this machine says; nothing where it cannot be read."""
    from swarm.models.gguf.container import read_header
    from swarm.models.gguf.naming import local_files

    try:
        files = local_files(file) or [file]
        header = read_header(files[0])
        total = sum(one.stat().st_size for one in files)
    except (SwarmError, OSError):
        return ModelFacts()
    layers = header.number(f"{header.text('general.architecture')}.block_count")
    return ModelFacts(total, 0, layers, growth=1)  # packed weights stay packed
