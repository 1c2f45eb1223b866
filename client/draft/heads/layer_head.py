"""Heads that are one decoder layer: from a token and the hidden row before it to the row of the token, and its logits.

    entering = join(embedding of a token, normed hidden row of the token before)
    row = layer(entering); logits = output matrix · norm(row): what follows the token

Such a head goes on from its own row where the target's is not known yet. The decoder layer is a family's own class, of
which this is a span of one layer: attention over a tree, KV and positions are those of every span. Owns no session.

`TargetNames` says what a target's class calls the tensors that a head borrows; it needs the config alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from client.draft.heads.files import read_tensors
from swarm.base.errors import UnsupportedModel
from swarm.base.layers import Span
from swarm.compute.layers.pass_through import PassThroughLayer, find_layers
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.tree_attention import use_canopy
from swarm.files.families import text_config
from swarm.files.hub import find_model
from swarm.files.model_config import read_config
from swarm.files.pretrained import SAYS_WHAT_FITS, first_line, misfit
from swarm.files.text_classes import class_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its module takes 2 s to import: a client without a head needs none


@dataclass(frozen=True, slots=True)
class TargetNames:
    """Names in the target's checkpoint.

    Attributes:
        config: of the language model.
        embedding: [vocab_size, width].
        output: the output matrix; the embedding where they are one.
        norm: weights of the final norm [hidden_size]; None where it has none of its own.
    """

    config: PreTrainedConfig
    embedding: str
    output: str
    norm: str | None


def target_names(model: str | Path, revision: str | None = None) -> TargetNames:
    """Learn the names from the class.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: it is no causal language model, or has no matrix that a head could borrow.
        HubError: the hub refuses, or cannot be reached.
    """
    folder, _ = find_model(model, revision)
    text = text_config(read_config(folder, str(model)))
    empty: Any = empty_model(text)
    embedding = _name_of(empty, empty.get_input_embeddings())
    output = embedding if text.tie_word_embeddings else _name_of(empty, empty.get_output_embeddings())
    layers, width = find_layers(empty), text.hidden_size
    norms = [name for name, weight in empty.named_parameters() if weight.shape == (width,) and layers not in name]
    return TargetNames(text, embedding, output, norms[-1] if norms else None)


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a config on the meta device: shapes and names, no weights.

    Raises:
        UnsupportedModel: it is no causal language model.
    """
    model_class: Any = class_of(config)
    if model_class is None:
        raise UnsupportedModel(f"{config.model_type}: transformers has no causal language model for it")
    with torch.device("meta"):
        made: PreTrainedModel = model_class(config)
    return made


def _name_of(model: Any, module: torch.nn.Module | None) -> str:  # noqa: ANN401 - a model of any class
    """The name of a module's matrix in the checkpoint."""
    found = next((name for name, part in model.named_modules() if part is module), None)
    if found is None or module is None:
        raise UnsupportedModel(f"{cast('str', model.config.model_type)}: has no matrix that a head could borrow")
    return f"{found}.weight"


PLACE = 1
"""The layer's place in its own model: rows enter behind the layer before, which passes them through."""
OWN_SPAN = Span(PLACE, PLACE + 1)


class LayerHead:
    """A head that is ready to run.

    Attributes:
        model: the decoder layer as a span, with what its own class does behind it.
        final_norm: the target's own final norm.
        vocab_size: of the target.
        aux_layers: layers of which it reads what enters them, side by side; none: it reads the last layer's rows.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: RaggedModel, final_norm: nn.Module, vocab_size: int) -> None:
        self.model = model
        self.final_norm = final_norm.to(model.device, model.dtype)
        self.vocab_size = vocab_size

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.model.device

    @property
    def layers(self) -> tuple[LayerHead, ...]:
        """What drafts the levels of a tree, the first one first; the last one drafts all further levels."""
        return (self,)

    @property
    def row_width(self) -> int:
        """Values of the target's rows that it reads, for one token."""
        return self.model.hidden_size * max(1, len(self.aux_layers))

    def normed(self, rows: torch.Tensor) -> torch.Tensor:
        """The target's hidden rows [n, row_width] as its layer takes them [n, width]: behind the final norm."""
        found: torch.Tensor = self.final_norm(rows.to(self.device, self.model.dtype))
        return found

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, width] of tokens int64 [n]."""
        found: torch.Tensor = cast("Any", self.model.model).get_input_embeddings()(tokens.to(self.device))
        return found

    def run(
        self, work: SessionRows, tokens: torch.Tensor, rows: torch.Tensor, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run new nodes and keep their KV.

        Args:
            work: the nodes, without rows.
            tokens: int64 [n], theirs.
            rows: [n, width], of the tokens before: normed ones of the target, or the head's own.
            last: of how many nodes, the last ones, logits are asked for; 0 only where there are several layers.

        Returns:
            Logits float32 [last, vocab_size], and the head's own rows [n, width].
        """
        raise NotImplementedError


def fill_layer(
    config: PreTrainedConfig,
    layer: Mapping[str, torch.Tensor],
    ends: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    change: Callable[[PreTrainedModel, nn.Module], None] = lambda _model, _layer: None,
) -> PreTrainedModel:
    """Make a family's class with one layer of its own, at `PLACE`, and fill it.

    Args:
        config: with so many layers.
        layer: tensors of the layer, as they are called within it.
        ends: the others, as the class calls them.
        dtype: to compute in.
        change: what to exchange in the model and its layer before they are filled.

    Raises:
        UnsupportedModel: tensors are missing, unknown or of another shape.
    """
    base: Any = class_of(config)
    use_canopy(config)

    class LayerModel(base):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            layers = self.get_submodule(find_layers(self))
            for index in range(PLACE):
                layers[index] = PassThroughLayer(layers[index])
            change(self, layers[PLACE])

    where = find_layers(empty_model(config))
    state = {**ends, **{f"{where}.{PLACE}.{name}": tensor for name, tensor in layer.items()}}
    try:
        filled, info = LayerModel.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **SAYS_WHAT_FITS)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UnsupportedModel(f"{config.model_type}: the head does not load ({first_line(error)})") from error
    if (what := misfit(info)) is not None:
        raise UnsupportedModel(f"{config.model_type}: the head does not fit its class: {what}")
    model: PreTrainedModel = filled.eval()
    return model


def as_ragged(model: PreTrainedModel, device: torch.device) -> RaggedModel:
    """The filled model as a span."""
    return RaggedModel(cast("PreTrainedModel", cast("Any", model).to(device)), OWN_SPAN)


def load_final_norm(model: str | Path, revision: str | None = None) -> nn.Module:
    """The target's final norm, of its own class; of the weights only this tensor is read.

    Raises:
        UnsupportedModel: the checkpoint lacks it.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    names = target_names(model, revision)
    if names.norm is None:
        return nn.Identity()
    empty = empty_model(names.config)
    norm = empty.get_submodule(names.norm.removesuffix(".weight"))
    return norm_with(norm, read_tensors(model, {names.norm}, revision)[names.norm])


def norm_with(norm: nn.Module, weight: torch.Tensor) -> nn.Module:
    """Another norm of the same class, with these weights."""
    other = copy.deepcopy(norm)
    cast("Any", other).weight = nn.Parameter(weight.clone(), requires_grad=False)
    return other
