"""A model as a node of some numeric class computes with it, to recompute what such nodes signed. Serves nobody."""

from __future__ import annotations

import logging
from typing import Final

from node.model.checkpoint import open_checkpoint
from node.model.config import ServeConfig
from node.model.loading import load
from node.model.span import SpanModel, dissect
from swarm.base.errors import ConfigError
from swarm.base.layers import Span
from swarm.base.library_logging import bars_hidden
from swarm.compute.weights.format import BITS
from swarm.protocol.numeric_class import NumericClass, without_rounding

NAMES: Final = {bits: name for name, bits in BITS.items()}

logger = logging.getLogger(__name__)


def load_in_class(name: str, numeric_class: str, layers: Span | None = None) -> SpanModel:
    """Load layers of a model by a node's own way, with the options by which a CPU computes in a class.

    Args:
        name: folder, GGUF file or hub id.
        numeric_class: as evidence has it; another processor's mark keeps nobody from recomputing.
        layers: default: all of the model.

    Raises:
        UnknownModel: there is no such model.
        ConfigError: this machine does not compute in that class, or has no room for it.
    """
    checkpoint = open_checkpoint(name)
    found = NumericClass.parse(numeric_class)
    if found is None:
        raise ConfigError(f"this release does not know the class {numeric_class!r}")
    numeric_class = without_rounding(numeric_class)
    if found.device != "cpu":
        raise ConfigError(f"{numeric_class} is no CPU's class, and models are recomputed on a CPU")
    span = layers or Span(0, dissect(checkpoint.config).num_layers)
    wanted = {"dtype": found.dtype, "weights": NAMES[found.weights], "no_promise": found.kernels == 1}
    config = ServeConfig(f"{span.start}-{span.end}", device="cpu", **wanted)  # type: ignore[arg-type]
    with bars_hidden():
        model = load(checkpoint, config, logger.info)
    if model.numeric_class != numeric_class:
        raise ConfigError(f"this machine computes {name} in {model.numeric_class}, not in {numeric_class}")
    return model
