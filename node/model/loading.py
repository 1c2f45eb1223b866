"""From a checkpoint and the options to a span in memory: device, dtype, room, progress. Blocking; runs on a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedConfig

from node.model.checkpoint import Checkpoint, check_disk, check_memory
from node.model.config import Experts, ServeConfig
from node.model.offload import Offload, held_bytes, load_offloaded
from node.model.packed_span import load_packed
from node.model.span import ModelLayout, SpanModel, dissect, load_span
from swarm.base.errors import ConfigError, NotEnoughSpace
from swarm.base.layers import Span
from swarm.compute.devices import default_device, free_bytes, open_device, refused_dtype
from swarm.compute.state_slots import POOL_BYTES
from swarm.compute.weights.codes_weight import codes_bytes
from swarm.compute.weights.format import WeightFormat, WeightsName, computes_bfloat16
from swarm.compute.weights.kernel_codes import MORE_THAN_STORED, UNREAD, card_bits
from swarm.files.families import keeps_states
from swarm.files.hub import Progress
from swarm.files.stored.source import WeightSource

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
OFFLOAD_KINDS: Final = ("cpu", "cuda")
"""Devices to which weights can be streamed."""
MAX_DEFAULT_KV_TOKENS = 262_144
PROGRESS_LINES = 20
READING_LINES, BAR_STEPS = 10, 400
"""How often it is said, or drawn, how much of the weights was read."""
READ_SILENTLY_BYTES = 256 << 20
"""Weights that are read for their digests without a word: a second or two."""
KV_SHARE = 0.5
"""Fraction of the memory that is free after loading which KV may take."""
AUTO_SHARE = 0.6
"""Fraction of the free memory that `--layers auto` fills with weights and KV."""
KV_RESERVE_TOKENS = 8_192
"""KV that `--layers auto` allows for: two sessions of 4,096 tokens."""
RESERVED_SESSIONS = 2
"""Sessions for whose states of recurrent layers `--layers auto` allows."""
EXPANDED: Final = WeightFormat(torch.float32)
"""Stored weights take what they take in the file."""
Say = Callable[[str], None]


def format_of(  # noqa: PLR0913 - what a command line says of them
    checkpoint: Checkpoint,
    layout: ModelLayout,
    name: WeightsName,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_kernels: bool = True,
    experts: Experts = "device",
) -> WeightFormat:
    """How a checkpoint's weights are held under a name of the command line, with their sizes where they stay stored.

    Args:
        has_kernels: whether kernels, or a CPU's products with integers, are wanted; they are used where the device can.
        experts: where those of a mixture are.
    """
    source, on_host = checkpoint.source, experts == "cpu"
    form = WeightFormat.of(name, dtype, device, source.encoding, has_codes=source.has_codes)
    form = replace(
        form,
        with_kernels=form.with_kernels and has_kernels,
        codes=form.codes and has_kernels and not on_host,
        host_experts=on_host,
    )
    return form.with_stored_sizes(stored_sizes(checkpoint, layout, form)) if form.stored else form


def kernels_read(checkpoint: Checkpoint) -> bool:
    """Whether kernels read all weights of a checkpoint as it is published."""
    source = checkpoint.source
    kinds = {kind for name in source.files for kind in source.encodings(name)}
    return source.encoding not in UNREAD and all(card_bits(kind) is not None for kind in kinds)


def stored_sizes(
    checkpoint: Checkpoint, layout: ModelLayout, form: WeightFormat = EXPANDED
) -> dict[str, tuple[int, int]]:
    """How many weights are held packed, and their bytes, by the name of each module with some of which that is known.

    Layers whose tensors have the same names take the same, so that of a model on the hub few headers are read.
    """
    names: dict[str, list[str]] = {}
    for tensor, owner in layout.owners(checkpoint.weight_map).items():
        if owner is not None and owner in layout.weights:
            names.setdefault(owner, []).append(tensor)
    alike: dict[tuple[int, tuple[str, ...]], tuple[int, int] | None] = {}
    found: dict[str, tuple[int, int]] = {}
    for module, own in names.items():
        index = f".{module.rpartition('.')[2]}."
        key = (layout.weights[module], tuple(sorted(tensor.partition(index)[2] or tensor for tensor in own)))
        if alike.get(key) is None:
            alike[key] = _size_of(checkpoint, own, form)
        size = alike[key]
        if size is not None:
            found[module] = size
    return found


def _size_of(checkpoint: Checkpoint, tensors: list[str], form: WeightFormat) -> tuple[int, int] | None:
    source, weights, held = checkpoint.source, 0, 0
    for tensor in tensors:
        sizes = source.stored_sizes(tensor)
        weights += sum(size.weights for size in sizes)
        if form.with_kernels and sizes:
            held += _card_bytes(source, tensor, sum(size.size_bytes for size in sizes))
        else:
            held += sum(codes_bytes(size) if form.codes else size.size_bytes for size in sizes)
    return (weights, held) if weights else None


def _card_bytes(source: WeightSource, tensor: str, size_bytes: int) -> int:
    """What a stored tensor takes where kernels read it."""
    kinds = {kind: card_bits(kind) for kind in source.encodings(tensor)}
    if kinds and None not in kinds.values():
        return int(sum(count * (kinds[kind] or 0) / 8 for kind, count in source.encodings(tensor).items()))
    return size_bytes if kinds else int(size_bytes * MORE_THAN_STORED)


@runtime_checkable
class ShowsProgress(Protocol):
    """A `Say` that can also draw what takes long, as a terminal can."""

    def fetching(self, file: str, here: int, total: int) -> None:
        """A download goes on: so many of all bytes are here."""

    def reading(self, file: str, read: int, total: int) -> None:
        """Files are read: so many of all bytes were."""

    def working(self, what: str) -> AbstractContextManager[None]:
        """Something goes on until the context is left."""


def load(
    checkpoint: Checkpoint, config: ServeConfig, say: Say, held: Mapping[str, nn.Module] | None = None
) -> SpanModel:
    """Check that the span fits, fetch its files and no others, and load it.

    Args:
        config: the layers, the device and how to compute.
        held: parts of the last span that this one needs too; they are not read again.

    Raises:
        ConfigError: the layers, the device or the room for them are not there.
    """
    device, dtype = compute_of(checkpoint, config)
    layout = dissect(checkpoint.config)
    has_kernels = not (config.offload or config.no_graphs)  # streamed layers run the plain path: their class says so
    form = format_of(checkpoint, layout, config.weights, dtype, device, has_kernels=has_kernels, experts=config.experts)
    span = layout.borders.check(Span.parse(config.layers))
    held = held or {}
    weights = f" with {config.weights} weights" if form.bits else f" with weights in {form.stored}" * bool(form.stored)
    say(f"{span.describe(layout.num_layers)} as {str(dtype).removeprefix('torch.')}{weights} on {device}")
    if config.offload:
        return _load_offloaded(checkpoint, config, (layout, span, form, device), say)
    needs_bytes = layout.bytes_in(span, form, held)
    check_memory(span, needs_bytes + _unpacked_bytes(layout, span, form), _layer_bytes(layout, span, form), device)
    _check_experts(layout, span, form, say)
    fetch(checkpoint, layout, span, say)
    started = time.perf_counter()
    with _working(say, f"loading {needs_bytes / 2**20:,.0f} MiB of weights"):
        if form.product_bits or form.stored or form.host_experts:
            model = load_packed(checkpoint, span, form, device, held, ordered=not config.no_promise)
        else:
            model = load_span(checkpoint, span, dtype, device, held)
    say(f"loaded {model.weight_bytes / 2**20:.1f} MiB of weights in {time.perf_counter() - started:.1f} s")
    if form.stored:
        say(held_as_stored(model))
    return model


def held_as_stored(model: SpanModel) -> str:
    """What a user is told of a span whose weights are held as a quantised checkpoint has them."""
    packed, others = model.packed_bytes, model.weight_bytes - model.packed_bytes
    how = "read by kernels" if model.reads_codes else "expanded block by block"
    how = "multiplied as they are" if model.codes_version else how
    varies = f"; texts may depend on trees: {model.varies}" if model.varies else ""
    return (
        f"{model.stored_as} as published: {packed / 2**20:,.1f} MiB of weights, {how}; "
        f"{others / 2**20:,.1f} MiB are held in {str(model.dtype).removeprefix('torch.')}{varies}"
    )


def _load_offloaded(
    checkpoint: Checkpoint, config: ServeConfig, parts: tuple[ModelLayout, Span, WeightFormat, torch.device], say: Say
) -> SpanModel:
    layout, span, form, device = parts
    held, stored = held_bytes(layout, span, form)
    check_memory(span, held + _unpacked_bytes(layout, span, form), _layer_bytes(layout, span, form), device)
    if device.type != "cpu" and config.offload_folder is None:
        check_memory(span, stored, _layer_bytes(layout, span, form))
    fetch(checkpoint, layout, span, say)
    started = time.perf_counter()
    model = load_offloaded(checkpoint, span, form, device, Offload(config.offload_mb_per_s, config.offload_folder))
    say(
        f"offloaded {model.stored_bytes / 2**20:.1f} MiB of layers in {time.perf_counter() - started:.1f} s; "
        f"{model.weight_bytes / 2**20:.1f} MiB of weights are held"
    )
    return model


def fetch(checkpoint: Checkpoint, layout: ModelLayout, span: Span, say: Say) -> None:
    """Download what a span needs and is not here yet: files, or ranges of large ones.

    Raises:
        SwarmError: the disk has no room for them, or they cannot be had.
    """
    if unused := layout.unused(checkpoint.weight_map):
        say(f"{len(unused)} tensors of the checkpoint are not used, such as {unused[0]}: no layer needs them")
    tensors = layout.needed(checkpoint.weight_map, span)
    check_disk(checkpoint, span, tensors)
    for one in checkpoint.plan(tensors):
        if one.ranges is not None and one.missing_bytes:
            say(one.describe())
    checkpoint.fetch(tensors, progress_lines(say), say)


def compute_of(checkpoint: Checkpoint, config: ServeConfig) -> tuple[torch.device, torch.dtype]:
    """Where and in which type a node computes.

    Raises:
        ConfigError: the device is not there, or cannot compute in that type.
    """
    device = pick_device(config.device)
    return device, pick_dtype(config, device, checkpoint)


def _check_experts(layout: ModelLayout, span: Span, form: WeightFormat, say: Say) -> None:
    """Refuse a span whose experts do not fit into host memory, if they are to stay there.

    Raises:
        ConfigError: it has no experts.
        NotEnoughSpace: says needs, has and how many layers would fit.
    """
    if not form.host_experts:
        return
    own = layout.expert_bytes(span, form)
    if not own:
        raise ConfigError("--experts cpu: this model has no experts that can be computed apart; leave it out")
    say(f"{own / 2**20:,.0f} MiB of experts stay in host memory, where the CPU computes those that a sweep chose")
    if not form.on_cpu:
        check_memory(span, own + _unpacked_bytes(layout, span, replace(form, host_experts=False)), own // len(span))


def fitting_layers(
    layout: ModelLayout,
    form: WeightFormat,
    free_bytes: int,
    kv_tokens: int | None = None,
    host_bytes: int | None = None,
) -> int:
    """How many layers fit in `AUTO_SHARE` of the free memory, wherever in the model, beside KV for some tokens.

    Args:
        free_bytes: of the device.
        host_bytes: of the machine, for experts that stay there; None asks for no room.

    Raises:
        NotEnoughSpace: not one does.
    """
    count = layout.num_layers
    kv_weights = _kv_width(layout.config) * (kv_tokens or KV_RESERVE_TOKENS)
    beside = _unpacked_bytes(layout, Span(0, count), form)
    if keeps_states(layout.config):
        beside += RESERVED_SESSIONS * POOL_BYTES

    def needs_bytes(layers: int) -> int:
        spans = (Span(start, start + layers) for start in range(count - layers + 1))
        weights = max(layout.bytes_in(span, form) for span in spans)
        return weights + kv_weights * layers * form.dtype.itemsize + beside

    def has_room(layers: int) -> bool:
        if needs_bytes(layers) > free_bytes * AUTO_SHARE:
            return False
        spans = (Span(start, start + layers) for start in range(count - layers + 1))
        apart = form.host_experts and not form.on_cpu and host_bytes is not None
        return not apart or max(layout.expert_bytes(span, form) for span in spans) <= (host_bytes or 0) * AUTO_SHARE

    fit = next((layers for layers in range(count, 0, -1) if has_room(layers)), 0)
    if not fit and needs_bytes(1) <= free_bytes * AUTO_SHARE:
        need = max(layout.expert_bytes(Span(start, start + 1), form) for start in range(count))
        raise NotEnoughSpace(
            f"this machine is too small: the experts of one layer take {need / 2**30:.1f} GiB of host memory, and "
            f"a node takes {AUTO_SHARE:.0%} of the {(host_bytes or 0) / 2**30:.1f} GiB that are free. End other "
            "programs, add memory or serve a smaller model"
        )
    if not fit:
        lacks = needs_bytes(1) / AUTO_SHARE - free_bytes
        can_help = not (form.host_experts or form.on_cpu) and layout.expert_bytes(Span(0, 1), form)
        apart = ", and --experts cpu leaves a mixture's experts in host memory" if can_help else ""
        raise NotEnoughSpace(
            f"this machine is too small: not one layer fits. One needs {needs_bytes(1) / 2**30:.1f} GiB with its KV, "
            f"and a node takes {AUTO_SHARE:.0%} of the {free_bytes / 2**30:.1f} GiB that are free, so "
            f"{lacks / 2**30:.1f} GiB are missing. End other programs, add memory or serve a smaller model; "
            f"--num-layers 1 tries it all the same{apart}"
        )
    return fit


def progress_lines(say: Say) -> Progress:
    """Report a download in a bar, or in lines: one when a file begins, and one for each twentieth of all the bytes."""
    if isinstance(say, ShowsProgress):
        return say.fetching
    last = ("", 0)

    def report(file: str, here: int, total: int) -> None:
        nonlocal last
        now = (file, PROGRESS_LINES * here // max(1, total))
        if now != last:
            last = now
            say(f"fetching {file}: {here / 2**20:,.0f} of {total / 2**20:,.0f} MiB are here")

    return report


def reading_lines(say: Say) -> Progress:
    """Report that weight files are read to know them by their contents: nothing where that takes a moment only."""
    steps = BAR_STEPS if isinstance(say, ShowsProgress) else READING_LINES
    last = -1

    def report(file: str, read: int, total: int) -> None:
        nonlocal last
        now = steps * read // max(1, total)
        if total < READ_SILENTLY_BYTES or now == last:
            return
        last = now
        if isinstance(say, ShowsProgress):
            say.reading(file, read, total)
        else:
            read_gib, total_gib = read / 2**30, total / 2**30
            say(f"reading the weights once, to know them by their contents: {read_gib:,.1f} of {total_gib:,.1f} GiB")

    return report


def _working(say: Say, what: str) -> AbstractContextManager[None]:
    return say.working(what) if isinstance(say, ShowsProgress) else nullcontext()


def check_compute(config: ServeConfig) -> None:
    """Refuse a device or a compute type before anything slow is begun.

    Raises:
        ConfigError: the device is not there, or cannot compute in that type, or not with --offload.
    """
    device = pick_device(config.device)
    if config.offload and device.type not in OFFLOAD_KINDS:
        raise ConfigError(f"--offload streams weights to a CPU or by CUDA, not to {device.type}; use --device cpu")
    if config.dtype != "auto":
        check_dtype(DTYPES[config.dtype], device)


def pick_device(name: str) -> torch.device:
    """The device of that name; auto prefers a GPU.

    Raises:
        ConfigError: there is no such device, or it is of a kind that no span runs on.
    """
    return default_device() if name == "auto" else open_device(name)


def pick_dtype(config: ServeConfig, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """The compute type of the options: by itself the checkpoint's own on a card, exact on a CPU but for packed weights.

    Raises:
        ConfigError: the device cannot compute in it.
    """
    own = checkpoint.config.get_text_config().dtype
    auto = own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32
    if checkpoint.source.has_codes and config.weights == "auto" and computes_bfloat16(device):
        auto = torch.bfloat16  # for which a CPU has products with integers
    dtype = DTYPES.get(config.dtype, auto)
    check_dtype(dtype, device)
    return dtype


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a type in which the device only imitates computing, at a fraction of its speed.

    Raises:
        ConfigError: says which type to use.
    """
    if refusal := refused_dtype(dtype, device):
        raise ConfigError(refusal)


