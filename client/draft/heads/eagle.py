"""EAGLE-3 heads as they are published: one decoder layer on hidden rows of the target. EAGLE-1 and 2 are refused.

The layer attends with [norm(embedding); norm(row before)], twice as wide. It has a norm and an output matrix of its
own, over a vocabulary of its own (`d2t`: what is added to its ids to get the target's).

Most heads read rows of three layers, side by side: fc makes one row of them, and a session asks for them (P14).
Those that say `use_aux_hidden_state: false` have no fc, and read the last row alone.

Source: EAGLE-3 (arXiv 2503.01840) and its published checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedConfig

from client.draft.heads.files import read_tensors, stored_names
from client.draft.heads.layer_head import (
    PLACE,
    LayerHead,
    as_ragged,
    empty_model,
    fill_layer,
    load_final_norm,
    target_names,
)
from swarm.base.errors import IncompatibleDraft, SwarmError, UnsupportedModel
from swarm.compute.layers.pass_through import find_layers
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.files.families import span_starts, text_config
from swarm.files.hub import find_model
from swarm.files.model_config import read_config
from swarm.protocol.limits import MAX_AUX_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its module takes 2 s to import: a client without a head needs none

FIRST, THIRD = "layers.0.", "midlayer."
"""Prefixes of the layer's tensors: EAGLE-1 and 2, which are refused, and EAGLE-3."""
INPUT_NORM = "input_layernorm"
FUSION = "fc.weight"
FUSION_BIAS = "fc.bias"
EMBEDDING, HEAD, NORM, TO_TARGET = "embed_tokens.weight", "lm_head.weight", "norm.weight", "d2t"
EAGLE_CONFIG, AUX_LAYERS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
LEFT_OUT = {"t2d", FUSION, FUSION_BIAS, EMBEDDING, HEAD, NORM, TO_TARGET}


def is_eagle(model: str | Path) -> bool:
    """Whether a folder or hub id is an EAGLE head: it has one layer, and is known by its tensors.

    Of a file on the hub only the header is read.
    """
    try:
        folder, _ = find_model(model)
        if text_config(read_config(folder, str(model))).num_hidden_layers != 1:
            return False
        names = _own_names(model)
    except SwarmError:
        return False  # loading it as a model then says what is wrong with it
    return any(name.startswith(THIRD) for name in names) or (
        FUSION in names and any(name.startswith(FIRST) for name in names)
    )


