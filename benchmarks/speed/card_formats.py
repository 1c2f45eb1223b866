"""What does a sweep take on a GPU in published formats, hybrids and mixtures?

Some layers of a large model's shape with random codes, made on the card: no file is read. Each runs by graphs and
kernels (docs/design/kernels.md) in sweeps of several sizes. The floor is what a sweep reads, weights and KV, at the
rate at which this GPU copies; of a mixture, as many experts as so many rows choose on average. Whether a tree's path
has the bits of the same tokens one by one is counted beside it.

    python -m benchmarks card_formats --json formats.json        # on a machine with a GPU: a minute and a half
    TRITON_INTERPRET=1 python -m benchmarks card_formats --device cpu --dtype float32 --shape tiny --layers 1 \\
        --rows 1 --context 20 --repeats 1 --models hybrid mixture         # the same steps on a CPU, in some minutes
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import torch
import tyro
from rich.console import Console
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.sheet import Recording, Sheet
from benchmarks.speed.card import FORCED_BUCKETS, REPLAYS, CardSession, copy_rate, median_s
from benchmarks.speed.grown import device_name
from node.model.loading import DTYPES
from swarm.base.cli import make_console
from swarm.base.layers import Span
from swarm.base.library_logging import quiet_libraries
from swarm.compute.devices import empty_cache
from swarm.compute.fast_path import BUCKETS, use_static
from swarm.compute.packed_layers import PackedLinear, SharedProduct, join_kernel_codes
from swarm.compute.ragged_batch import RaggedModel
from swarm.compute.tree_attention import use_canopy
from swarm.compute.weights.experts import TENSORS, PackedExperts, is_experts, run_as_packed
from swarm.compute.weights.kernel_codes import KernelCodes, expert_form
from swarm.compute.weights.stored_weight import StoredWeight
from swarm.files.gguf.encodings import ENCODINGS
from swarm.files.stored.combine import GroupedMatrix
from swarm.files.stored.eight_bits import Fp8Matrix
from swarm.files.stored.gguf_source import GgufMatrix
from swarm.files.stored.matrix import StoredMatrix

GROUP: Final = 128
HALF: Final[dict[str, tuple[int, ...]]] = {"q4_k": (0, 2), "q6_k": (208,), "mxfp4": ()}
"""Where a block of GGUF's has numbers of float16."""
WIDE: Final[dict[str, Any]] = {
    "hidden_size": 4_096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL: Final[dict[str, Any]] = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
DELTA: Final = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
HEAD: Final = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
FEW: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXTURE: Final = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
FEW_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SHAPES: Final[dict[str, dict[str, tuple[str, dict[str, Any]]]]] = {
    "8B": {
        "dense": ("llama", WIDE | {"intermediate_size": 14_336}),
        "hybrid": ("qwen3_5_text", WIDE | DELTA | HEAD | {"intermediate_size": 12_288}),
        "mixture": ("qwen3_moe", WIDE | MIXTURE | {"hidden_size": 2_048, "mlp_only_layers": []}),
    },
    "tiny": {
        "dense": ("llama", SMALL | {"intermediate_size": 256}),
        "hybrid": ("qwen3_5_text", SMALL | FEW | {"intermediate_size": 256}),
        "mixture": ("qwen3_moe", SMALL | FEW_EXPERTS | {"mlp_only_layers": []}),
    },
}
"""Llama 3 of 8B, Qwen3.5 of about as many, and Qwen3 of 30B with 3B active; and some for tests."""
CASES: Final = (
    *(("dense", form) for form in ("bf16", "q4_k", "q6_k", "gptq4", "awq4", "fp8", "mxfp4")),
    *(("hybrid", "q4_k"), ("mixture", "q4_k"), ("mixture", "mxfp4")),
)


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure published formats on a card."""

    shape: str = "8B"
    """Dimensions of the models, by name."""
    models: tuple[str, ...] = ("dense", "hybrid", "mixture")
    """Which of them."""
    layers: int = 8
    """Of each model."""
    device: str = "cuda"
    """Where it runs."""
    dtype: str = "bfloat16"
    """To compute in."""
    context: int = 1_024
    """Tokens in the KV cache."""
    rows: tuple[int, ...] = (1, 16, 64)
    """A sweep's: the pending token and its tree."""
    repeats: int = 7
    """Sweeps of each size."""


@dataclass(frozen=True, slots=True)
class FormatSweep:
    """Sweeps of one size: medians in milliseconds.

    Attributes:
        card_ms: The card alone.
        floor_ms: What reading the weights that it uses, and KV, takes.
    """

    model: str
    form: str
    rows: int
    wall_ms: float
    card_ms: float
    floor_ms: float


@dataclass(slots=True)
class FormatFindings:
    """What was measured.

    Attributes:
        memory_bytes_per_s: Copied within the card's memory, read and written.
        bits: Of a weight of the layers, scales included, by model and form.
        ready_s: Until a model was ready: compiled, recorded and proven.
        differing: Values of a tree's path that differ when its tokens are decoded one by one.
        paths: By which path each ran, in which class, and why by no faster one.
    """

    memory_bytes_per_s: float
    sweeps: list[FormatSweep] = field(default_factory=list)
    bits: dict[str, float] = field(default_factory=dict)
    ready_s: dict[str, float] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)


