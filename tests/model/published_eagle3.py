"""Random EAGLE-3 heads on rows of three layers, laid out as they are published, and their forward written out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

INNER, HEADS, KV_HEADS = 48, 4, 2
KNOWN = 64
"""Tokens that a head with a vocabulary of its own knows: every second one of the target."""


def publish_eagle3(folder: Path, target: Path, *, own_vocabulary: bool = True, own_embedding: bool = False) -> Path:
    """Save a head for a target: of the Llama class, whatever the target's is. `told` changes its config later."""
    theirs = json.loads((target / "config.json").read_text())
    width, vocab = theirs["hidden_size"], theirs["vocab_size"]
    known = KNOWN if own_vocabulary else vocab
    generator = torch.Generator().manual_seed(11)

    def made(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    head_dim = width // HEADS
    out = {"q": HEADS * head_dim, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim}
    tensors = {f"midlayer.self_attn.{name}_proj.weight": made(rows, 2 * width) for name, rows in out.items()}
    tensors |= {f"midlayer.mlp.{name}_proj.weight": made(INNER, width) for name in ("gate", "up")}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors |= {f"midlayer.{name}.weight": 1 + made(width) for name in norms}
    tensors |= {
        "midlayer.self_attn.o_proj.weight": made(width, width),
        "midlayer.mlp.down_proj.weight": made(width, INNER),
        "fc.weight": made(width, 3 * width),
        "norm.weight": 1 + made(width),
        "lm_head.weight": made(known, width),
    }
    if own_vocabulary:
        ids = torch.arange(known) * 2
        tensors |= {"d2t": ids - torch.arange(known), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, 1)}
    if own_embedding:
        tensors["embed_tokens.weight"] = made(vocab, width, scale=1.0)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab,
        "draft_vocab_size": known,
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def told(folder: Path, **changes: object) -> Path:
    """Change the config of a saved head."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


class PublishedForward:
    """The published forward, on the target's hidden states as transformers gives them."""

    def __init__(self, folder: Path, target: Path, layers: Sequence[int]) -> None:
        """Load a head and its target; `layers` are those of which it reads what enters them."""
        self.tensors = load_file(folder / "model.safetensors")
        self.config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
        self.target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.layers = layers

    @torch.no_grad()
    def logits(self, text: Sequence[int], base: int, count: int | None = None) -> torch.Tensor:
        """What follows each token behind the rows of `[base, base + count)` of a text: [count, tokens of the head]."""
        ids = torch.tensor(text)
        states = self.target(ids[None], output_hidden_states=True).hidden_states
        end = len(text) - 1 if count is None else base + count
        rows = torch.cat([states[layer][0, base:end] for layer in self.layers], dim=1)
        return self.of_rows(ids[base + 1 : end + 1], rows)

    @torch.no_grad()
    def of_rows(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The same for tokens [n] and the rows [n, 3 · width] of those before."""
        weight = self.tensors
        table = weight.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        hidden = rows @ weight["fc.weight"].T
        normed = self._norm(hidden, "midlayer.hidden_norm")
        residual = normed if getattr(self.config, "norm_before_residual", False) else hidden
        entering = torch.cat([self._norm(table[tokens], "midlayer.input_layernorm"), normed], dim=1)
        hidden = residual + self._attended(entering)
        inner = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (weight[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
        return self._norm(hidden, "norm") @ weight["lm_head.weight"].T

    def _attended(self, entering: torch.Tensor) -> torch.Tensor:
        count = len(entering)
        rotary = cast("Any", LlamaForCausalLM(self.config)).model.rotary_emb
        turns = rotary(entering[None], torch.arange(count)[None])
        part = {name: entering @ self.tensors[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv"}
        dim = self.config.hidden_size // HEADS
        q, k, v = (values.view(1, count, -1, dim).transpose(1, 2) for values in part.values())
        q, k = apply_rotary_pos_emb(q, k, *turns)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).reshape(count, -1) @ self.tensors["midlayer.self_attn.o_proj.weight"].T

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        made = LlamaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        made.weight.data = self.tensors[f"{name}.weight"]
        found: torch.Tensor = made(rows)
        return found
