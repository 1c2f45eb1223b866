"""The span loader: a Hugging Face causal LM of which this machine has only some layers.

Design: docs/design/span-loading.md.

The class, the names of its tensors and its config stay what they are. A layer outside the span becomes a
`PassThroughLayer`, what only the first or the last machine needs becomes a `MissingModule`, and `from_pretrained` does
the rest on the span's tensors alone: renames, fused experts, ties, buffers. Writes no decoder layer and knows no family
by name.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.initialization import no_init_weights

from node.model.family_check import check_conformance
from swarm.base.errors import UnsupportedModel
from swarm.base.layers import Span, SpanBorders
from swarm.compute.class_attention import taken_by
from swarm.compute.layers.pass_through import PassThroughLayer, find_layers
from swarm.compute.packed_layers import experts_in, matrices_in
from swarm.compute.ragged_batch import RaggedModel
from swarm.compute.tree_attention import use_canopy
from swarm.files.families import (
    TESTED,
    AttentionBy,
    attention_by,
    causal_lm_class,
    embeds_in_layers,
    needs_ids,
    span_starts,
    text_config,
)
from swarm.files.pretrained import SAYS_WHAT_FITS, first_line, misfit
from swarm.files.stored.source import decoded

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from transformers import PreTrainedConfig

    from node.model.checkpoint import Checkpoint
    from swarm.compute.weights.format import Matrix, WeightFormat
    from swarm.files.stored.source import StoredTensor


NO_ROWS = "its class takes the ids of tokens alone, so hidden rows from another machine cannot enter"
IN_PARTS = "its class runs each layer as parts of several lists, so no layer can be left out"
logger = logging.getLogger(__name__)
SYNTHETIC = 0.01
"""The value of every synthetic weight: an ordinary number, neither tiny nor large, so that it computes as others do."""


def find_owners(tensors: Iterable[str], layers: str, ends: Sequence[str], base: str) -> dict[str, str | None]:
    """The module that owns each tensor.

    A name that the class itself has decides. Only for layers, or a module, that no tensor names so do names with other
    parts before them count: `mtp.norm.weight` is no `model.norm` beside `model.norm.weight`.

    Args:
        tensors: names in a checkpoint, all of them.
        layers: name of the list of decoder layers.
        ends: names of what runs before and after the layers.
        base: the class's own prefix of all but the head.

    Returns:
        The name of a layer or of one of `ends`, or None for a tensor that the class has no place for by its name.
    """
    owners = {tensor: own_module(tensor, layers, tuple(ends)) for tensor in tensors}
    found = set(owners.values())
    has_layers = any(owner is not None and owner not in ends for owner in found)
    absent = [end for end in ends if end not in found]
    list_name = re.compile(rf"(?:^|\.){layers.rpartition('.')[2]}\.(\d+)\.")
    for tensor in [tensor for tensor, owner in owners.items() if owner is None]:
        if layer := list_name.search(tensor):
            owners[tensor] = None if has_layers else f"{layers}.{int(layer[1])}"
        else:
            module = f".{tensor}".rpartition(".")[0]
            owners[tensor] = next((end for end in absent if module.endswith(f".{end.removeprefix(f'{base}.')}")), None)
    return owners


def own_module(tensor: str, layers: str, ends: tuple[str, ...]) -> str | None:
    """The module that owns a tensor by a name that the class has, without its first parts at most."""
    found = _names(layers, ends).match(tensor)
    if found is None:
        return None
    if found["layer"] is not None:
        return f"{layers}.{int(found['layer'])}"
    return next(end for end in ends if f".{end}".endswith(f".{found['end']}"))


def is_numbered(tensor: str) -> bool:
    """Whether a tensor is one of a list's: no embedding, norm or head is."""
    return re.search(r"\.\d+\.", tensor) is not None


