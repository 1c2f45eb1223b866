"""The span loader: a Hugging Face causal LM of which this machine has only some layers.

Design: docs/design/span-loading.md.

The class, the names of its tensors and its config stay what they are. A layer outside the span becomes a
`PassThroughLayer`, what only the first or the last machine needs becomes a `MissingModule`, and `from_pretrained` does
the rest on the span's tensors alone: renames, fused experts, ties, buffers. Writes no decoder layer and knows no family
by name.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from node.model.family_check import check_conformance
from swarm.errors import UnsupportedModel
from swarm.inference.packed_layers import matrices_in
from swarm.inference.ragged_batch import PassThroughLayer, RaggedModel, find_layers
from swarm.inference.tree_attention import use_canopy
from swarm.models.families import TESTED, causal_lm_class, text_config
from swarm.models.pretrained import first_line
from swarm.models.stored.source import decoded

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from node.model.checkpoint import Checkpoint
    from swarm.inference.weights.format import Matrix, WeightFormat
    from swarm.layers import Span
    from swarm.models.stored.source import StoredTensor

SYNTHETIC = 0.01
"""The value of every synthetic weight: an ordinary number, neither tiny nor large, so that it computes as others do."""


class SpanModel(RaggedModel):
    """The layers of a span, ready for several sessions' nodes at a time; with the head when the span ends the model."""

    def close(self) -> None:
        """End what runs beside forwards, and give up what lies beside the weights."""
        self.use_plain("this span was closed")

    def hand_over(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Take modules out by name and free the memory of all others; this span cannot run again."""
        self.use_plain("its layers were handed over")
        self._arrange(self.span.start, self.span.end)
        parts = {name: self.model.get_submodule(name) for name in names}
        for name in parts:
            self.model.set_submodule(name, nn.Identity())
        self._owned.clear()
        cast("nn.Module", self.model).to("meta")
        return parts


class MissingModule(nn.Module):
    """In place of a module that only another machine runs: passes hidden states on, or makes rows of zeros."""

    def __init__(self, hidden_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding_dim = embedding_dim
        self._dtype = torch.get_default_dtype()  # the compute type, while a model is made

    def forward(self, first: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return [1, R, hidden_size]: `first` when it has this shape, else zeros, which are never used."""
        if first.ndim == 3 and first.shape[-1] == self.hidden_size:
            return first
        return torch.zeros(*first.shape[:2], self.hidden_size, dtype=self._dtype, device=first.device)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Which modules a model class has, and when they run."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    """The text model's own."""
    layers: str
    """Name of the list of decoder layers."""
    front: tuple[str, ...]
    """Names of what runs before the layers, the embedding first."""
    tail: tuple[str, ...]
    """Names of what runs after them."""
    weights: Mapping[str, int]
    """How many weights each module has, by name."""
    matrices: Mapping[str, tuple[Matrix, ...]]
    """Rows and columns of those of its weights that can be packed, by name."""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        count: int = self.config.num_hidden_layers
        return count

    @property
    def is_tied(self) -> bool:
        """Whether the head uses the embedding's weights."""
        return bool(self.config.tie_word_embeddings)

    def ties(self, span: Span) -> bool:
        """Whether a span has a head that uses the embedding's weights."""
        return self.is_tied and span.end == self.num_layers

    def modules(self, span: Span) -> list[str]:
        """Names of the modules with weights that a span needs."""
        names = [f"{self.layers}.{index}" for index in range(span.start, span.end)]
        if span.start == 0:
            names += self.front
        if span.end == self.num_layers:
            names += self.tail
            names += [self.front[0]] if self.ties(span) and span.start else []
        return names

    def weights_in(self, span: Span, held: Container[str] = ()) -> int:
        """How many weights a span has beside the modules held already; a tied head counts once."""
        return sum(self.weights[name] for name in self.modules(span) if name not in held)

    def bytes_of(self, name: str, form: WeightFormat) -> int:
        """What a module's weights take in a format."""
        if name in form.stored_sizes:
            weights, size_bytes = form.stored_sizes[name]
            return form.size_bytes(max(0, self.weights[name] - weights), ()) + size_bytes
        if name not in self.matrices:
            return form.size_bytes(self.weights[name], ())
        if name.startswith(f"{self.layers}."):
            return form.size_bytes(self.weights[name], self.matrices[name])
        if name == self.front[0]:
            form = replace(form, on_cpu=False)  # whose rows are looked up: in no form of torch's own
        return form.size_bytes(self.weights[name], self.matrices[name], self.ends_bits(form))

    def bytes_in(self, span: Span, form: WeightFormat, held: Container[str] = ()) -> int:
        """What a span's weights take in a format beside the modules held already; a tied head counts once."""
        return sum(self.bytes_of(name, form) for name in self.modules(span) if name not in held)

    def ends_bits(self, form: WeightFormat) -> int:
        """In how many bits the embedding and the head are held: as their share of the whole model says."""
        ends = self.weights[self.front[0]] + self.weights[self.tail[-1]]
        return form.ends_bits(ends / sum(self.weights.values()))

    def holds(self, tensor: str, span: Span, held: Container[str] = ()) -> bool:
        """Whether a tensor of the checkpoint belongs to a span, and to none of the modules held already.

        Checkpoints may leave out or add a prefix; one that is neither in a layer nor known by name is taken for the
        head under an older name.
        """
        layer = re.search(rf"(?:^|\.){self.layers.rpartition('.')[2]}\.(\d+)\.", tensor)
        if layer is not None:
            return span.start <= int(layer[1]) < span.end and f"{self.layers}.{int(layer[1])}" not in held
        owner = next((name for name in (*self.front, *self.tail) if self._names(tensor, name)), None)
        if owner is None:
            return span.end == self.num_layers and self.tail[-1] not in held
        return owner in self.modules(span) and owner not in held

    def owner(self, tensor: str) -> str:
        """The name of the layer or of the other module that a tensor of the checkpoint belongs to, as for `holds`."""
        layer = re.search(rf"(?:^|\.){self.layers.rpartition('.')[2]}\.(\d+)\.", tensor)
        if layer is not None:
            return f"{self.layers}.{int(layer[1])}"
        return next((name for name in (*self.front, *self.tail) if self._names(tensor, name)), self.tail[-1])

    def _names(self, tensor: str, module: str) -> bool:
        inner = module.removeprefix(f"{self.model_class.base_model_prefix}.")
        return f".{tensor}".rpartition(".")[0].endswith(f".{inner}")


def dissect(config: PreTrainedConfig) -> ModelLayout:
    """Learn a model class's layout by running it on the meta device, without weights and with empty layers.

    Raises:
        UnsupportedModel: Canopy cannot run this model.
    """
    model_class, text = causal_lm_class(config), text_config(config)
    use_canopy(text)
    try:
        return _dissect(model_class, text)
    except UnsupportedModel:
        raise
    except Exception as failure:  # an untested class may raise anything, and all of it means no
        reason = f"it cannot be cut into spans ({first_line(failure)}); choose another model"
        raise UnsupportedModel(f"{text.model_type}: {reason}") from failure


def _dissect(model_class: type[PreTrainedModel], text: PreTrainedConfig) -> ModelLayout:
    with torch.device("meta"):
        model = model_class(text)
    where = find_layers(model)
    layers = model.get_submodule(where)
    assert isinstance(layers, nn.ModuleList)
    weights = {f"{where}.{index}": _count(layer) for index, layer in enumerate(layers)}
    matrices = {f"{where}.{index}": matrices_in(layer) for index, layer in enumerate(layers)}
    for index, layer in enumerate(layers):
        layers[index] = PassThroughLayer(layer)
    embedding = model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules() if next(module.parameters(False), None) is not None}
    called = _trace(model, layers[0], [module for module in names if module is not embedding])
    middle = called.index(layers[0])
    front = [names[embedding], *(names[module] for module in called[:middle])]
    tail = [names[module] for module in called[middle + 1 :]]
    weights |= {name: _count(model.get_submodule(name)) for name in front + tail}
    matrices |= {name: matrices_in(model.get_submodule(name)) for name in (front[0], tail[-1])}
    if text.tie_word_embeddings:
        head = names[cast("Any", model).get_output_embeddings()]
        weights[head], matrices[head] = 0, ()
    return ModelLayout(model_class, text, where, tuple(front), tuple(tail), weights, matrices)


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    held: Mapping[str, nn.Module] | None = None,
) -> SpanModel:
    """Load the layers of a span, and the embedding and head where it has them; no other tensor is read.

    held: what `shared_parts` kept of the span before: it is taken over and not read again.

    Raises:
        LayersError: the model does not have these layers.
        UnsupportedModel: Canopy cannot run this model, or the checkpoint's tensors are not what its class expects.
    """
    check_family(checkpoint)
    return _load(checkpoint, span, dtype, device, held or {})


