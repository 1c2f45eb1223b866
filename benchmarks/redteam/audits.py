"""Do audits name liars, never an honest machine, and what do they cost?

In one process, on the bundled target: three spans of four layers. What enters and leaves a span comes from a run in
sweeps, as a chain makes it; the span's rows are then recomputed in chunks, as an audit does, and judged.

    python -m benchmarks audits --seed 1 --seconds 200 --json 1.json    # a piece: honest rows of that seed
    python -m benchmarks audits --gguf FILE --json 2.json               # the same of a file that is multiplied as it is
    python -m benchmarks audits --gguf FILE --pieces 1.json 2.json … --record   # all of them, liars, what audits take

The last needs a processor that computes in bfloat16. A processor of another mark is stood for by the order of sums of
the class that promises no texts.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, pairwise, product
from pathlib import Path
from statistics import mean
from typing import Final

import torch
import tyro
from tokenizers import Tokenizer

from benchmarks.sheet import Recording, Sheet
from node.model.checkpoint import open_checkpoint
from node.model.in_class import load_in_class
from node.model.packed_span import load_packed
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ordered_rows import unordered
from swarm.compute.ragged_batch import RaggedModel, SessionRows, load_whole
from swarm.compute.sampling import pick
from swarm.compute.weights.format import WeightFormat
from swarm.demo import PASSAGES, TARGET
from swarm.files.hub import find_model
from swarm.protocol.messages import Sampling
from swarm.trust.bounds import Agrees, Bounds, Differs, Judgement
from swarm.trust.replay import Pick, Stretch, calibrate, judge, replayed

TOKENS: Final = 192
"""Of a text."""
TOGETHER: Final = 16
"""Texts that run in one forward, as sessions of one machine do."""
SWEEPS: Final = (64, 8, 192, 1, 64, 8)
PROMPT: Final = 32
"""Tokens before the first pick."""
RANDOM: Final = 4
"""Every so many texts are random ids, all others are cut from passages."""
SAMPLINGS: Final = (Sampling(0, 0.0), Sampling(0, 0.7), Sampling(0, 1.0), Sampling(0, 1.0, top_p=0.9, top_k=64))
PICKED: Final = 4
"""Of every so many texts, the picks of one are judged."""
CLASSES: Final = ("float32", "bfloat16", "int8 in float32")
GGUF, OTHERWISE = "GGUF", "GGUF, another processor"
LIES_TRIED: Final = 16
"""Texts of each liar."""
EVERY: Final = 5
"""A tail names its second choice after every so many tokens."""
CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Audit honest machines and liars."""

    seed: int = 1
    """Of texts and picks: pieces of other seeds add up."""
    seconds: float = 200.0
    """How long honest rows are made; with pieces, none are."""
    pieces: tuple[Path, ...] = ()
    """What earlier runs wrote with `--json`: their honest rows are added up."""
    gguf: Path | None = None
    """A file of a model: its honest rows are made in place of the bundled target's, and its liars are tried too."""


