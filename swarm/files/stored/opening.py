"""Which source a model's tensors come from, as its files and its config say. Reads headers at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarm.base.errors import UnsupportedModel
from swarm.files.gguf.folder import POINTER
from swarm.files.pretrained import weight_map
from swarm.files.stored.gguf_source import GgufSource
from swarm.files.stored.quantised import QuantisedSource, is_packed, quantisation_of
from swarm.files.stored.source import SafetensorsSource

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig
    from transformers.core_model_loading import WeightRenaming

    from swarm.files.hub import Hub
    from swarm.files.stored.source import WeightSource


def open_source(folder: Path, hub: Hub | None, config: PreTrainedConfig, model: str) -> WeightSource:
    """The tensors of a model whose small files are in a folder.

    Args:
        folder: holds config.json, and the weights' index or the weights themselves.
        hub: whence other files come; None for a folder of the user's.
        config: what `read_config` read.

    Raises:
        UnsupportedModel: there are no weights that Canopy reads.
        HubError: a header cannot be fetched.
    """
    if (folder / POINTER).exists():
        return GgufSource.of(folder, config, model, hub)
    plain = SafetensorsSource.of(folder, model, weight_map(folder, hub, model), hub, _renamings(config))
    quantisation = quantisation_of(config)
    if quantisation is not None:
        return QuantisedSource.of(plain, quantisation, model)
    if (packed := next(filter(is_packed, plain.files), None)) is not None:
        reason = f"{packed} is a part of a quantised weight, and config.json has no quantization_config"
        raise UnsupportedModel(f"{model}: {reason}; take the config.json that was published with these weights")
    return plain


def _renamings(config: PreTrainedConfig) -> tuple[WeightRenaming, ...]:
    """How transformers renames tensors of a model of which the language model is a part; of others its class does."""
    if config.get_text_config() is config:
        return ()
    # Here, because they bring every model's base: a client without a draft needs none.
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    mapping_of: Any = get_checkpoint_conversion_mapping
    return tuple(one for one in mapping_of(config.model_type) or () if type(one) is WeightRenaming)