def load_eagle(
    model: str | Path, target: str | Path, revision: str | None, device: torch.device, dtype: torch.dtype
) -> LayerHead:
    """Load an EAGLE head, and what it shares with its target.

    Args:
        model: the head, by folder or hub id.
        target: by folder or hub id.
        revision: the target's, on the hub.
        device: where it is to run.
        dtype: in which type.

    Raises:
        IncompatibleDraft: it is for another target.
        UnsupportedModel: it is of EAGLE-1 or 2, reads rows that no swarm sends, or its tensors do not fit.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    stored = _own_names(model)
    if not any(name.startswith(THIRD) for name in stored):
        raise UnsupportedModel(
            f"{model}: this is an EAGLE-1 or EAGLE-2 head, which this version does not run; name an EAGLE-3 head"
        )
    folder, _ = find_model(model)
    config = text_config(read_config(folder, str(model)))
    theirs = text_config(read_config(find_model(target, revision)[0], str(target)))
    if (config.hidden_size, config.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
        raise IncompatibleDraft(
            f"{model}: this EAGLE head is for rows of {config.hidden_size} values and {config.vocab_size} tokens, and "
            f"{target} has {theirs.hidden_size} and {theirs.vocab_size}; name one that was trained for it"
        )
    aux_layers = _aux_layers(str(model), config, theirs) if FUSION in stored else ()
    found = read_tensors(model, stored.values())
    tensors = {own: found[name] for own, name in stored.items()}
    shared = _shared(tensors, target, revision, wants_output=HEAD not in stored)
    final = load_final_norm(target, revision)
    own = copy.deepcopy(config)
    own.num_hidden_layers = PLACE + 1
    layer = {name.removeprefix(THIRD): value for name, value in tensors.items() if name.startswith(THIRD)}
    _check_rest(str(model), [name for name in stored if not name.startswith(THIRD)])
    return _load(own, layer, {**tensors, **shared}, (final, device, dtype), aux_layers)


Where = tuple[nn.Module, torch.device, torch.dtype]
"""The target's final norm, and where and in which type a head runs."""


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What an EAGLE-3 head has of its target.

    Attributes:
        final_norm: the target's.
        to_target: int64 [draft tokens], the target's ids of the head's own.
        vocab_size: of the target.
    """

    final_norm: nn.Module
    to_target: torch.Tensor
    vocab_size: int


class JoinedNorm(nn.Module):
    """Stands where a layer norms what enters it: beside the row, the embedding of the token goes into its attention.

    Attributes:
        embedded: [1, n, width], of the next forward.
        is_before: whether rows enter normed, so that the layer adds to the normed row.
    """

    def __init__(self, norm: nn.Module, *, is_before: bool) -> None:
        super().__init__()
        self.is_before = is_before
        self.token_norm, self.row_norm = norm, copy.deepcopy(norm)
        self.embedded = torch.empty(0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """From [1, n, width] to [1, n, 2 · width]."""
        if self.embedded.shape != rows.shape:  # while the span is probed
            self.embedded = torch.zeros_like(rows)
        return torch.cat([self.token_norm(self.embedded), rows if self.is_before else self.row_norm(rows)], dim=-1)


@dataclass(frozen=True, slots=True)
class AuxFusion:
    """What makes one row of rows of several layers.

    Attributes:
        layers: what enters these is read, in this order.
        weight: [width, layers · width]
        bias: [width]; None for none.
    """

    layers: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None


class EagleHead(LayerHead):
    """A head whose own rows go on as they leave the layer, before its norm."""

    def __init__(self, model: RaggedModel, ends: TargetEnds, joined: JoinedNorm, fusion: AuxFusion | None) -> None:
        """Take a loaded layer.

        Args:
            model: the layer, and behind it its norm and its own output matrix.
            ends: what it has of the target.
            joined: stands in the layer.
            fusion: of the rows that it reads; None: it reads the last layer's.
        """
        super().__init__(model, ends.final_norm, ends.vocab_size)
        self._joined = joined
        self._to_target = ends.to_target.to(model.device)
        self._weight = self._bias = None
        if fusion is not None:
            self.aux_layers = fusion.layers
            self._weight = fusion.weight.to(model.device, model.dtype)
            self._bias = None if fusion.bias is None else fusion.bias.to(model.device, model.dtype)

    def normed(self, rows: torch.Tensor) -> torch.Tensor:
        """As in `LayerHead`; rows of several layers are fused, and were trained on without the target's norm."""
        if self._weight is None:
            return super().normed(rows)
        return F.linear(rows.to(self.device, self.model.dtype), self._weight, self._bias)

    def run(
        self, work: SessionRows, tokens: torch.Tensor, rows: torch.Tensor, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `LayerHead`; tokens that it does not know cannot be guessed."""
        self._joined.embedded = self.embed(tokens)[None]
        entering = self._joined.row_norm(rows) if self._joined.is_before else rows
        hidden = self.model.forward([replace(work, rows=entering)])
        own = self.model.logits(hidden[-last:])
        logits = own.new_full((len(own), self.vocab_size), -torch.inf)
        return logits.index_copy(1, self._to_target, own[:, : len(self._to_target)]), hidden


def _load(
    config: PreTrainedConfig,
    layer: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    where: Where,
    aux_layers: tuple[int, ...],
) -> LayerHead:
    final, device, dtype = where
    width, vocab_size, draft_tokens = config.hidden_size, config.vocab_size, len(tensors[HEAD])
    made: list[JoinedNorm] = []

    def change(model: PreTrainedModel, own: Any) -> None:  # noqa: ANN401 - a decoder layer of any class
        is_before = bool(getattr(config, "norm_before_residual", False))
        made.append(JoinedNorm(getattr(own, INPUT_NORM), is_before=is_before))
        setattr(own, INPUT_NORM, made[-1])
        for name in ("q_proj", "k_proj", "v_proj"):
            before = getattr(own.self_attn, name)
            setattr(own.self_attn, name, nn.Linear(2 * width, before.out_features, bias=before.bias is not None))
        cast("Any", model).set_output_embeddings(nn.Linear(width, draft_tokens, bias=False))

    names = _ends(config)
    renamed = {
        name.replace(INPUT_NORM, f"{INPUT_NORM}.token_norm").replace("hidden_norm", f"{INPUT_NORM}.row_norm"): value
        for name, value in layer.items()
    }
    ends = {names[0]: tensors[EMBEDDING], names[1]: tensors[HEAD], names[2]: tensors[NORM]}
    model = as_ragged(fill_layer(config, renamed, ends, dtype, change), device)
    offsets = tensors.get(TO_TARGET, torch.zeros(draft_tokens, dtype=torch.long))
    to_target = torch.arange(draft_tokens) + offsets.long()
    if len(offsets) != draft_tokens or not 0 <= int(to_target.min()) <= int(to_target.max()) < vocab_size:
        raise UnsupportedModel(
            f"EAGLE-3 head: {TO_TARGET} does not lead from its {draft_tokens} tokens to the target's"
        )
    shared = TargetEnds(final, to_target, vocab_size)
    return EagleHead(model, shared, made[-1], _fusion(tensors, aux_layers, width))


def _fusion(tensors: dict[str, torch.Tensor], layers: tuple[int, ...], width: int) -> AuxFusion | None:
    if not layers:
        return None
    weight, bias = tensors[FUSION], tensors.get(FUSION_BIAS)
    if weight.shape != (width, len(layers) * width) or (bias is not None and bias.shape != (width,)):
        raise UnsupportedModel(
            f"EAGLE-3 head: {FUSION} has the shape {list(weight.shape)}, and rows of {len(layers)} layers need "
            f"{[width, len(layers) * width]}"
        )
    return AuxFusion(layers, weight, bias)


def _aux_layers(name: str, config: PreTrainedConfig, target: PreTrainedConfig) -> tuple[int, ...]:
    """Layers of the target of which a head reads what enters them, in the order of its fusion.

    In `eagle_config` (SGLang, SpecForge, Model Optimizer) ids name the layers whose output is read, one below those
    that it enters; outside of it (vLLM, Speculators) the layers that it enters.
    """
    count = target.num_hidden_layers
    inner = getattr(config, EAGLE_CONFIG, None)
    named, step = (inner.get(AUX_LAYERS) if isinstance(inner, dict) else None), 1
    if not named:
        named, step = getattr(config, AUX_LAYERS, None), 0
    if not named:
        named, step = [2, count // 2, count - 3], 0
    if not isinstance(named, list | tuple) or any(type(each) is not int for each in named):
        raise UnsupportedModel(f"{name}: {AUX_LAYERS} is no list of layers")
    layers = tuple(each + step for each in named)
    if not set(layers) <= set(span_starts(target)[1:]) or len(set(layers)) > MAX_AUX_LAYERS:
        raise UnsupportedModel(
            f"{name}: this EAGLE-3 head reads what enters layers {', '.join(map(str, layers))} of {count}; a swarm "
            f"sends that of {MAX_AUX_LAYERS} layers at most, where a span may begin, and not of the first"
        )
    return layers


def _ends(config: PreTrainedConfig) -> tuple[str, str, str]:
    """What the class of a head calls embedding, output matrix and norm."""
    config.tie_word_embeddings = False
    empty: Any = empty_model(config)
    layers, names = find_layers(empty), {module: name for name, module in empty.named_modules()}
    parts = (
        empty.get_input_embeddings(),
        empty.get_output_embeddings(),
        empty.get_submodule(layers.rpartition(".")[0]).norm,
    )
    first, second, third = (f"{names[part]}.weight" for part in parts)
    return first, second, third


def _own_names(model: str | Path) -> dict[str, str]:
    """A head's tensors: from their names without the prefix that some publish, to those by which they are read."""
    return {name.removeprefix("model."): name for name in stored_names(model)}


def _shared(
    tensors: dict[str, torch.Tensor], target: str | Path, revision: str | None, *, wants_output: bool
) -> dict[str, torch.Tensor]:
    """The target's embedding and output matrix, where the head has none of its own."""
    names = target_names(target, revision)
    wanted = {EMBEDDING: names.embedding} if EMBEDDING not in tensors else {}
    if wants_output:
        wanted[HEAD] = names.output
    found = read_tensors(target, set(wanted.values()), revision)
    return {own: found[name] for own, name in wanted.items()}


def _check_rest(model: str, names: Collection[str]) -> None:
    if unknown := sorted(set(names) - LEFT_OUT):
        raise UnsupportedModel(f"{model}: an EAGLE head with {unknown[0]!r}, which this version does not know")