@dataclass(slots=True)
class Cell:
    """What honest machines of one class were found to be.

    Attributes:
        rows: Rows that were judged.
        texts: Stretches that they are of.
        picks: Picks that were judged.
        accused: Stretches that differ, rows or picks.
        unclear: Stretches that say nothing.
        largest: Distance of a row; of a window's median in a coarse class.
        bound: On it.
        gap: The largest of a pick, in logits.
        pick_bound: On it.
    """

    rows: int = 0
    texts: int = 0
    picks: int = 0
    accused: int = 0
    unclear: int = 0
    largest: float = 0.0
    bound: float = 0.0
    gap: float = 0.0
    pick_bound: float = 0.0

    def note(self, verdict: Judgement, bounds: Bounds, count: int, *, is_tail: bool) -> None:
        self.texts += 1
        self.rows += 0 if is_tail else count
        self.picks += count if is_tail else 0
        self.bound = max(self.bound, bounds.row if bounds.median is None else bounds.median)
        self.pick_bound = max(self.pick_bound, bounds.pick)
        if not isinstance(verdict, Agrees | Differs):
            self.unclear += 1
        elif is_tail:
            self.gap = max(self.gap, verdict.largest)
        else:
            self.largest = max(self.largest, verdict.largest)
        self.accused += isinstance(verdict, Differs)

    def add(self, other: Cell) -> None:
        """Add what another piece found."""
        for name in ("rows", "texts", "picks", "accused", "unclear"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("largest", "bound", "gap", "pick_bound"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


def model_of(kind: str, gguf: Path | None = None) -> RaggedModel:
    """The target in a class; `int4 in float32` for a liar. A file of integers in its own, or in a named one."""
    if gguf is not None:
        return load_in_class(str(gguf), "cpu-bfloat16-k2+gguf" if kind.startswith(GGUF) else kind)
    if kind.startswith("int"):
        return load_packed(open_checkpoint(TARGET), Span(0, 12), WeightFormat(torch.float32, int(kind[3])), CPU)
    return load_whole(TARGET, getattr(torch, kind))


def thirds(model: RaggedModel) -> tuple[Span, Span, Span]:
    """The spans of three hops."""
    third = model.num_layers // 3
    return Span(0, third), Span(third, 2 * third), Span(2 * third, model.num_layers)


class Texts:
    """Texts of one seed, without end."""

    def __init__(self, seed: int, gguf: Path | None = None) -> None:
        tokenizer = Tokenizer.from_file(str(find_model(gguf or TARGET)[0] / "tokenizer.json"))
        lines = PASSAGES.read_text(encoding="utf-8").splitlines()
        self._ids = [token for line in lines for token in tokenizer.encode(json.loads(line)["text"]).ids]
        self._vocabulary = tokenizer.get_vocab_size()
        self._rng = random.Random(seed)
        self._made = 0

    def next(self) -> tuple[int, ...]:
        self._made += 1
        if self._made % RANDOM == 0:
            return tuple(self._rng.randrange(self._vocabulary) for _ in range(TOKENS))
        start = self._rng.randrange(len(self._ids) - TOKENS)
        return tuple(self._ids[start : start + TOKENS])

    def seed(self) -> int:
        """Of a text's picks."""
        return self._rng.getrandbits(63)


def in_sweeps(model: RaggedModel, texts: Sequence[tuple[int, ...]], sweep: int) -> list[list[torch.Tensor]]:
    """What leaves each span, [TOKENS, width], for each text: all of them together, in sweeps."""
    caches = [KvCache(model.layout, TOKENS, nodes=sweep) for _ in texts]
    spans = thirds(model)
    leaving: list[list[torch.Tensor]] = [[] for _ in spans]
    for start, end in pairwise([*range(0, TOKENS, sweep), TOKENS]):
        nodes = tuple(map(TreeNodeId, range(start, end)))
        for cache in caches if start else ():
            cache.commit(tuple(map(TreeNodeId, range(start - sweep, start))), ())
        work = [
            SessionRows(cache, nodes, (None, *nodes[:-1]), range(start, end), torch.tensor(text[start:end]))
            for cache, text in zip(caches, texts, strict=True)
        ]
        for rows, found in zip(model.forward_parts(work, spans), leaving, strict=True):
            rows_of_each = rows.view(len(texts), end - start, -1)
            found.append(rows_of_each)
    joined = [torch.cat(found, dim=1) for found in leaving]
    return [[rows[place] for rows in joined] for place in range(len(texts))]


def picks_of(model: RaggedModel, final: torch.Tensor, sampling: Sampling) -> tuple[Pick, ...]:
    """What an honest tail names after these final rows."""
    tokens = pick(model.logits(final[PROMPT:]), range(PROMPT + 1, TOKENS + 1), sampling)
    return tuple(Pick(PROMPT + place, token, sampling) for place, token in enumerate(tokens))


def stretches(
    model: RaggedModel, text: tuple[int, ...], leaving: Sequence[torch.Tensor], sampling: Sampling
) -> Iterator[Stretch]:
    """What an audit of each hop of an honest chain gets."""
    entering: torch.Tensor | None = None
    for layers, rows in zip(thirds(model), leaving, strict=True):
        kind = model.numeric_class
        if layers.end == model.num_layers:
            yield Stretch(layers, kind, text, entering, picks=picks_of(model, rows, sampling))
        else:
            yield Stretch(layers, kind, text if entering is None else (), entering, rows)
        entering = rows


@contextmanager
def computing(threads: int, *, is_onednn: bool) -> Iterator[None]:
    """Compute by so many threads, with oneDNN or without."""
    torch.set_num_threads(threads)
    try:
        with torch.backends.mkldnn.flags(enabled=is_onednn):
            yield
    finally:
        torch.set_num_threads(1)


def bounds_for(model: RaggedModel, layers: Span, kind: str) -> Bounds:
    """Those of processors of one mark, where the class has marks; another processor's are found by calibration."""
    known = Bounds.known(model.signed_class, model.signed_class)
    return known if kind == GGUF and known is not None else calibrate(model, layers)


def honest(options: Options) -> dict[str, Cell]:
    """Judge honest rows and picks until the time is over."""
    kinds = CLASSES if options.gguf is None else (GGUF, OTHERWISE)
    texts, cells = Texts(options.seed, options.gguf), {kind: Cell() for kind in kinds}
    models = {kind: model_of(kind, options.gguf) for kind in kinds}
    bounds = {
        (kind, layers): bounds_for(models[kind], layers, kind) for kind in kinds for layers in thirds(models[kind])
    }
    ways, ends_s = cycle(product(SWEEPS, (1, 2), (True, False), kinds)), time.monotonic() + options.seconds
    for sweep, threads, is_onednn, kind in ways:
        if time.monotonic() > ends_s:
            break
        model, some = models[kind], [texts.next() for _ in range(TOGETHER)]
        sampling = replace(SAMPLINGS[texts.seed() % len(SAMPLINGS)], seed=texts.seed())
        with computing(threads, is_onednn=is_onednn), unordered(model) if kind == OTHERWISE else nullcontext():
            found = in_sweeps(model, some, sweep)
            made = [list(stretches(model, *one, sampling)) for one in zip(some, found, strict=True)]
        for place, stretch in ((place, one) for place, text in enumerate(made) for one in text):
            is_tail = stretch.layers.end == model.num_layers
            if is_tail and place % PICKED:
                continue
            own, judged = bounds[kind, stretch.layers], replace(stretch, numeric_class=model.signed_class)
            count = len(stretch.picks) if is_tail else TOKENS
            cells[kind].note(judge(model, judged, own), own, count, is_tail=is_tail)
    return cells


# Liars: what each sends in place of what leaves its layers, and how many audits of its texts name it

Change = Callable[[Stretch], Stretch]


@dataclass(slots=True)
class Caught:
    """What became of one liar.

    Attributes:
        named: In how many audited texts.
        texts: Of so many.
        turned: Share of the tail's picks that the lie changes, where it was looked at.
    """

    named: int = 0
    texts: int = 0
    turned: list[float] = field(default_factory=list)

    @property
    def until(self) -> str:
        """Audited texts until it is named, in the mean."""
        return f"{self.texts / self.named:.2f}" if self.named else "never"


def rows_of(model: RaggedModel, stretch: Stretch) -> torch.Tensor:
    return torch.cat(list(replayed(model, stretch)))


def liars(model: RaggedModel, others: dict[str, RaggedModel], bound: float, old: torch.Tensor) -> dict[str, Change]:
    """The lies of a hop in the middle.

    Args:
        model: The honest one.
        others: In other classes.
        bound: On the distance of an honest row.
        old: Rows of another text.
    """
    rng, (_, middle, tail) = torch.Generator().manual_seed(0), thirds(model)

    def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
        def lie(stretch: Stretch) -> Stretch:
            assert stretch.leaving is not None
            return replace(stretch, leaving=change(stretch.leaving))

        return lie

    def noise(rows: torch.Tensor) -> torch.Tensor:
        added = torch.randn(rows.shape, generator=rng)
        size = rows.float().square().mean(1, keepdim=True).sqrt()
        scale = 0.9 * bound * size / added.square().mean(1, keepdim=True).sqrt()
        return rows.float() + scale * added

    def one_value(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        places = torch.randint(rows.shape[1], (len(rows),), generator=rng)
        rows[torch.arange(len(rows)), places] *= 1.1
        return rows

    def computed(other: RaggedModel, layers: Span = middle) -> Change:
        def lie(stretch: Stretch) -> Stretch:
            return replace(stretch, leaving=rows_of(other, replace(stretch, layers=layers)).float())

        return lie

    found = {
        "the next layers' weights": computed(model, tail),
        "last layer skipped": computed(model, Span(middle.start, middle.end - 1)),
        "old rows (the first half again)": changed(lambda rows: torch.cat([rows[: TOKENS // 2]] * 2)),
        "rows of another text": changed(lambda rows: old),
        "one value of each row by a tenth": changed(one_value),
        "noise of 0.9 of the bound": changed(noise),
    }
    for name, other in others.items():
        found[name.replace(" in float32", " weights")] = computed(other)
    return found


WEIGHTS: Final = {
    "int4 weights": "cpu-bfloat16+w4z",
    "int8 weights": "cpu-bfloat16+w8",
    "float32 of the same file": "cpu-float32+gguf",
}


def audited_liars(
    judge_kind: str, gguf: Path | None = None, judge_of: Callable[[RaggedModel, Span], Bounds] = calibrate
) -> dict[str, Caught]:
    """Each liar in a chain of one class, judged by that class.

    Args:
        judge_kind: The class.
        gguf: The model's file, where it is one.
        judge_of: The bounds of layers: by default those of this model, as who verifies has them.
    """
    model, texts = model_of(judge_kind, gguf), Texts(0, gguf)
    if gguf is not None:
        others = {name: model_of(kind, gguf) for name, kind in WEIGHTS.items()}
    else:
        others = {kind: model_of(kind) for kind in ("int4 in float32", "int8 in float32")}
    if judge_kind == "float32":
        others["bfloat16"] = model_of("bfloat16")
    bounds, tail_bounds = (judge_of(model, layers) for layers in thirds(model)[1:])
    found: dict[str, Caught] = defaultdict(Caught)
    old = in_sweeps(model, [texts.next()], 64)[0][1]
    honest_rows = bounds.row if bounds.median is None else bounds.median
    lies = liars(model, others, honest_rows, old)
    for number in range(LIES_TRIED):
        text, sampling = texts.next(), replace(SAMPLINGS[number % 3], seed=texts.seed())
        leaving = in_sweeps(model, [text], 8)[0]
        _, middle, tail = stretches(model, text, leaving, sampling)
        for name, lie in lies.items():
            lied = lie(middle)
            found[name].texts += 1
            found[name].named += isinstance(judge(model, lied, bounds), Differs)
            if name.startswith("noise"):
                found[name].turned.append(_turned(model, lied, tail))
        for name, picks in _tail_lies(model, others, tail, sampling).items():
            found[name].texts += 1
            found[name].named += isinstance(judge(model, replace(tail, picks=picks), tail_bounds), Differs)
    return dict(found)


def _turned(model: RaggedModel, lied: Stretch, tail: Stretch) -> float:
    """The share of picks that are others because of what a hop before the tail sent."""
    sampling = tail.picks[0].sampling
    picks = picks_of(model, rows_of(model, replace(tail, entering=lied.leaving)), sampling)
    return sum(one.token != other.token for one, other in zip(picks, tail.picks, strict=True)) / len(picks)


def _tail_lies(
    model: RaggedModel, others: dict[str, RaggedModel], tail: Stretch, sampling: Sampling
) -> dict[str, tuple[Pick, ...]]:
    logits = model.logits(rows_of(model, tail)[PROMPT:]).clone()
    for place, named in enumerate(tail.picks):
        logits[place, named.token] = -torch.inf
    seconds = pick(logits, range(PROMPT + 1, TOKENS + 1), sampling)
    favours = tuple(
        replace(named, token=second) if place % EVERY == 0 else named
        for place, (named, second) in enumerate(zip(tail.picks, seconds, strict=True))
    )
    found = {f"tail: second choice after every {EVERY}th token": favours}
    for kind, other in others.items():
        found[f"tail: {kind.replace(' in float32', ' weights')}"] = picks_of(other, rows_of(other, tail), sampling)
    if sampling.temperature:
        seeded = picks_of(model, rows_of(model, tail), replace(sampling, seed=sampling.seed + 1))
        found["tail: another seed"] = tuple(replace(each, sampling=sampling) for each in seeded)
    return found


# How many texts pass until half of the liars are named, and what audits compute

WORLDS: Final = 2_000
HOPS: Final = 3
HOLDERS: Final = 5
"""Machines of each span, one of which lies: a fifth of all."""
SHARE, USUAL_SHARE = 0.05, 0.02


def world(rng: random.Random, share: float) -> tuple[list[int], int, int]:
    """Texts of one client, each over machines drawn by chance, until all liars are named.

    A machine that lies does so in audits too, for it cannot tell them from texts; so it is named by whoever it was
    compared with. Machine 0 of each span lies.

    Returns:
        After how many texts each span's liar was named; spans that were computed for texts, and for audits.
    """
    found: list[int] = []
    named: set[int] = set()
    texts = audited = 0
    while len(named) < HOPS:
        texts += 1
        chain = [rng.choice([one for one in range(HOLDERS) if one or span not in named]) for span in range(HOPS)]
        if rng.random() >= share:
            continue
        span = rng.randrange(HOPS)
        others = [one for one in range(HOLDERS) if one != chain[span] and (one or span not in named)]
        first = rng.choice(others)
        audited += 1
        if 0 in {chain[span], first} and span not in named:
            audited += 1  # a third machine decides
            named.add(span)
            found.append(texts)
    return found, texts * HOPS, audited


def until_half(share: float) -> tuple[int, float]:
    """Texts until half of the liars of many worlds are named; what audits compute, as a part of what texts do."""
    rng = random.Random(0)
    found: list[int] = []
    computed = audited = 0
    for _ in range(WORLDS):
        when, spans, extra = world(rng, share)
        found += when
        computed, audited = computed + spans, audited + extra
    return sorted(found)[len(found) // 2], audited / computed


def expected_until_half(share: float) -> float:
    """The same where a liar is named only by audits of texts that went over it: ln 2 over their frequency."""
    return math.log(2) / -math.log1p(-share / HOLDERS / HOPS)


def honest_sheet(pieces: Sequence[dict[str, Cell]]) -> Sheet:
    """All honest rows, and what audits take."""
    cells: dict[str, Cell] = defaultdict(Cell)
    for kind, cell in (item for piece in pieces for item in piece.items()):
        cells[kind].add(cell)
    made = Sheet(
        "audits_honest",
        "Honest machines: sweeps of 1 to 192, one and two threads, with oneDNN and without, against one chunk",
        ("class", "rows", "accused", "largest distance", "bound", "picks", "largest gap", "bound "),
    )
    for kind, cell in cells.items():
        shown = f"{cell.rows:,}", f"{cell.accused}", f"{cell.largest:.1e}", f"{cell.bound:.1e}"
        made.rows.append((kind, *shown, f"{cell.picks:,}", f"{cell.gap:.2g}", f"{cell.pick_bound:.2g}"))
    made.measured["honest"] = {kind: asdict(cell) for kind, cell in cells.items()}
    half, part = until_half(SHARE)
    usual_half, usual_part = until_half(USUAL_SHARE)
    made.measured["until_half"] = {str(SHARE): half, str(USUAL_SHARE): usual_half}
    made.measured["computed"] = {str(SHARE): part, str(USUAL_SHARE): usual_part}
    rows, picks = (sum(getattr(cell, name) for cell in cells.values()) for name in ("rows", "picks"))
    made.notes = [
        f"{rows:,} rows and {picks:,} picks in all, {sum(cell.accused for cell in cells.values())} accused, "
        f"{sum(cell.unclear for cell in cells.values())} stretches unclear. "
        "bfloat16, and GGUF in another order: distance and bound are those of the median of 64 rows.",
        f"{HOPS} hops, {HOLDERS} holders of each, one of which lies: half of the liars are named after {half} texts "
        f"where {SHARE:.0%} are audited, {usual_half} where {USUAL_SHARE:.0%} are. If a liar is honest to who audits "
        f"others, after {expected_until_half(SHARE):.0f} and {expected_until_half(USUAL_SHARE):.0f}.",
        f"Audits compute {part:.2%} and {usual_part:.2%} of what plain decoding of the texts does, less beside trees.",
    ]
    return made


def known_of(model: RaggedModel, layers: Span) -> Bounds:
    """What a client allows between processors of two marks, whatever the layers."""
    known = Bounds.known(model.numeric_class, model.numeric_class)
    assert known is not None, "the class promises texts"
    return known


def liars_sheet(gguf: Path | None) -> Sheet:
    """Each liar, judged in several classes."""
    found = {kind: audited_liars(kind) for kind in ("float32", "bfloat16")}
    if gguf is not None:
        found[GGUF] = audited_liars(GGUF, gguf, partial(bounds_for, kind=GGUF))
        found[f"{GGUF}, two marks, audited"] = audited_liars(GGUF, gguf, known_of)
        found[f"{GGUF}, two marks, verified"] = audited_liars(GGUF, gguf)
    made = Sheet(
        "audits_liars",
        f"Liars in a middle hop, or at the tail: audited texts of {TOKENS} tokens until one is named",
        ("liar", *found),
    )
    for name in dict.fromkeys(name for liars in found.values() for name in liars):
        caught = [found[kind].get(name) for kind in found]
        made.rows.append((name, *("" if one is None else one.until for one in caught)))
    noise = found["float32"]["noise of 0.9 of the bound"].turned
    made.notes = [
        f"{LIES_TRIED} texts each. Noise below the bound is not seen in float32; it changed {mean(noise):.2%} of picks."
    ]
    made.measured = {kind: {name: asdict(one) for name, one in liars.items()} for kind, liars in found.items()}
    return made


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    console = make_console()
    read = [json.loads(piece.read_text())["honest"] for piece in options.pieces]
    pieces = [{kind: Cell(**cell) for kind, cell in one.items()} for one in read] or [honest(options)]
    honest_sheet(pieces).finish(console, options)
    if options.json is None:
        liars_sheet(options.gguf).finish(console, options)


if __name__ == "__main__":
    main()
