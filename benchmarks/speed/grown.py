"""Makes a model with a large model's shape that still writes the demo target's text.

A large model with random weights shows what a forward takes, and nothing of speculation: no draft guesses it. Here the
demo target's weights lie within those of a large Llama; all others are random where they meet only zeros, and zero
where they would add to the text's rows. Up to rounding it is the demo target's function, so its drafts fit:

    hidden rows    the first `hidden_size` of the demo's are used, behind them are zeros; norms divide by all of them,
                   which their weights and epsilon make good
    layers         spread evenly; those between add nothing
    heads          key head k is the demo's k, with its query heads; rotary dimension i of d lies at i · (D / d)
    vocabulary     behind the tokenizer's ids are others, which are never picked

    python -m benchmarks grown FOLDER --shape 8B --device cuda
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from safetensors.torch import load_file, save_file

from swarm.base.errors import ConfigError
from swarm.demo import TARGET
from swarm.files.pretrained import INDEX

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SCALE = 0.02
"""Deviation of the weights that meet zeros."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama's dimensions, as in its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


SHAPES = {
    "8B": LlamaShape(4_096, 14_336, 32, 32, 8, 128, 128_256),
    "3B": LlamaShape(3_072, 8_192, 28, 24, 8, 128, 128_256),
    "1B": LlamaShape(2_048, 8_192, 16, 32, 8, 64, 128_256),
    "135M": LlamaShape(576, 1_536, 30, 9, 3, 64, 49_152),
    "tiny": LlamaShape(256, 640, 15, 16, 4, 64, 4_200),
}
"""Llama 3's and SmolLM2's, from their configurations on the hub, and one for tests."""


@dataclass(frozen=True, slots=True)
class Options:
    """Grow the demo target."""

    folder: tyro.conf.Positional[Path]
    """Where the model is written."""
    shape: str = "8B"
    """Dimensions of the model, by name."""
    device: str = "cpu"
    """Where weights are drawn."""
    dtype: str = "bfloat16"
    """Of the model's weights."""


