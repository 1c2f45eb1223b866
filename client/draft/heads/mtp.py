"""Layers for multi-token prediction (MTP) that come with a checkpoint, as a draft head on the target's hidden rows.

    entering = proj([norm_e(embedding); norm_h(row before)]); row = norm(layer(entering))

Of several layers each one drafts a level of the tree, from the rows of the layer before.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; the rows that go in, and come back in, are those after a final
norm, as in transformers' `MtpModel`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedConfig

from client.draft.heads.files import read_tensors, stored_names
from client.draft.heads.layer_head import (
    PLACE,
    LayerHead,
    TargetNames,
    as_ragged,
    fill_layer,
    norm_with,
    target_names,
)
from swarm.base.errors import SwarmError, UnsupportedModel
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.files.families import text_config
from swarm.files.hub import find_model
from swarm.files.model_config import read_config
from swarm.files.pretrained import INDEX, TEXT_PART

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MTP = "mtp"
"""What `--draft` calls it."""
MAX_MTP_LAYERS = 8
"""Of one checkpoint; further ones are left out."""
MAX_FLOAT32_BYTES = 4 << 30
"""Of weights on a CPU, which computes faster in float32 but mostly has no more memory."""
ROLES = {
    "enorm.weight": "token_norm",
    "hnorm.weight": "row_norm",
    "eh_proj.weight": "proj",
    "shared_head.norm.weight": "norm",
    "pre_fc_norm_embedding.weight": "token_norm",
    "pre_fc_norm_hidden.weight": "row_norm",
    "fc.weight": "proj",
    "norm.weight": "norm",
}
"""From a tensor's name behind the layer's prefix to what it is; others are the decoder layer's."""
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""The target's own, stored once more."""
SCALE = "_scale_inv"
"""Ends the name of a weight's scales, one per block."""
NEEDED = {"token_norm", "row_norm", "proj", "norm"}


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """Where one MTP layer of a checkpoint is, by the names that the model's class would give.

    Attributes:
        roles: from what a tensor is to its name.
        layer: from tensors of the decoder layer, as they are called within it, to their names.
    """

    roles: dict[str, str] = field(default_factory=dict)
    layer: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """All of them."""
        return {*self.roles.values(), *self.layer.values()}


def find_mtp(names: Iterable[str], num_layers: int, number: int = 0) -> MtpTensors | None:
    """Find an MTP layer among a checkpoint's tensors, by its number; None where it has none.

    Either `….layers.N.` and further ones behind the last of N layers (DeepSeek, GLM), or `mtp.`: there several layers
    share all but `mtp.layers.` (Qwen).
    """
    found, own_layer = MtpTensors(), f"layers.{number}."
    behind = re.compile(rf"(?:^|\.)(?:layers\.{num_layers + number}|mtp)\.(?P<own>.+)$")
    for name in names:
        match = behind.search(name)
        if match is None or match["own"] in SHARED:
            continue
        own = match["own"]
        if own in ROLES:
            found.roles[ROLES[own]] = name
        elif (own.startswith(own_layer) or not own.startswith("layers.")) and not own.endswith(SCALE):
            found.layer[own.removeprefix(own_layer)] = name
    return found if found.roles.keys() >= NEEDED and found.layer else None


def has_mtp(model: str | Path, revision: str | None = None) -> bool:
    """Whether a checkpoint whose index is here comes with an MTP layer; the hub is not asked."""
    folder = Path(model).expanduser()
    try:
        index = folder / INDEX if folder.is_dir() else try_to_load_from_cache(str(model), INDEX, revision=revision)
        if not isinstance(index, str | Path) or not Path(index).exists():
            return False
        names = {re.sub(TEXT_PART, "", name) for name in json.loads(Path(index).read_bytes())["weight_map"]}
        layers = text_config(read_config(Path(index).parent, str(model))).num_hidden_layers
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SwarmError):
        return False  # a GGUF model, or one of which its loading says what is wrong
    return find_mtp(names, layers) is not None