def random_matrix(form: str, rows: int, columns: int, device: torch.device) -> StoredMatrix:
    """A matrix of random codes, whose values are of an ordinary size."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)

    match form:
        case "gptq4" | "awq4":
            groups = columns // GROUP
            scales = torch.full((rows, groups), 2e-3, dtype=torch.float16, device=device)
            order = torch.randperm(columns).remainder(groups).to(device) if form == "gptq4" else None
            return GroupedMatrix.of(form, drawn(rows, columns // 2), scales, drawn(rows, groups) & 15, order)
        case "fp8":
            codes = (drawn(rows, columns) & 0xBF).view(torch.float8_e4m3fn)  # no number of 2 and more
            scales = torch.full((-(-rows // GROUP), columns // GROUP), 0.02, device=device)
            return Fp8Matrix.of(codes, scales, torch.float32, (GROUP, GROUP))
        case _:
            own = next(one for one in ENCODINGS.values() if one.name == form)
            blocks = drawn(rows, columns // own.block, own.block_bytes)
            for at in HALF[form]:
                blocks[..., at : at + 2] = torch.tensor([2e-5], dtype=torch.float16, device=device).view(torch.uint8)
            if form == "mxfp4":
                blocks[..., 0] = 121  # 2^-6, halved
            return GgufMatrix(blocks.view(rows, -1), own)


def plain_model(kind: tuple[str, dict[str, Any]], options: Options, device: torch.device) -> Any:  # noqa: ANN401 - any class
    """A model of a family, of a hybrid every fourth layer attends."""
    family, values = kind
    kinds = [("full_attention" if index % 4 == 3 else "linear_attention") for index in range(options.layers)]
    own = {
        "vocab_size": 32_000 if options.shape == "8B" else 256,
        "num_hidden_layers": options.layers,
        "max_position_embeddings": 16_384,
    }
    config = CONFIG_MAPPING[family](
        **own | values | ({"layer_types": kinds} if "linear_num_key_heads" in values else {})
    )
    use_canopy(config)
    maker: Any = AutoModelForCausalLM
    with device:
        return maker.from_config(config, dtype=DTYPES[options.dtype]).eval()


def made_model(kind: tuple[str, dict[str, Any]], form: str, options: Options) -> RaggedModel:
    """A model of random weights in a form, on the device."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    model = plain_model(kind, options, device)
    span = Span(0, options.layers)
    if form != "bf16":
        for index, layer in enumerate(model.get_submodule("model.layers")):
            _hold_codes(layer, form, dtype, device)
            join_kernel_codes(layer, partial(_run_alone, model, Span(index, index + 1)))
    made = RaggedModel(model, span)
    made.stored_as = "" if form == "bf16" else "gguf" if form in HALF else form
    return made


def _run_alone(model: Any, span: Span) -> None:  # noqa: ANN401 - any class
    RaggedModel(model, span, examine=False)


def _hold_codes(layer: torch.nn.Module, form: str, dtype: torch.dtype, device: torch.device) -> None:
    """Put random codes in place of a layer's matrices."""
    for name, part in list(layer.named_modules()):
        if type(part) is torch.nn.Linear and part.out_features >= GROUP and part.in_features % 256 == 0:
            matrix = random_matrix(form, part.out_features, part.in_features, device)
            weight = KernelCodes.of(StoredWeight([matrix], dtype))
            assert weight is not None
            layer.set_submodule(name, PackedLinear(SharedProduct(weight, None, [part.out_features])))
        elif is_experts(part):
            for tensor in (one for one in TENSORS if isinstance(getattr(part, one, None), torch.nn.Parameter)):
                shape = getattr(part, tensor).shape
                matrix = random_matrix(form, shape[0] * shape[1], shape[2], device)
                held = expert_form(StoredWeight([matrix], dtype), shape[0])
                assert held is not None
                delattr(part, tensor)
                setattr(part, tensor, PackedExperts(held, shape))
            run_as_packed(part)