def synthetic_span(
    layout: ModelLayout, span: Span, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> SpanModel:
    """A span of the right shape whose weights mean nothing: what the real one would take can be measured with it.

    Args:
        layout: of the model class.
        span: layers within the model, neither the first one nor the last.
        dtype: to compute in.
        device: where.

    Raises:
        UnsupportedModel: the class does not take its own tensors.
    """
    config = copy.deepcopy(layout.config)
    config.tie_word_embeddings = False
    use_canopy(config)
    with torch.device("meta"):
        shapes = _class_without(layout, span, ())(config).state_dict()
    tensors = {name: torch.full(meta.shape, SYNTHETIC, dtype=dtype) for name, meta in shapes.items()}
    model: Any = fill_span(layout, span, tensors, dtype)
    return SpanModel(model.to(device), span)


def check_family(checkpoint: Checkpoint) -> None:
    """Refuse models that Canopy cannot run; a family that is not tested proves itself.

    Raises:
        UnsupportedModel: says why.
    """
    causal_lm_class(checkpoint.config)
    if checkpoint.config.get_text_config().model_type not in TESTED:
        check_conformance(checkpoint.config, _load)


def shared_parts(model: SpanModel, layout: ModelLayout, span: Span) -> dict[str, nn.Module]:
    """The modules of a loaded span that another span needs too; `model` cannot run again."""
    shared = set(layout.modules(model.span)) & set(layout.modules(span))
    if layout.is_tied and (model.span.end == layout.num_layers) != (span.end == layout.num_layers):
        shared.discard(layout.front[0])  # one weight for two modules: they are read together
    return model.hand_over(shared)


def _load(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    held: Mapping[str, nn.Module] = MappingProxyType({}),
) -> SpanModel:
    layout = dissect(checkpoint.config)
    span.within(layout.num_layers)
    model: Any = read_span(checkpoint, layout, span, dtype, held)
    model = model.to(device)
    for name, part in held.items():
        model.set_submodule(name, part)
    return SpanModel(model, span)


def read_span(
    checkpoint: Checkpoint, layout: ModelLayout, span: Span, dtype: torch.dtype, held: Container[str] = ()
) -> PreTrainedModel:
    """As `fill_span`, with a checkpoint's tensors."""
    return fill_span(layout, span, decoded(read_tensors(checkpoint, layout, span, held), dtype), dtype, held)


def read_tensors(
    checkpoint: Checkpoint, layout: ModelLayout, span: Span, held: Container[str] = ()
) -> dict[str, torch.Tensor | StoredTensor]:
    """The tensors of a span, as they are stored, and of none of the modules held already."""
    return checkpoint.read(name for name in checkpoint.weight_map if layout.holds(name, span, held))


def fill_span(
    layout: ModelLayout,
    span: Span,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    held: Container[str] = (),
) -> PreTrainedModel:
    """Make the class without the layers of others, and fill it with a span's tensors.

    Args:
        layout: of the model class.
        span: the layers.
        tensors: under the checkpoint's own names.
        dtype: to compute in.
        held: modules that exist already: they are left out too.

    Raises:
        UnsupportedModel: tensors are missing, unknown or of another shape.
    """
    config = copy.deepcopy(layout.config)
    config.tie_word_embeddings = layout.ties(span) and layout.front[0] not in held
    use_canopy(config)
    partial_class = _class_without(layout, span, held)
    partial_class.dtype = property(lambda _: dtype)  # of parameters, as it is, it would not survive packing
    filled: tuple[PreTrainedModel, dict[str, Any]] = partial_class.from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True
    )
    model, info = filled
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loose := sorted(map(str, info[problem])):
            what = f"{len(loose)} {problem.replace('_', ' ')}, such as {loose[0]}"
            raise UnsupportedModel(f"{config.model_type}: the checkpoint does not fit its class: {what}")
    return model


