"""Which source a model's tensors come from, as its files and its config say. Reads headers at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.models.gguf.folder import POINTER
from swarm.models.pretrained import weight_map
from swarm.models.stored.gguf_source import GgufSource
from swarm.models.stored.quantised import QuantisedSource, quantisation_of
from swarm.models.stored.source import SafetensorsSource

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from swarm.models.hub import Hub
    from swarm.models.stored.source import WeightSource


def open_source(folder: Path, hub: Hub | None, config: PreTrainedConfig, model: str) -> WeightSource:
    """The tensors of a model whose small files are in a folder.

    Args:
        folder: holds config.json, and the weights' index or the weights themselves.
        hub: whence other files come; None for a folder of the user's.
        config: what `read_config` read.
        model: its name, for messages.

    Raises:
        UnsupportedModel: there are no weights that Canopy reads.
        HubError: a header cannot be fetched.
    """
    if (folder / POINTER).exists():
        return GgufSource.of(folder, config, model, hub)
    plain = SafetensorsSource.of(folder, model, weight_map(folder, hub, model), hub)
    quantisation = quantisation_of(config)
    return plain if quantisation is None else QuantisedSource.of(plain, quantisation, model)