class MtpHead(LayerHead):
    """An MTP layer: what enters is a projection of both normed parts, and its own norm is part of a row."""

    def __init__(self, model: RaggedModel, norms: Mapping[str, nn.Module], proj: torch.Tensor) -> None:
        """Take a loaded layer.

        Args:
            model: the layer, and behind it its norm and the target's output matrix.
            norms: `token_norm`, `row_norm`, `own`, and `final`, the target's.
            proj: [width, 2 · width].
        """
        super().__init__(model, norms["final"], model.vocab_size)
        self._deeper: tuple[MtpHead, ...] = ()
        self._norms = {role: norm.to(model.device, model.dtype) for role, norm in norms.items()}
        self._proj = proj.to(model.device, model.dtype)

    @property
    def layers(self) -> tuple[LayerHead, ...]:
        """As in `LayerHead`."""
        return (self, *self._deeper)

    def followed_by(self, deeper: Sequence[MtpHead]) -> MtpHead:
        """This one, whose deeper levels are drafted by further layers."""
        self._deeper = tuple(deeper)
        return self

    def run(
        self, work: SessionRows, tokens: torch.Tensor, rows: torch.Tensor, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `LayerHead`."""
        parts = [self._norms["token_norm"](self.embed(tokens)), self._norms["row_norm"](rows)]
        entering = F.linear(torch.cat(parts, dim=1), self._proj)
        hidden = self.model.forward([replace(work, rows=entering)])
        own: torch.Tensor = self._norms["own"](hidden)
        return self.model.logits(hidden[-last:]) if last else torch.empty(0), own


def load_mtp(model: str | Path, revision: str | None, device: torch.device, dtype: torch.dtype) -> MtpHead:
    """Load the MTP layers of a target's checkpoint: their tensors, embedding, output matrix and final norm; no other.

    Args:
        model: the target, by folder or hub id.
        revision: on the hub.
        device: where it is to run.
        dtype: in which type; on a CPU bfloat16 where float32 would take more than `MAX_FLOAT32_BYTES`.

    Raises:
        UnsupportedModel: the checkpoint has no MTP layer, or one that cannot be run.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, _ = find_model(model, revision)
    config = read_config(folder, str(model))
    text, stored = text_config(config), stored_names(model, revision)
    found = [find_mtp(stored, text.num_hidden_layers, number) for number in range(MAX_MTP_LAYERS)]
    places = [place for place in takewhile(lambda place: place is not None, found) if place is not None]
    if not places:
        raise UnsupportedModel(f"{model}: its checkpoint has no layer for multi-token prediction; draft with a model")
    configs = [mtp_config(text, place) for place in places]
    names = target_names(model, revision)
    if names.norm is None:
        raise UnsupportedModel(f"{model}: has no final norm of its own, which its MTP layer needs")
    shared = {names.embedding, names.output, names.norm}
    tensors = read_tensors(model, shared.union(*(place.names for place in places)), revision)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:  # packed, and its config does not say how
            raise UnsupportedModel(f"{text.model_type}: its MTP layer is quantised ({name}, {tensor.dtype})")
    if device.type == "cpu" and 4 * sum(tensor.numel() for tensor in tensors.values()) > MAX_FLOAT32_BYTES:
        dtype = torch.bfloat16
    filled = [_fill(*of, names, tensors, dtype) for of in zip(configs, places, strict=True)]
    for deeper in filled[1:]:  # one embedding and one output matrix for all
        deeper.set_input_embeddings(filled[0].get_input_embeddings())
        cast("Any", deeper).set_output_embeddings(cast("Any", filled[0]).get_output_embeddings())
    first, *others = [_head(one, place, names.norm, tensors, device) for one, place in zip(filled, places, strict=True)]
    return first.followed_by(others)


def _fill(
    config: PreTrainedConfig,
    place: MtpTensors,
    names: TargetNames,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> PreTrainedModel:
    ends = {name: tensors[name] for name in (names.embedding, names.output)}
    ends[str(names.norm)] = tensors[place.roles["norm"]]
    return fill_layer(config, {name: tensors[there] for name, there in place.layer.items()}, ends, dtype)


def _head(
    filled: PreTrainedModel, place: MtpTensors, final: str, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> MtpHead:
    norm = filled.get_submodule(final.removesuffix(".weight"))
    weights = {"token_norm": place.roles["token_norm"], "row_norm": place.roles["row_norm"], "final": final}
    norms = {role: norm_with(norm, tensors[name]) for role, name in weights.items()}
    return MtpHead(as_ragged(filled, device), {**norms, "own": norm}, tensors[place.roles["proj"]])


def mtp_config(text: PreTrainedConfig, found: MtpTensors) -> PreTrainedConfig:
    """The config of a model whose layer `PLACE` is the MTP layer: what depends on a layer's number is set for it.

    Raises:
        UnsupportedModel: the layer keeps no KV per token.
    """
    if any(".linear_attn." in f".{name}" for name in found.layer):
        raise UnsupportedModel(f"{text.model_type}: its MTP layer is recurrent, which is not handled")
    own: Any = copy.deepcopy(text)
    count, has_experts = PLACE + 1, any(".experts." in name for name in found.layer)
    own.num_hidden_layers = count
    for name, value in {
        "layer_types": ["full_attention"] * count,
        "mlp_layer_types": ["sparse" if has_experts else "dense"] * count,
        "first_k_dense_replace": 0 if has_experts else count,
        "mlp_only_layers": [] if has_experts else list(range(count)),
        "decoder_sparse_step": 1,
    }.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    if hasattr(own, "quantization_config"):
        del own.quantization_config
    found_config: PreTrainedConfig = own
    return found_config