def check_kv(model: SpanModel, kv_tokens: int | None) -> None:
    """Refuse more KV tokens than the memory that is free beside the layers holds.

    Raises:
        NotEnoughSpace: says needs, has and how many tokens would fit.
    """
    has, each = free_bytes(model.device), model.layout.bytes_per_token
    if kv_tokens is not None and kv_tokens * each > has:
        raise NotEnoughSpace(
            f"--kv-tokens {kv_tokens} need {kv_tokens * each / 2**30:.1f} GiB of memory, {has / 2**30:.1f} GiB are "
            f"free; {int(has / each)} would fit"
        )


def default_kv_tokens(model: SpanModel, share: Callable[[int], int] = int) -> int:
    """As many KV tokens as half of the memory that is free now holds, within a bound; `share` is the model's of it."""
    fit = int(share(free_bytes(model.device)) * KV_SHARE / max(model.layout.bytes_per_token, 1))
    return max(1, min(MAX_DEFAULT_KV_TOKENS, fit))


def count_tokens(folder: Path, vocab_size: int) -> int:
    """How many ids the tokenizer knows; ids above are padding of the embedding and are never picked."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return vocab_size
    ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()
    return min(vocab_size, max(ids, default=vocab_size - 1) + 1)


def _kv_width(config: PreTrainedConfig) -> int:
    """How many numbers a layer keeps per token at most: keys and values, or the row that a mixer is given."""
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    kv_width = 2 * (getattr(config, "num_key_value_heads", None) or heads) * width
    return int(max(kv_width, config.hidden_size) if keeps_states(config) else kv_width)


def _layer_bytes(layout: ModelLayout, span: Span, form: WeightFormat) -> int:
    return max(layout.bytes_of(f"{layout.layers}.{index}", form) for index in range(span.start, span.end))


def _unpacked_bytes(layout: ModelLayout, span: Span, form: WeightFormat) -> int:
    """What the largest layer takes before it is packed, while the others lie there packed.

    Decoded weights of a quantised checkpoint lie there twice: as they were decoded, and as the class joins them.
    """
    if not form.bits and not form.stored:
        return 0
    plain = WeightFormat(form.dtype, on_cpu=form.on_cpu, host_experts=form.host_experts)
    return _layer_bytes(layout, span, plain) * (2 if form.stored else 1)