def read_bytes(model: RaggedModel, rows: int, context: int) -> float:
    """What a sweep of so many rows reads: of experts, those that are chosen on average; of the embedding, nothing."""
    size = float(sum(one.numel() * one.itemsize for layer in model.layers for one in layer.parameters()))
    for part in (part for layer in model.layers for part in layer.modules() if isinstance(part, PackedExperts)):
        own = sum(one.numel() * one.itemsize for one in part.parameters())
        chosen: int = model.config.num_experts_per_tok
        size -= own * (1 - chosen / part.experts) ** rows
    return size + context * model.layout.bytes_per_token + rows * model.layout.state_bytes


class FormatBench:
    def __init__(self, options: Options, console: Console, keep: Callable[[FormatFindings], None]) -> None:
        """Measure how fast memory is.

        Args:
            keep: is given what was measured so far, after every case.
        """
        self._options, self._console, self._keep = options, console, keep
        self._device = torch.device(options.device)
        self.found = FormatFindings(copy_rate(self._device))

    def run(self) -> None:
        """Every case; one that has no fast path is said, and the next one runs."""
        for kind, form in (case for case in CASES if case[0] in self._options.models):
            self._measure(kind, form)
            self._keep(self.found)
            gc.collect()
            empty_cache()

    def _measure(self, kind: str, form: str) -> None:
        options, found, name = self._options, self.found, f"{kind}, {form}"
        began = time.monotonic()
        model = made_model(SHAPES[options.shape][kind], form, options)
        forced = self._device.type == "cpu"
        buckets = FORCED_BUCKETS[:1] if forced else tuple(one for one in BUCKETS if one <= max(options.rows))
        use_static(model, options.context + 1_024, buckets=buckets, forced=forced)
        found.ready_s[name] = time.monotonic() - began
        found.paths[name] = f"{model.path}, {model.numeric_class} {model.path_reason}".rstrip()
        weights = [one for layer in model.layers for one in layer.parameters()]
        packed = sum(one.numel() * one.itemsize for one in weights)
        plain = plain_model(SHAPES[options.shape][kind], options, torch.device("meta"))
        counted = sum(one.numel() for one in plain.get_submodule("model.layers").parameters())
        found.bits[name] = 8 * packed / counted
        self._console.print(f"{name}: {found.paths[name]}, {found.bits[name]:.2f} bits a weight", highlight=False)
        if model.static is None:
            return
        session = CardSession(model, options.context, max(options.rows))
        for rows in options.rows:
            wall_ms = median_s(partial(session.sweep, rows), options.repeats, self._device) * 1e3
            card_ms = self._card_ms(model, rows)
            floor_ms = read_bytes(model, rows, options.context) / found.memory_bytes_per_s * 1e3
            found.sweeps.append(FormatSweep(kind, form, rows, wall_ms, card_ms, floor_ms))
            said = f"{name}, {rows} rows: {wall_ms:.2f} ms, the card {card_ms:.2f}, floor {floor_ms:.2f}"
            self._console.print(said, highlight=False)
        found.differing[name] = session.differing(max(options.rows))

    def _card_ms(self, model: RaggedModel, rows: int) -> float:
        static = model.static
        assert static is not None
        times = REPLAYS if self._device.type == "cuda" else 1

        def several() -> None:
            for _ in range(times):
                static.replay(rows)

        return median_s(several, self._options.repeats, self._device) * 1e3 / times


def sheet(found: FormatFindings, options: Options) -> Sheet:
    made = Sheet(
        "card_formats",
        f"{options.shape} shapes, {options.layers} layers, {options.dtype}, on {device_name(options.device)}: ms",
        ("model, format", "bits", "rows", "wall", "the card alone", "× floor"),
    )
    for one in found.sweeps:
        name = f"{one.model}, {one.form}"
        times = f"{one.wall_ms:.2f}", f"{one.card_ms:.2f}", f"{one.card_ms / one.floor_ms:.2f}"
        made.rows.append((name, f"{found.bits[name]:.2f}", f"{one.rows}", *times))
    made.notes.append(
        f"{options.context:,} tokens. Floor: what a sweep reads at {found.memory_bytes_per_s / 1e9:,.0f} GB/s, a "
        f"copy's bytes, read and written. Medians of {options.repeats}."
    )
    made.notes += [f"{name}: ready after {took:.0f} s; {found.paths[name]}" for name, took in found.ready_s.items()]
    made.notes += [f"{name}: {count} values of a path differ" for name, count in found.differing.items()]
    made.measured = {**asdict(found), "options": asdict(options)}
    return made


def main() -> None:
    """Measure and print; the file of measurements is written after every case."""
    options = tyro.cli(Options)
    if options.shape not in SHAPES:
        sys.exit(f"card_formats: no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    quiet_libraries()
    console = make_console()

    def keep(found: FormatFindings) -> None:
        if options.json is not None:
            sheet(found, options).write(options.json)

    bench = FormatBench(options, console, keep)
    bench.run()
    sheet(bench.found, options).finish(console, options)
