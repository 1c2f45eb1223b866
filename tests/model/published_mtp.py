"""Tiny random checkpoints with an MTP layer, laid out as DeepSeek, GLM and Qwen publish theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from swarm.demo import TARGET

LAYERS = 4
"""Of the model; a further one is the MTP layer's."""
WIDTH = 32
_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_GROUPS,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "glm4_moe": {**_GROUPS, "head_dim": 16, "use_qk_norm": True},
    "qwen3_next": {
        "num_experts": 4,
        "head_dim": 16,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"] * 2,
    },
}
_QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}


def publish(family: str, folder: Path, *, is_able: bool = False, mtp_layers: int = 1) -> Path:
    """Save a random tiny model with MTP layers behind it.

    Args:
        family: of `PUBLISHED`.
        folder: for config, tokenizer, index and three files of weights: the layers', the ends' and the MTP layer's.
        is_able: whether text depends on its last token above all, and the MTP layers know how.
        mtp_layers: how many there are.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**_BASE | {"num_hidden_layers": LAYERS + mtp_layers}, **PUBLISHED[family])
    model = cast("Any", AutoModelForCausalLM).from_config(config).float()
    noise = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        weight.data += torch.randn(weight.shape, generator=noise) * 0.05
        if is_able and name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            weight.data *= 0.05
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number in range(mtp_layers):
        tensors = _with_mtp(tensors, family, number, is_able=is_able)
    (folder / "model.safetensors").unlink()
    files = {name: _file_of(name) for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    content["num_hidden_layers"], content["num_nextn_predict_layers"] = LAYERS, mtp_layers
    if "layer_types" in content:
        content["layer_types"] = content["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(content))
    shutil.copy(TARGET / "tokenizer.json", folder)
    return folder


def _file_of(name: str) -> str:
    if "mtp" in name or any(f"layers.{LAYERS + number}." in name for number in range(8)):
        return "mtp.safetensors"
    return "layers.safetensors" if ".layers." in name else "ends.safetensors"


def _with_mtp(tensors: dict[str, torch.Tensor], family: str, number: int, *, is_able: bool) -> dict[str, torch.Tensor]:
    generator, layer = torch.Generator().manual_seed(7 + number), f"model.layers.{LAYERS + number}."
    extra = {name: torch.randn(WIDTH, generator=generator) * 0.1 for name in ("enorm", "hnorm", "shared_head.norm")}
    extra["eh_proj"] = torch.randn(WIDTH, 2 * WIDTH, generator=generator) * 0.1
    if is_able:
        extra["eh_proj"] = torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], dim=1)
        extra["shared_head.norm"] = tensors["model.norm.weight"].clone()
    if family.startswith("qwen"):
        own = {name.replace(layer, "mtp.layers.0."): value for name, value in tensors.items()}
        return own | {f"{_QWEN_NAMES[name]}.weight": value for name, value in extra.items()}
    for name in ("enorm", "hnorm"):
        extra[name] += 1
    own = tensors | {f"{layer}{name}.weight": value for name, value in extra.items()}
    own[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return own
