"""What do the codecs of hidden rows cost, and what do they change in logits and texts?

In one process, on the bundled demo pair. Time: median of encoding and of decoding 64 rows of 8192 of a compute dtype,
and where they travel packed, of packing and unpacking too. Their numbers are noise; the demo target's rows, whose bytes
are counted too, leave its first and second span at 256 tokens at a time.
Link: what those rows take on a line of 100 Mbit/s, and what that saves against the dtype's lossless codec; computed.
Quality: the fp32 target in three spans whose rows pass through the codec, against the lossless one. Logits are
teacher-forced over whole held-out passages; texts are greedy, from the first 96 tokens of every second passage, once
plain and once with trees of 16.

    python -m benchmarks codec --prompts 4
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

import torch
import tyro
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import LEVELS, answer, demo_prompts
from client.decode.walk import Walk
from client.draft.drafter import Drafter, ModelDrafter, NoDrafter
from client.draft.sources.model import LocalSession
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows, load_whole
from swarm.compute.row_codec import decode_rows, encode_rows, lossless_codec
from swarm.demo import DRAFT, PASSAGES, TARGET
from swarm.protocol.messages import Codec, Rows, Sampling, Sweep
from swarm.protocol.packed_rows import pack, unpack
from swarm.protocol.session import Limits

ROWS, WIDTH, DEMO_WIDTH = 64, 8192, 192
LINK_BITS_PER_MS = 100e3
SPANS = (Span(0, 4), Span(4, 8), Span(8, 12))
TREE = 16
FRAME_ROWS = 256
TIMED = {
    "fp32": (Codec.FP32, torch.float32, False),
    "bf16": (Codec.BF16, torch.bfloat16, False),
    "fp32, packed": (Codec.FP32, torch.float32, True),
    "bf16, packed": (Codec.BF16, torch.bfloat16, True),
    "fp16, packed": (Codec.FP16, torch.float16, True),
    "int8 of fp32": (Codec.INT8, torch.float32, False),
    "int8 of bf16": (Codec.INT8, torch.bfloat16, False),
}
"""Codec, compute dtype, and whether rows travel packed."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure the codecs."""

    prompts: int = 24
    """How many of the 24 prompts, and twice as many passages."""
    new_tokens: int = 48
    """New tokens of each text."""
    repeats: int = 200
    """How often each timed step is run."""
    threads: int = 1
    """Threads of torch."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One codec's bytes and times. Times are milliseconds for 64 rows of 8192.

    Attributes:
        demo_row_bytes: A row of the demo target; packed, the mean over its rows.
        row_bytes: A row of 8192 values.
        link_ms: On a link of 100 Mbit/s.
        saved_ms: What that saves against the lossless codec.
    """

    codec: str
    demo_row_bytes: int
    row_bytes: int
    encode_ms: float
    decode_ms: float
    link_ms: float
    saved_ms: float


@dataclass(frozen=True, slots=True)
class Effect:
    """What one codec changes in the demo target, against fp32.

    Attributes:
        max_logit_change: The largest change of a logit.
        kl: Mean KL divergence over tokens, in nats.
        argmax_agreement: Share of tokens with the same argmax, teacher-forced.
        equal_tokens: Share of equal tokens at equal places of free-running texts.
        same_text: Texts that are those of fp32.
        same_tree_text: Texts that a tree of 16 leaves as plain decoding with the same codec makes them.
    """

    codec: str
    max_logit_change: float
    kl: float
    argmax_agreement: float
    equal_tokens: float
    same_text: int
    same_tree_text: int
    texts: int