@lru_cache(16)
def _names(layers: str, ends: tuple[str, ...]) -> re.Pattern[str]:
    own = sorted({shorter for end in ends for shorter in _shorter(end)}, key=len, reverse=True)
    lists = "|".join(map(re.escape, _shorter(layers)))
    return re.compile(rf"(?:(?:{lists})\.(?P<layer>\d+)|(?P<end>{'|'.join(map(re.escape, own))}))\.")


def _shorter(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def why_uncut(model: PreTrainedModel | None, layers: str, failure: Exception) -> str:
    """What keeps a class from running without some of its layers.

    Args:
        model: of that class, on any device; None where none could be made.
        layers: name of the list that was taken for its layers; empty where it came to none.
    """
    if model is None or not layers:
        return f"its class fails ({first_line(failure)})"
    if "inputs_embeds" not in inspect.signature(model.base_model.forward).parameters:
        return NO_ROWS
    around, _, name = layers.rpartition(".")
    beside = dict(model.get_submodule(around).named_children())
    own = beside.pop(name)
    assert isinstance(own, nn.ModuleList)
    if any(isinstance(other, nn.ModuleList) and len(other) == len(own) for other in beside.values()):
        return IN_PARTS
    return f"its class fails where layers are left out ({first_line(failure)})"


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
        self.weight = torch.zeros(0, device="cpu")  # which some classes fill with random values when they are made

    def forward(self, first: torch.Tensor, *others: object, **_: object) -> torch.Tensor:
        """Return [1, R, hidden_size]: the first of its inputs that has this shape, else zeros, which are never used."""
        for given in (first, *others):
            if isinstance(given, torch.Tensor) and given.ndim == 3 and given.shape[-1] == self.hidden_size:
                return given
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
    renamings: tuple[Any, ...] = ()
    """What transformers calls tensors of a checkpoint by: its `WeightRenaming`s, in order."""
    idle: tuple[str, ...] = ()
    """Names of what a text never runs, such as parts for images: only the last machine has them."""
    experts: Mapping[str, tuple[Matrix, ...]] = field(default_factory=dict)
    """Of the matrices, those of experts; those of one matrix lie one below the other."""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        count: int = self.config.num_hidden_layers
        return count

    @property
    def borders(self) -> SpanBorders:
        """Where the model can be cut."""
        return SpanBorders(span_starts(self.config), self.num_layers)

    @property
    def is_tied(self) -> bool:
        """Whether the head uses the embedding's weights."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def ties(self, span: Span) -> bool:
        """Whether a span has a head that uses the embedding's weights."""
        return self.is_tied and span.end == self.num_layers

    def modules(self, span: Span) -> list[str]:
        """Names of the modules with weights that a span needs."""
        names = [f"{self.layers}.{index}" for index in range(span.start, span.end)]
        if span.start == 0 or embeds_in_layers(self.config):
            names += self.front
        if span.end == self.num_layers:
            names += self.tail
            names += [self.front[0]] if self.ties(span) and self.front[0] not in names else []
        return names

    def weights_in(self, span: Span, held: Container[str] = ()) -> int:
        """How many weights a span has beside the modules held already; a tied head counts once."""
        return sum(self.weights[name] for name in self.modules(span) if name not in held)

    def expert_bytes(self, span: Span, form: WeightFormat) -> int:
        """What the experts of a span's layers take, wherever they are."""
        return sum(self._expert_bytes(f"{self.layers}.{index}", form) for index in range(span.start, span.end))

    def _expert_bytes(self, name: str, form: WeightFormat) -> int:
        matrices = self.experts.get(name, ())
        weights = sum(rows * columns for rows, columns in matrices)
        if name not in form.stored_sizes:
            return form.size_bytes(weights, matrices)
        stored, size_bytes = form.stored_sizes[name]
        return size_bytes * min(weights, stored) // max(1, stored)  # as their share of the layer

    def bytes_of(self, name: str, form: WeightFormat) -> int:
        """What a module's weights take in a format on the device."""
        if form.host_experts and not form.on_cpu:
            return self.bytes_of(name, replace(form, host_experts=False)) - self._expert_bytes(name, form)
        if name in form.stored_sizes:
            weights, size_bytes = form.stored_sizes[name]
            return form.size_bytes(max(0, self.weights[name] - weights), ()) + size_bytes
        if name not in self.matrices:
            return form.size_bytes(self.weights[name], ())
        if name.startswith(f"{self.layers}."):
            return form.size_bytes(self.weights[name], self.matrices[name])
        return form.size_bytes(self.weights[name], self.matrices[name], form.ends_bits)

    def bytes_in(self, span: Span, form: WeightFormat, held: Container[str] = ()) -> int:
        """What a span's weights take in a format beside the modules held already; a tied head counts once."""
        return sum(self.bytes_of(name, form) for name in self.modules(span) if name not in held)

    def needed(self, tensors: Iterable[str], span: Span, held: Container[str] = ()) -> list[str]:
        """The tensors that a span needs beside the modules held already.

        What has no place in the class is needed only where a module before or behind the layers has no tensor by its
        name: it may be that module's under an older one. No such module has a numbered part.

        Args:
            tensors: names of all tensors of a checkpoint.
            held: names of modules that exist already.
        """
        owners = self.owners(tensors)
        if span.end < self.num_layers:
            owners = {tensor: owner for tensor, owner in owners.items() if not self._is_idle(tensor)}
        modules = {name for name in self.modules(span) if name not in held}
        nameless = modules.intersection(self._ends).difference(filter(None, owners.values()))
        may_be_older = any(self.weights[name] for name in nameless)
        return [
            tensor
            for tensor, owner in owners.items()
            if owner in modules or self._is_idle(tensor) or (owner is None and may_be_older and not is_numbered(tensor))
        ]

    def unused(self, tensors: Iterable[str]) -> list[str]:
        """Those tensors of a checkpoint that no span needs, such as layers that predict further tokens."""
        names = list(tensors)
        return sorted(set(names).difference(self.needed(names, Span(0, self.num_layers))))

    def owners(self, tensors: Iterable[str]) -> dict[str, str | None]:
        """The module that owns each of a checkpoint's tensors, by all of their names; None where there is none."""
        called = {tensor: apply_renamings(tensor, list(self.renamings)) for tensor in tensors}
        found = find_owners(called.values(), self.layers, self._ends, self.model_class.base_model_prefix)
        return {tensor: found[name] for tensor, name in called.items()}

    def owner(self, tensor: str) -> str | None:
        """The module whose tensor this is by the class's own names."""
        return own_module(tensor, self.layers, self._ends)

    @property
    def _ends(self) -> tuple[str, ...]:
        return (*self.front, *self.tail)

    def _is_idle(self, tensor: str) -> bool:
        base = f"{self.model_class.base_model_prefix}."
        return any(f".{name.removeprefix(base)}." in f".{tensor}" for name in self.idle)


def dissect(config: PreTrainedConfig) -> ModelLayout:
    """Learn a model class's layout by running it on the meta device, without weights and with empty layers.

    Raises:
        UnsupportedModel: Canopy cannot run this model.
    """
    model_class, text = causal_lm_class(config), text_config(config)
    use_canopy(text)
    model: PreTrainedModel | None = None
    where = ""
    try:
        with torch.device("meta"):
            model = model_class(text)
        where = find_layers(model)
        return _dissect(model, text, where)
    except UnsupportedModel:
        raise
    except Exception as failure:  # an untested class may raise anything, and all of it means no
        reason = f"it cannot be cut into spans: {why_uncut(model, where, failure)}; choose another model"
        raise UnsupportedModel(f"{text.model_type}: {reason}") from failure


def _dissect(model: PreTrainedModel, text: PreTrainedConfig, where: str) -> ModelLayout:
    model_class = type(model)
    layers = model.get_submodule(where)
    assert isinstance(layers, nn.ModuleList)
    weights = {f"{where}.{index}": _count(layer) for index, layer in enumerate(layers)}
    matrices = {f"{where}.{index}": matrices_in(layer) for index, layer in enumerate(layers)}
    experts = {f"{where}.{index}": experts_in(layer) for index, layer in enumerate(layers)}
    for index, layer in enumerate(layers):
        layers[index] = PassThroughLayer(layer)
    embedding = model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules() if next(module.parameters(False), None) is not None}
    called = _traced(model, layers, [module for module in names if module is not embedding])
    middle = called.index(layers[0])
    inside = [name for name in names.values() if name.startswith(f"{names[embedding]}.")]
    front = [names[embedding], *inside, *(names[module] for module in called[:middle] if names[module] not in inside)]
    tail = [names[module] for module in called[middle + 1 :]]
    beside = [name for module, name in names.items() if name and module not in called and name not in front]
    idle = dict.fromkeys(filter(None, (_apart(name, (where, *front, *tail)) for name in beside)))
    weights |= {name: _count(model.get_submodule(name)) for name in front + tail}
    matrices |= {name: matrices_in(model.get_submodule(name)) for name in (front[0], tail[-1])}
    if getattr(text, "tie_word_embeddings", False):
        head = names[cast("Any", model).get_output_embeddings()]
        weights[head], matrices[head] = 0, ()
    renamings = tuple(each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming))
    return ModelLayout(
        model_class, text, where, tuple(front), tuple(tail), weights, matrices, renamings, tuple(idle), experts
    )


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
    return load_tested(checkpoint, span, dtype, device, held or {})