@contextmanager
def grown_model(folder: Path | None, shape: str, dtype: torch.dtype, device: str) -> Iterator[Path]:
    """The grown target's folder: one that was given, grown if it is empty, or one that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="canopy-grown-") as temporary:
        model = folder or Path(temporary)
        if not (model / INDEX).exists():  # which is written last
            grow(model, SHAPES[shape], dtype, device)
        yield model


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def grow(folder: Path, shape: LlamaShape, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
    """Write the grown target's checkpoint into a folder, a file per layer.

    Raises:
        ConfigError: the shape does not hold the demo target.
    """
    small = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    _check(shape, small)
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (TARGET / name).exists():
            shutil.copy(TARGET / name, folder / name)
    own = {name: getattr(shape, name) for name in shape.__slots__}
    part = small["hidden_size"] / shape.hidden_size
    own |= {"rms_norm_eps": small["rms_norm_eps"] * part, "tie_word_embeddings": False}
    own["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(small | own, indent=1), encoding="utf-8")
    weights = {name: data.to(device, torch.float32) for name, data in load_file(TARGET / "model.safetensors").items()}
    files: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_files(_Growth(shape, small, weights, device))):
        file = f"model-{number:05}.safetensors"
        tensors = {name: data.to(dtype).cpu().contiguous() for name, data in tensors.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        total += sum(data.nbytes for data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _check(shape: LlamaShape, small: dict[str, int]) -> None:
    """Refuse a shape that is too small, or whose rotary frequencies are others."""
    for name in shape.__slots__:
        if getattr(shape, name) < small[name]:
            raise ConfigError(f"{name} {getattr(shape, name)}: the demo target has {small[name]}")
    if shape.head_dim % small["head_dim"]:
        raise ConfigError(f"head_dim {shape.head_dim}: must be a multiple of {small['head_dim']}")
    if (
        shape.num_attention_heads * small["num_key_value_heads"]
        < shape.num_key_value_heads * small["num_attention_heads"]
    ):
        raise ConfigError("num_attention_heads: fewer query heads share a key head than in the demo target")


@dataclass(frozen=True, slots=True)
class _Growth:
    """What a grown model is made of."""

    shape: LlamaShape
    small: dict[str, int]
    weights: dict[str, torch.Tensor]
    device: str

    def noise(self, rows: int, columns: int) -> torch.Tensor:
        """Weights for inputs that are all zero: random behind the demo's own columns, zero before."""
        made = torch.randn(rows, columns, device=self.device).mul_(SCALE)
        made[:, : self.small["hidden_size"]] = 0
        return made

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weights: its rows' mean square is of more values, of which the further ones are zero."""
        made = torch.zeros(self.shape.hidden_size, device=self.device)
        width = self.small["hidden_size"]
        made[:width] = self.weights[name] * (width / self.shape.hidden_size) ** 0.5
        return made

    def rotary(self) -> torch.Tensor:
        """Where the demo's dimensions of a head lie among those of a larger one: equal frequencies, same halves."""
        half, times = self.small["head_dim"] // 2, self.shape.head_dim // self.small["head_dim"]
        first = torch.arange(half, device=self.device) * times
        return torch.cat([first, first + self.shape.head_dim // 2])

    def heads(self) -> list[int]:
        """Where the demo's query heads lie: below the key head that they had."""
        large = self.shape.num_attention_heads // self.shape.num_key_value_heads
        shared = self.small["num_attention_heads"] // self.small["num_key_value_heads"]
        return [head // shared * large + head % shared for head in range(self.small["num_attention_heads"])]

    def lay_heads(self, made: torch.Tensor, name: str, places: list[int], inner: torch.Tensor) -> None:
        """Put the demo's heads of q, k or v into a projection, their dimensions at `inner`; others stay zero."""
        width, small, size = self.small["hidden_size"], self.small["head_dim"], self.shape.head_dim
        for head, place in enumerate(places):
            made[place * size + inner, :width] = self.weights[name][head * small : (head + 1) * small]


def _files(growth: _Growth) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each file: ends first, then the layers."""
    shape, small, weights = growth.shape, growth.small, growth.weights
    width, known = small["hidden_size"], small["vocab_size"]
    embedding = torch.zeros(shape.vocab_size, shape.hidden_size, device=growth.device)
    embedding[:known, :width] = weights["model.embed_tokens.weight"]
    head = growth.noise(shape.vocab_size, shape.hidden_size)
    head[:known, :width] = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    yield {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": growth.norm("model.norm.weight"),
    }
    count = small["num_hidden_layers"]
    places = {place * shape.num_hidden_layers // count: place for place in range(count)}
    for layer in range(shape.num_hidden_layers):
        made = _layer(growth, places.get(layer))
        yield {f"model.layers.{layer}.{name}.weight": data for name, data in made.items()}


def _layer(growth: _Growth, place: int | None) -> dict[str, torch.Tensor]:
    """A layer: the demo's one, or one that adds nothing."""
    shape, device = growth.shape, growth.device
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
    made = {
        "input_layernorm": torch.ones(width, device=device),
        "post_attention_layernorm": torch.ones(width, device=device),
        "self_attn.q_proj": growth.noise(queries, width),
        "self_attn.k_proj": growth.noise(keys, width),
        "self_attn.v_proj": growth.noise(keys, width),
        "self_attn.o_proj": torch.zeros(width, queries, device=device),
        "mlp.gate_proj": growth.noise(inner, width),
        "mlp.up_proj": growth.noise(inner, width),
        "mlp.down_proj": torch.zeros(width, inner, device=device),
    }
    if place is not None:
        _lay(growth, f"model.layers.{place}", made)
    return made


def _lay(growth: _Growth, layer: str, made: dict[str, torch.Tensor]) -> None:
    """Put the demo's layer of that name into a large one."""
    small, size = growth.small, growth.shape.head_dim
    width, inner, each = small["hidden_size"], small["intermediate_size"], small["head_dim"]
    rotary, plain = growth.rotary(), torch.arange(each, device=growth.device)
    heads, shared = growth.heads(), list(range(small["num_key_value_heads"]))
    for norm in ("input_layernorm", "post_attention_layernorm"):
        made[norm] = growth.norm(f"{layer}.{norm}.weight")
    for part, places, dimensions in (("q", heads, rotary), ("k", shared, rotary), ("v", shared, plain)):
        name = f"self_attn.{part}_proj"
        growth.lay_heads(made[name], f"{layer}.{name}.weight", places, dimensions)
    made["self_attn.q_proj"] *= (size / each) ** 0.5  # scores are divided by the root of a larger width
    out = growth.weights[f"{layer}.self_attn.o_proj.weight"]
    for head, at in enumerate(heads):
        made["self_attn.o_proj"][:width, at * size + plain] = out[:, head * each : (head + 1) * each]
    for gate in ("mlp.gate_proj", "mlp.up_proj"):
        made[gate][:inner, :width] = growth.weights[f"{layer}.{gate}.weight"]
    made["mlp.down_proj"][:width, :inner] = growth.weights[f"{layer}.mlp.down_proj.weight"]


def main() -> None:
    """Grow and say how large it is."""
    options = tyro.cli(Options)
    if options.shape not in SHAPES:
        raise SystemExit(f"grown: no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    started = time.monotonic()
    grow(options.folder, SHAPES[options.shape], getattr(torch, options.dtype), options.device)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    print(f"{options.folder}: {size / 2**30:.1f} GiB in {time.monotonic() - started:.0f} s")  # noqa: T201
