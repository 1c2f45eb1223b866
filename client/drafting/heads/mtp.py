"""The layer for multi-token prediction (MTP) that comes with a checkpoint, as a draft head on the target's hidden rows.

    entering = proj([norm_e(embedding); norm_h(row before)]); row = norm(layer(entering))

Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; the rows that go in, and come back in, are those after a final
norm, as in transformers' `MtpModel`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedConfig

from client.drafting.heads.files import read_tensors, stored_names
from client.drafting.heads.layer_head import PLACE, LayerHead, as_ragged, fill_layer, norm_with
from client.drafting.heads.target_names import target_names
from swarm.errors import SwarmError, UnsupportedModel
from swarm.inference.ragged_batch import RaggedModel, SessionRows
from swarm.models.families import text_config
from swarm.models.hub import find_model
from swarm.models.pretrained import INDEX, TEXT_PART, read_config

MTP = "mtp"
"""What `--draft` calls it."""
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
    """Where a checkpoint's first MTP layer is, by the names that the model's class would give.

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


def find_mtp(names: Iterable[str], num_layers: int) -> MtpTensors | None:
    """Find the first MTP layer among a checkpoint's tensors; None where it has none.

    Either `….layers.N.` behind the last of N layers (DeepSeek, GLM), or `mtp.` (Qwen).
    """
    found = MtpTensors()
    behind = re.compile(rf"(?:^|\.)(?:layers\.{num_layers}|mtp)\.(?P<own>.+)$")
    for name in names:
        match = behind.search(name)
        if match is None or match["own"] in SHARED:
            continue
        own = match["own"]
        if own in ROLES:
            found.roles[ROLES[own]] = name
        elif re.match(r"layers\.[1-9]", own):  # of several layers the first
            continue
        elif not own.endswith(SCALE):
            found.layer[own.removeprefix("layers.0.")] = name
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
        self._norms = {role: norm.to(model.device, model.dtype) for role, norm in norms.items()}
        self._proj = proj.to(model.device, model.dtype)

    def run(
        self, work: SessionRows, tokens: torch.Tensor, rows: torch.Tensor, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `LayerHead`."""
        parts = [self._norms["token_norm"](self.embed(tokens)), self._norms["row_norm"](rows)]
        entering = F.linear(torch.cat(parts, dim=1), self._proj)
        hidden = self.model.forward([replace(work, rows=entering)])[-last:]
        own: torch.Tensor = self._norms["own"](hidden)
        return self.model.logits(hidden), own


def load_mtp(model: str | Path, revision: str | None, device: torch.device, dtype: torch.dtype) -> MtpHead:
    """Load the MTP layer of a target's checkpoint: its tensors, embedding, output matrix and final norm; no other.

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
    text = text_config(config)
    found = find_mtp(stored_names(model, revision), text.num_hidden_layers)
    if found is None:
        raise UnsupportedModel(f"{model}: its checkpoint has no layer for multi-token prediction; draft with a model")
    own = mtp_config(text, found)
    names = target_names(model, revision)
    if names.norm is None:
        raise UnsupportedModel(f"{model}: has no final norm of its own, which its MTP layer needs")
    shared = {names.embedding, names.output, names.norm}
    tensors = read_tensors(model, found.names | shared, revision)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:  # packed, and its config does not say how
            raise UnsupportedModel(f"{text.model_type}: its MTP layer is quantised ({name}, {tensor.dtype})")
    ends = {name: tensors[name] for name in (names.embedding, names.output)}
    ends[names.norm] = tensors[found.roles["norm"]]
    if device.type == "cpu" and 4 * sum(tensor.numel() for tensor in tensors.values()) > MAX_FLOAT32_BYTES:
        dtype = torch.bfloat16
    filled = fill_layer(own, {name: tensors[there] for name, there in found.layer.items()}, ends, dtype)
    norm = filled.get_submodule(names.norm.removesuffix(".weight"))
    weights = {"token_norm": found.roles["token_norm"], "row_norm": found.roles["row_norm"], "final": names.norm}
    norms = {role: norm_with(norm, tensors[name]) for role, name in weights.items()}
    return MtpHead(as_ragged(filled, device), {**norms, "own": norm}, tensors[found.roles["proj"]])


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
