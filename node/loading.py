"""From a checkpoint and the options to a span in memory: device, dtype, room, progress. Blocking; runs on a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from tokenizers import Tokenizer

from node.checkpoint import Checkpoint, check_disk, check_memory
from node.config import ServeConfig
from node.span import Anatomy, SpanModel, dissect, load_span
from swarm.errors import ConfigError
from swarm.layers import Span

MAX_DEFAULT_KV_TOKENS = 262_144
KV_SHARE = 0.5
"""Part of the memory that is free after loading which KV may take."""

Say = Callable[[str], None]


def load(checkpoint: Checkpoint, config: ServeConfig, say: Say) -> SpanModel:
    """Check that the span fits, fetch its files and no others, and load it.

    Raises:
        ConfigError: the layers, the device or the room for them are not there.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device, checkpoint)
    anatomy = dissect(checkpoint.config)
    span = Span.parse(config.layers).within(anatomy.num_layers)
    say(f"{span.describe(anatomy.num_layers)} as {str(dtype).removeprefix('torch.')} on {device}")
    tensors = [name for name in checkpoint.weight_map if anatomy.holds(name, span)]
    check_disk(checkpoint, span, tensors)
    check_memory(span, anatomy.weights_in(span) * dtype.itemsize, _layer_bytes(anatomy, span, dtype), device)
    checkpoint.fetch(tensors, lambda file, done, total: say(f"fetching {file} ({done + 1} of {total})"))
    started = time.perf_counter()
    model = load_span(checkpoint, span, dtype, device)
    say(f"loaded {model.weight_bytes / 2**20:.1f} MiB of weights in {time.perf_counter() - started:.1f} s")
    return model


def pick_device(wanted: str) -> torch.device:
    """The device of that name; auto prefers a GPU.

    Raises:
        ConfigError: there is no such device.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {wanted!r} cannot be used ({reason}); cpu always can") from None
    return device


def pick_dtype(wanted: str, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """The compute type of that name; auto is exact on a CPU and the checkpoint's own type elsewhere."""
    if wanted != "auto":
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[wanted]
    own = checkpoint.config.get_text_config().dtype
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def default_kv_tokens(model: SpanModel) -> int:
    """As many KV tokens as half of the memory that is free now holds, within a bound."""
    device = model.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return max(1, min(MAX_DEFAULT_KV_TOKENS, int(free * KV_SHARE / model.layout.bytes_per_token)))


def count_tokens(folder: Path, vocab_size: int) -> int:
    """How many ids the tokenizer knows; ids above are padding of the embedding and are never picked."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return vocab_size
    ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()
    return min(vocab_size, max(ids, default=vocab_size - 1) + 1)


def _layer_bytes(anatomy: Anatomy, span: Span, dtype: torch.dtype) -> int:
    return max(anatomy.weights[f"{anatomy.layers}.{index}"] for index in range(span.start, span.end)) * dtype.itemsize