def synthetic_span(
    layout: ModelLayout, span: Span, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> SpanModel:
    """A span of the right shape whose weights mean nothing: what the real one would take can be measured with it.

    Args:
        span: layers within the model, neither the first one nor the last.

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
        check_conformance(checkpoint.config, load_tested)


def shared_parts(model: SpanModel, layout: ModelLayout, span: Span) -> dict[str, nn.Module]:
    """The modules of a loaded span that another span needs too; `model` cannot run again."""
    shared = set(layout.modules(model.span)) & set(layout.modules(span))
    if layout.is_tied and (model.span.end == layout.num_layers) != (span.end == layout.num_layers):
        shared.discard(layout.front[0])  # one weight for two modules: they are read together
    return model.hand_over(shared)


def load_tested(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    held: Mapping[str, nn.Module] = MappingProxyType({}),
) -> SpanModel:
    """As `load_span`, of a family that has proven itself or is just doing so."""
    layout = dissect(checkpoint.config)
    layout.borders.check(span)
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
    return checkpoint.read(layout.needed(checkpoint.weight_map, span, held))


def fill_span(
    layout: ModelLayout,
    span: Span,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    held: Container[str] = (),
) -> PreTrainedModel:
    """Make the class without the layers of others, and fill it with a span's tensors.

    Args:
        held: modules that exist already: they are left out too.

    Raises:
        UnsupportedModel: tensors are missing, unknown or of another shape.
    """
    config = copy.deepcopy(layout.config)
    config.tie_word_embeddings = layout.ties(span) and layout.front[0] not in held
    use_canopy(config)
    partial_class = _class_without(layout, span, held)
    partial_class.dtype = property(lambda _: dtype)  # of parameters, as it is, it would not survive packing
    try:
        filled: tuple[PreTrainedModel, dict[str, Any]] = partial_class.from_pretrained(
            None, config=config, state_dict=dict(tensors), dtype=dtype, **SAYS_WHAT_FITS
        )
    except Exception as error:  # what joins a checkpoint's tensors may raise anything on those that do not fit
        reason = f"the checkpoint does not fit its class ({first_line(error)})"
        raise UnsupportedModel(f"{config.model_type}: {reason}; fetch it again, or choose another model") from error
    model, info = filled
    unexpected = {name: layout.owner(name) for name in info["unexpected_keys"]}
    if others := sorted(name for name, owner in unexpected.items() if owner is None):
        logger.info("%s: %d tensors are not used, such as %s", config.model_type, len(others), others[0])
    info["unexpected_keys"] = [name for name, owner in unexpected.items() if owner is not None]
    if (what := misfit(info)) is not None:
        raise UnsupportedModel(f"{config.model_type}: the checkpoint does not fit its class: {what}")
    return model


def _class_without(layout: ModelLayout, span: Span, held: Container[str]) -> Any:  # noqa: ANN401 - a class of its own per call
    base: Any = layout.model_class

    class PartialModel(base):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
            with no_init_weights():  # every weight comes from the checkpoint, or its lack is said
                super().__init__(config, *args, **kwargs)
            layers = self.get_submodule(layout.layers)
            for index in range(layout.num_layers):
                if not span.start <= index < span.end or f"{layout.layers}.{index}" in held:
                    layers[index] = PassThroughLayer(layers[index])
            own = layout.modules(span)
            absent = MissingModule(config.hidden_size, self.get_input_embeddings().embedding_dim)
            elsewhere = [name for name in (*layout.front, *layout.tail) if name in held or name not in own]
            elsewhere += layout.idle if span.end < layout.num_layers else ()
            for name in sorted(elsewhere, reverse=True):  # what is inside another first
                self.set_submodule(name, absent)

    PartialModel.__name__, PartialModel.__module__ = base.__name__, base.__module__  # renames of tensors go by these
    return PartialModel


class _NoRotary(nn.Module):
    """In place of a rotary embedding, which has no weights and may look at values."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        for name, value in vars(rotary).items():  # model classes read some of these
            if not name.startswith("_") and name != "forward":
                setattr(self, name, value)
        self.as_pair = False

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return something of the right type."""
        return (hidden, hidden) if self.as_pair else hidden


def _traced(model: PreTrainedModel, layers: nn.ModuleList, others: list[nn.Module]) -> list[nn.Module]:
    """As `_trace`, with layers and rotary embeddings that return what the class's own return."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            model.set_submodule(name, _NoRotary(module))
    rotary = [module for module in model.modules() if isinstance(module, _NoRotary)]
    failures: list[Exception] = []
    for as_tuple, as_pair in ((False, False), (True, False), (False, True), (True, True)):
        for layer in layers:
            cast("PassThroughLayer", layer).as_tuple = as_tuple
        for module in rotary:
            module.as_pair = as_pair
        try:
            return _trace(model, layers[0], others)
        except Exception as failure:  # noqa: BLE001 - a class that expects another type may raise anything
            failures.append(failure)
    raise failures[0]


def _trace(model: PreTrainedModel, first_layer: nn.Module, others: Iterable[nn.Module]) -> list[nn.Module]:
    """The order in which modules first run in a forward on the meta device."""
    called: list[nn.Module] = []
    hooks = [module.register_forward_pre_hook(lambda ran, _: called.append(ran)) for module in [first_layer, *others]]
    width: int = cast("Any", model.get_input_embeddings()).embedding_dim
    embeddings = torch.zeros(1, 2, width, device="meta")
    positions = torch.zeros(1, 2, dtype=torch.long, device="meta")
    given: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    if attention_by(model.config) is not AttentionBy.INTERFACE:  # else the class would look at positions for a mask
        given["attention_mask"] = torch.ones(1, 2, dtype=torch.long, device="meta")
    inputs = taken_by(model, given)
    try:
        if needs_ids(model.config):
            logits = model(input_ids=positions, **inputs).logits
        else:
            logits = model(inputs_embeds=embeddings, **inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    if logits.shape[:2] != embeddings.shape[:2]:
        raise UnsupportedModel("its layers do not return hidden states")
    return list(dict.fromkeys(called))


def _apart(name: str, others: Iterable[str]) -> str | None:
    """The outermost module around a module that has none of the others in it; None if that one has."""
    steps = name.split(".")
    around = (".".join(steps[:depth]) for depth in range(1, len(steps) + 1))
    return next((each for each in around if not any(f"{other}.".startswith(f"{each}.") for other in others)), None)


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