def _class_without(layout: ModelLayout, span: Span, held: Container[str]) -> Any:  # noqa: ANN401 - a class of its own per call
    base: Any = layout.model_class

    class PartialModel(base):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            layers = self.get_submodule(layout.layers)
            for index in range(layout.num_layers):
                if not span.start <= index < span.end or f"{layout.layers}.{index}" in held:
                    layers[index] = PassThroughLayer(layers[index])
            absent = MissingModule(config.hidden_size, self.get_input_embeddings().embedding_dim)
            for name in (*layout.front, *layout.tail):
                if name in held or name not in layout.modules(span):
                    self.set_submodule(name, absent)

    PartialModel.__name__, PartialModel.__module__ = base.__name__, base.__module__  # renames of tensors go by these
    return PartialModel


def _trace(model: PreTrainedModel, first_layer: nn.Module, others: Iterable[nn.Module]) -> list[nn.Module]:
    """The order in which modules first run in a forward on the meta device."""
    called: list[nn.Module] = []
    hooks = [module.register_forward_pre_hook(lambda ran, _: called.append(ran)) for module in [first_layer, *others]]
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):  # has no weights, and may look at values
            model.set_submodule(name, PassThroughLayer(module))
    width: int = cast("Any", model.get_input_embeddings()).embedding_dim
    embeddings = torch.zeros(1, 2, width, device="meta")
    positions = torch.zeros(1, 2, dtype=torch.long, device="meta")
    model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    return list(dict.fromkeys(called))


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