class SplitSession(LocalSession):
    """A session of the target in three spans, hidden rows passing between them in a codec."""

    def __init__(self, model: RaggedModel, limits: Limits, codec: Codec) -> None:
        super().__init__(model, limits)
        self._kv_caches = [KvCache(model.layout.within(span), self.kv_cache.slots.capacity) for span in SPANS]
        self._codec = codec

    def run(self, sweep: Sweep) -> torch.Tensor:
        """Apply a sweep; the hidden rows [nodes, width] that leave the last span."""
        applied = self.state.apply(sweep)
        ids, rows = torch.tensor(sweep.tokens), None
        for span, kv_cache in zip(SPANS, self._kv_caches, strict=True):
            if applied.path:
                kv_cache.commit(applied.path, applied.survivors)
            if rows is not None:
                rows = decode_rows(encode_rows(rows, self._codec), rows.dtype)
            entering = ids if rows is None else None
            work = SessionRows(kv_cache, applied.appended, sweep.parents, applied.positions, entering, rows)
            rows = self.model.forward([work], span)
        assert rows is not None
        return rows


def median_ms(step: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        taken.append((time.perf_counter() - started) * 1e3)
    return median(taken)


def costs(options: Options) -> list[Cost]:
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    frames = demo_frames(options.prompts)
    found = []
    for name, (codec, dtype, is_packed) in TIMED.items():
        rows, change = values.to(dtype), pack if is_packed else _as_it_is
        sent = change(encode_rows(rows, codec))
        received = dataclasses.replace(sent, data=bytearray(sent.data))
        encode_ms = median_ms(lambda: change(encode_rows(rows, codec)), options.repeats)  # noqa: B023
        decode_ms = median_ms(lambda: decode_rows(unpack(received), dtype), options.repeats)  # noqa: B023
        demo_bytes = mean(len(change(encode_rows(frame.to(dtype), codec)).data) / len(frame) for frame in frames)
        row_bytes, lossless_bytes = len(sent.data) / ROWS, lossless_codec(dtype).row_bytes(WIDTH)
        times = (encode_ms, decode_ms, link_ms(row_bytes), link_ms(lossless_bytes - row_bytes))
        found.append(Cost(name, round(demo_bytes), round(row_bytes), *times))
    return found


def _as_it_is(rows: Rows) -> Rows:
    return rows


def demo_frames(prompts: int) -> list[torch.Tensor]:
    """What leaves the demo target's first and second span: of each passage, two frames of `FRAME_ROWS` at most."""
    target, frames = load_whole(TARGET, torch.float32), list[torch.Tensor]()
    for ids in passages(prompts):
        work = ids[:FRAME_ROWS]
        rows = None
        for span in SPANS[:2]:
            nodes = [TreeNodeId(place) for place in range(len(work))]
            kv_cache = KvCache(target.layout.within(span), len(work))
            entering = torch.tensor(work) if rows is None else None
            above = (None, *nodes[:-1])
            rows = target.forward([SessionRows(kv_cache, nodes, above, nodes, entering, rows)], span)
            frames.append(rows)
    return frames


def passages(prompts: int) -> list[list[int]]:
    """Token ids of held-out passages, two per prompt."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()[: 2 * prompts]
    return [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]


def link_ms(row_bytes: float) -> float:
    """What the rows take on the link."""
    return ROWS * row_bytes * 8 / LINK_BITS_PER_MS


def teacher_forced(target: RaggedModel, text: list[int], codec: Codec) -> torch.Tensor:
    """Logits [n, vocab] after every token of a text."""
    session = SplitSession(target, Limits(target.vocab_size, len(text), 1, len(text)), codec)
    walk = Walk(session.state.limits, Sampling())
    return target.logits(session.run(walk.prefill(text, last=True)))


def generate(target: RaggedModel, drafter: Drafter, prompt: list[int], codec: Codec, new_tokens: int) -> list[int]:
    nodes = 0 if isinstance(drafter, NoDrafter) else TREE
    limits = Limits(target.vocab_size, len(prompt) + new_tokens + nodes + LEVELS, 1, len(prompt) + nodes + 1)
    walk, session = Walk(limits, Sampling()), SplitSession(target, limits, codec)
    tokens = prompt + walk.accept(answer(session, walk.prefill(prompt, last=True)))
    while len(tokens) < len(prompt) + new_tokens:
        tokens += walk.accept(answer(session, walk.extend(drafter.grow(tokens, nodes, LEVELS, Sampling()))))
    return tokens[len(prompt) :][:new_tokens]


@dataclass(frozen=True, slots=True)
class CodecOutput:
    """What the target does with one codec.

    Attributes:
        logits: Of each passage: [n, vocab].
        plain: Texts without a tree.
    """

    logits: list[torch.Tensor]
    plain: list[list[int]]
    trees: list[list[int]]


def outcomes(options: Options, console: Console) -> dict[Codec, CodecOutput]:
    """Logits and texts with every codec, the lossless one first."""
    target, draft = load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32)
    drafter = ModelDrafter(draft, target.vocab_size, draft.max_positions or 2048)
    texts, found = passages(options.prompts), {}
    for codec in (Codec.FP32, Codec.BF16, Codec.INT8):
        outcome = found[codec] = CodecOutput([teacher_forced(target, text, codec) for text in texts], [], [])
        for prompt in track(demo_prompts(options.prompts), f"texts with {codec.value} rows", console=console):
            outcome.plain.append(generate(target, NoDrafter(), prompt, codec, options.new_tokens))
            outcome.trees.append(generate(target, drafter, prompt, codec, options.new_tokens))
    return found


def effect(codec: Codec, lossless: CodecOutput, changed: CodecOutput) -> Effect:
    """How an outcome differs from the lossless one."""
    rows = list(zip(torch.cat(lossless.logits), torch.cat(changed.logits), strict=True))
    texts = list(zip(lossless.plain, changed.plain, strict=True))
    tokens = [pair for old, new in texts for pair in zip(old, new, strict=True)]
    return Effect(
        codec=codec.value,
        max_logit_change=max(float((old - new).abs().max()) for old, new in rows),
        kl=mean(divergence(old, new) for old, new in rows),
        argmax_agreement=mean(bool(old.argmax() == new.argmax()) for old, new in rows),
        equal_tokens=mean(old == new for old, new in tokens),
        same_text=sum(old == new for old, new in texts),
        same_tree_text=sum(one == other for one, other in zip(changed.plain, changed.trees, strict=True)),
        texts=len(texts),
    )


def divergence(target_logits: torch.Tensor, other_logits: torch.Tensor) -> float:
    """KL(target ‖ other) of two rows of logits, in nats."""
    old, new = target_logits.double().log_softmax(-1), other_logits.double().log_softmax(-1)
    return float((old.exp() * (old - new)).sum())


def sheets(found_costs: list[Cost], found_effects: list[Effect]) -> list[Sheet]:
    cost = Sheet(
        "codec_cost",
        f"{ROWS} rows of {WIDTH}: ms to encode, to decode, on a 100 Mbit/s link",
        ("codec", "bytes, d=192", f"bytes, d={WIDTH}", "encode", "decode", "link", "saved"),
        measured={"costs": [dataclasses.asdict(one) for one in found_costs]},
    )
    for one in found_costs:
        times = (f"{one.encode_ms:.2f}", f"{one.decode_ms:.2f}", f"{one.link_ms:.1f}", f"{one.saved_ms:.1f}")
        cost.rows.append((one.codec, str(one.demo_row_bytes), str(one.row_bytes), *times))
    changes = Sheet(
        "codec_effect",
        "Demo target, fp32, three spans, against lossless rows",
        ("codec", "max |Δlogit|", "KL, nats", "same argmax", "equal tokens", "same text", "tree = plain"),
        measured={"effects": [dataclasses.asdict(change) for change in found_effects]},
    )
    for change in found_effects:
        shares = (f"{change.argmax_agreement:.2%}", f"{change.equal_tokens:.1%}")
        texts = (f"{change.same_text} of {change.texts}", f"{change.same_tree_text} of {change.texts}")
        changes.rows.append((change.codec, f"{change.max_logit_change:.3f}", f"{change.kl:.1e}", *shares, *texts))
    return [cost, changes]


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = make_console()
    found_costs, found = costs(options), outcomes(options, console)
    found_effects = [effect(codec, found[Codec.FP32], outcome) for codec, outcome in found.items()]
    for sheet in sheets(found_costs, found_effects):
        sheet.finish(console, options)
