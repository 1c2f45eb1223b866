"""The layer for multi-token prediction (MTP) that comes with a checkpoint, as a draft head on the target's hidden rows.

    x = proj([norm_e(embedding of a token); norm_h(normed hidden row of the token before)])
    row = norm(layer(x)); logits = output matrix · row: what follows the token

It goes on from its own row where the target's is not known yet. The decoder layer is the family's own class, of which
this is a span of one layer: attention over a tree, KV and positions are those of every span. Owns no session.

Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; the rows that go in, and come back in, are those after a final
norm, as in transformers' `MtpModel`.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from client.drafting.heads.files import read_tensors, stored_names
from client.drafting.heads.target_names import target_names
from swarm.errors import UnsupportedModel
from swarm.inference.ragged_batch import PassThroughLayer, RaggedModel, SessionRows, find_layers
from swarm.inference.tree_attention import use_canopy
from swarm.layers import Span
from swarm.models.families import text_config
from swarm.models.hub import find_model
from swarm.models.pretrained import INDEX, first_line, read_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

MTP = "mtp"
"""What `--draft` calls it."""
PLACE = 1
"""The layer's place in its own model: rows enter behind the layer before, which passes them through."""
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
        scales: names of what weights in 8-bit floats are multiplied by.
    """

    roles: dict[str, str] = field(default_factory=dict)
    layer: dict[str, str] = field(default_factory=dict)
    scales: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """All of them."""
        return {*self.roles.values(), *self.layer.values(), *self.scales}


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
        elif own.endswith(SCALE):
            found.scales.add(name)
        else:
            found.layer[own.removeprefix("layers.0.")] = name
    return found if found.roles.keys() >= NEEDED and found.layer else None


def has_mtp(model: str | Path, revision: str | None = None) -> bool:
    """Whether a checkpoint whose index is here comes with an MTP layer; nothing is fetched for the answer."""
    try:
        folder, _ = find_model(model, revision)
        if not (folder / INDEX).exists():
            return False
        layers = text_config(read_config(folder, str(model))).num_hidden_layers
        return find_mtp(stored_names(model, revision), layers) is not None
    except Exception:  # noqa: BLE001 - whoever needs the model is told what is wrong with it
        return False


class MtpHead:
    """An MTP layer, ready to run.

    Attributes:
        model: the decoder layer as a span, with the norm behind it and the target's output matrix.
        bytes_held: of its weights.
    """

    def __init__(self, model: RaggedModel, norms: Mapping[str, nn.Module], proj: torch.Tensor) -> None:
        """Take a loaded layer.

        Args:
            model: as in the attributes; span `[PLACE, PLACE + 1)`.
            norms: `token_norm`, `row_norm`, and `final`, the target's own final norm.
            proj: [width, 2 · width].
        """
        self.model = model
        self._norms = norms
        self._proj = proj
        self._embedding = cast("nn.Module", cast("Any", model.model).get_input_embeddings())
        self.bytes_held = model.weight_bytes + proj.numel() * proj.itemsize

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.model.device

    def normed(self, rows: torch.Tensor) -> torch.Tensor:
        """The target's hidden rows [n, width] as the layer expects them: behind the target's final norm."""
        found: torch.Tensor = self._norms["final"](rows.to(self.device, self.model.dtype))
        return found

    def entering(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What enters the layer [n, width], for tokens int64 [n] and normed rows [n, width] of the tokens before."""
        embedded = self._norms["token_norm"](self._embedding(tokens.to(self.device)))
        return F.linear(torch.cat([embedded, self._norms["row_norm"](rows)], dim=1), self._proj)

    def run(self, work: SessionRows, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run new nodes and keep their KV.

        Args:
            work: the nodes, by `rows` of `entering`.
            last: of how many nodes, the last ones, the output is asked for.

        Returns:
            Logits float32 [last, vocab_size], and the layer's own normed rows [last, width].
        """
        hidden = self.model.forward([work])[-last:]
        rows = cast("Any", self._norms["own"])(hidden)
        return self.model.logits(hidden), rows


def load_mtp(model: str | Path, revision: str | None, device: torch.device, dtype: torch.dtype) -> MtpHead:
    """Load the MTP layer of a target's checkpoint: its tensors, embedding, output matrix and final norm; no other.

    Args:
        model: the target, by folder or hub id.
        revision: on the hub.
        device: where it is to run.
        dtype: in which type.

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
    tensors = _expanded(read_tensors(model, found.names | shared, revision), text)
    state = {name: tensors[name] for name in (names.embedding, names.output)} | {
        names.norm: tensors[found.roles["norm"]]
    }
    filled = _fill(own, found, {name: tensors[name] for name in found.layer.values()}, state, dtype)
    ragged = RaggedModel(cast("PreTrainedModel", cast("Any", filled).to(device)), Span(PLACE, PLACE + 1))
    norm = filled.get_submodule(names.norm.removesuffix(".weight"))
    weights = {"token_norm": found.roles["token_norm"], "row_norm": found.roles["row_norm"], "final": names.norm}
    norms = {role: _norm_like(norm, tensors[name]) for role, name in weights.items()}
    return MtpHead(ragged, {**norms, "own": norm}, tensors[found.roles["proj"]].to(device, dtype))


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
    use_canopy(own)
    found_config: PreTrainedConfig = own
    return found_config


def _fill(
    config: PreTrainedConfig,
    found: MtpTensors,
    layer: Mapping[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """The family's class with the MTP layer in it, and a layer that passes through before it."""
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    class MtpSpan(base):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            layers = self.get_submodule(find_layers(self))
            for index in range(PLACE):
                layers[index] = PassThroughLayer(layers[index])

    with torch.device("meta"):
        where = find_layers(base(config))
    state |= {f"{where}.{PLACE}.{own}": layer[name] for own, name in found.layer.items()}
    try:
        filled, info = MtpSpan.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise UnsupportedModel(f"{config.model_type}: its MTP layer does not load ({first_line(error)})") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loose := sorted(map(str, info[problem])):
            what = f"{len(loose)} {problem.replace('_', ' ')}, such as {loose[0]}"
            raise UnsupportedModel(f"{config.model_type}: its MTP layer does not fit its class: {what}")
    model: PreTrainedModel = filled.eval()
    return model


def _norm_like(norm: nn.Module, weight: torch.Tensor) -> nn.Module:
    """Another norm of the same class."""
    other = copy.deepcopy(norm)
    own = cast("nn.Parameter", other.weight)
    own.data = weight.to(own.device, own.dtype)
    return other


def _expanded(tensors: dict[str, torch.Tensor], text: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Weights in 8-bit floats times their scales, one per block, where a checkpoint has them so.

    Raises:
        UnsupportedModel: another format.
    """
    settings = dict(getattr(text, "quantization_config", None) or {})
    block = settings.get("weight_block_size") or (128, 128)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            whole = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            tensor = (tensor.float() * whole[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        elif not tensor.is_floating_point() or tensor.itemsize == 1:
            raise UnsupportedModel(f"{text.model_type}: its MTP layer is quantised ({name}, {tensor.dtype})")
        found[name] = tensor
    return found
