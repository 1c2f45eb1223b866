"""A stretch of a text through some layers once more, and whether what was said to leave them does. Owns no network.

    entering rows [P, width], or ids at layer 0 ──▶ the layers, in chunks ──▶ leaving rows [P, width], or picks

The stretch begins where its text does: layers attend to all that came before. Rows are judged by their distance. A tail
is judged by its picks alone, by their gap in the recomputed scores: a final row that is changed by half a per cent
makes the second choice the first, so no bound on rows would do.

Decision: docs/decisions/0091-audits-recompute.md.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeVar

import torch
from torch import Tensor

from swarm.base.errors import ConfigError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ordered_rows import unordered
from swarm.compute.path_rules import PathRules
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.protocol.numeric_class import EXACT, NumericClass, without_rounding
from swarm.protocol.pick_rules import Sampling
from swarm.protocol.session import Limits, SessionState
from swarm.trust.bounds import (
    Agrees,
    Bounds,
    Judgement,
    Unclear,
    bounds_of,
    judge_picks,
    judge_rows,
    row_distances,
)
from swarm.trust.pick_gaps import NamedPicks, pick_gaps

CHUNK: Final = 512
"""Positions in one forward."""
SWEEPS: Final = (1, 5, 64)
"""Sizes of sweeps that calibration compares with chunks."""
CALIBRATED, CALIBRATED_ROWS = 2, 192
"""Made-up texts, and the rows of each."""
SCORED: Final = 32
"""Positions whose scores are in memory at a time."""
SPREAD_ROOM: Final = 2.0
"""How much farther than two computations of one machine another machine's may be from them, in an exact class."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pick:
    """A token that a tail named.

    Attributes:
        after: position of the token after which it was picked.
        token: its id.
        sampling: how it was to be picked.
    """

    after: int
    token: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Stretch:
    """What went into some layers along a committed text of P tokens, and what is said to have left them.

    Attributes:
        layers: which.
        numeric_class: of the machine that says so.
        tokens: [P] ids: where the layers begin the model, and where rules of picks look at the path; else empty.
        entering: [P, width], where they do not begin it.
        leaving: [P, width]; None at the tail.
        picks: at the tail, those that are judged.
        valid_tokens: ids from here on are padding and are never picked; None for no padding.
    """

    layers: Span
    numeric_class: str
    tokens: tuple[int, ...] = ()
    entering: Tensor | None = None
    leaving: Tensor | None = None
    picks: tuple[Pick, ...] = ()
    valid_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.tokens) if self.entering is None else len(self.entering)

    def check(self, span: RaggedModel) -> None:
        """Refuse what these layers cannot have computed.

        Raises:
            ConfigError: says what does not fit.
        """
        if not span.span.contains(self.layers):
            raise ConfigError(f"layers {self.layers} are not within the loaded {span.span}")
        if not len(self):
            raise ConfigError("nothing entered the layers")
        if (self.entering is None) != (self.layers.start == 0):
            raise ConfigError("ids enter the first layer, rows all others")
        needs_ids = self.entering is None or span.needs_ids
        if needs_ids and len(self.tokens) != len(self):
            raise ConfigError(f"{len(self.tokens)} token ids for {len(self)} rows")
        if any(not 0 <= token < span.vocab_size for token in self.tokens):
            raise ConfigError(f"a token id is outside the vocabulary of {span.vocab_size}")
        if any(not 0 <= pick.after < len(self) or not 0 <= pick.token < span.vocab_size for pick in self.picks):
            raise ConfigError("a pick is of no position of the text, or outside the vocabulary")
        for rows in (self.entering, self.leaving):
            if rows is not None and (rows.ndim != 2 or rows.shape[1] < span.hidden_size or len(rows) != len(self)):
                raise ConfigError(f"rows of shape {tuple(rows.shape)}, not {(len(self), span.hidden_size)}")


def replayed(span: RaggedModel, stretch: Stretch, chunk: int = CHUNK) -> Iterator[Tensor]:
    """The rows [≤ chunk, width] that leave the layers, chunk after chunk.

    Raises:
        ConfigError: these layers cannot have computed the stretch.
    """
    stretch.check(span)
    cache = KvCache(span.layout.within(stretch.layers), len(stretch), nodes=min(chunk, len(stretch)))
    before: tuple[TreeNodeId, ...] = ()
    cuts = [*range(0, len(stretch), chunk), len(stretch)]
    for start, end in pairwise(cuts):
        if before:
            cache.commit(before, ())
        nodes = tuple(map(TreeNodeId, range(start, end)))
        ids, rows = stretch.tokens[start:end], stretch.entering
        work = SessionRows(
            kv_cache=cache,
            node_ids=nodes,
            parents=(None, *nodes[:-1]),
            positions=range(start, end),
            token_ids=torch.tensor(ids) if ids else None,
            rows=None if rows is None else rows[start:end, : span.hidden_size].to(span.device, span.dtype),
        )
        yield span.forward([work], stretch.layers)
        before = nodes


ForwardSteps = Generator[None, None, T]
"""A computation that pauses after each forward, so that others may use the thread; it returns its result."""


def finish(steps: ForwardSteps[T]) -> T:
    """Run it to its end at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def judge(span: RaggedModel, stretch: Stretch, bounds: Bounds | None = None, chunk: int = CHUNK) -> Judgement:
    """As `judging`, at once."""
    return finish(judging(span, stretch, bounds, chunk))


def judging(
    span: RaggedModel, stretch: Stretch, bounds: Bounds | None = None, chunk: int = CHUNK
) -> ForwardSteps[Judgement]:
    """Whether what is said to have left the layers is what they make of what entered.

    Args:
        span: has the layers, and computes in its own numeric class.
        bounds: between that class and the stretch's (default: where they are known for every model).
        chunk: positions in one forward.

    Raises:
        ConfigError: these layers cannot have computed the stretch.
    """
    found = known_bounds(span, stretch, bounds)
    if isinstance(found, Unclear):
        return found
    return (yield from _judged(span, stretch, found, replayed(span, stretch, chunk)))


def judging_twice(
    span: RaggedModel, stretch: Stretch, bounds: Bounds | None, chunks: tuple[int, int]
) -> ForwardSteps[Judgement]:
    """As `judging`, for who accuses others by it: computed in forwards of two sizes, which must agree.

    Whoever makes up what enters the layers may choose rows that any two honest machines round far apart.

    Raises:
        ConfigError: these layers cannot have computed the stretch.
    """
    known = known_bounds(span, stretch, bounds)
    if isinstance(known, Unclear):
        return known
    first = yield from _gathered(replayed(span, stretch, chunks[0]))
    second = yield from _gathered(replayed(span, stretch, chunks[1]))
    apart = row_distances(torch.cat(first), torch.cat(second)).cpu() * (SPREAD_ROOM if known.median is None else 1.0)
    if not isinstance(own := judge_rows(apart, known), Agrees):
        return own if isinstance(own, Unclear) else Unclear("these rows are rounded too differently here")
    return (yield from _judged(span, stretch, known, first))


def known_bounds(span: RaggedModel, stretch: Stretch, bounds: Bounds | None = None) -> Bounds | Unclear:
    """The bounds between a span's class and a stretch's, or why nothing decides."""
    ours, theirs = span.signed_class, stretch.numeric_class
    if (reason := undecidable(ours, theirs)) is not None:
        return Unclear(reason)
    bounds = bounds or Bounds.known(ours, theirs)
    asked = without_rounding(ours), without_rounding(theirs)
    if bounds is None or (without_rounding(bounds.ours), without_rounding(bounds.theirs)) != asked:
        return Unclear(f"how far {ours} and {theirs} may be apart was not calibrated")
    return bounds


def _judged(span: RaggedModel, stretch: Stretch, bounds: Bounds, found: Iterable[Tensor]) -> ForwardSteps[Judgement]:
    """What follows from the rows [≤ chunk, width] that leave the layers, chunk after chunk."""
    if stretch.leaving is None:
        return (yield from _judged_picks(span, stretch, bounds, found))
    distances, start = [], 0
    for rows in found:
        claimed = stretch.leaving[start : start + len(rows), : span.hidden_size]
        distances.append(row_distances(rows, claimed).cpu())
        start += len(rows)
        yield
    return judge_rows(torch.cat(distances), bounds)


def undecidable(ours: str, theirs: str) -> str | None:
    """Why rows of one numeric class say nothing of another's; None where they do: of equal ones, or against fp32."""
    own = NumericClass.parse(ours)
    is_truth = own is not None and (own.dtype, own.weights, own.lossy_rows) == (EXACT, 0, False)
    if without_rounding(ours) == without_rounding(theirs) or is_truth:
        return None
    theirs = without_rounding(theirs)
    return f"{without_rounding(ours)} does not decide what {theirs} computes; recompute in {theirs}, or in float32"


def calibrate(span: RaggedModel, layers: Span | None = None, other: RaggedModel | None = None) -> Bounds:
    """As `calibrating`, at once."""
    return finish(calibrating(span, layers, other))


def calibrating(
    span: RaggedModel, layers: Span | None = None, other: RaggedModel | None = None, chunk: int = CHUNK
) -> ForwardSteps[Bounds]:
    """The bounds of some layers, from made-up texts that are computed in chunks and in sweeps of other sizes.

    A CPU that gives rows the same bits in all of these adds up without that promise here, as another kind may. Texts
    have rows that differ more than any of made-up ids, so a row may be as far off as where nobody calibrated.

    Args:
        span: by which will be judged.
        layers: of these (default: all that it has).
        other: the same layers as the machines that are judged hold them; None: as `span` does.
        chunk: positions in one forward.
    """
    ours, theirs = span, other or span
    distances: list[Tensor] = []
    gaps: list[float] = []
    for text in made_up(span, layers or span.span):
        found = torch.cat((yield from _gathered(replayed(ours, text, chunk))))
        for sweep in SWEEPS if theirs is ours else (*SWEEPS, CHUNK):
            others = torch.cat((yield from _gathered(_otherwise(theirs, text, sweep))))
            distances.append(row_distances(found, others).cpu())
            if text.layers.end == span.num_layers:
                gaps.append(_honest_gap(ours.logits(found), theirs.logits(others)))
    bounds = bounds_of(ours.numeric_class, theirs.numeric_class, distances, gaps)
    known = Bounds.known(bounds.ours, bounds.theirs)
    return bounds if known is None else replace(bounds, row=max(bounds.row, known.row))


def _gathered(rows: Iterator[Tensor]) -> ForwardSteps[list[Tensor]]:
    found: list[Tensor] = []
    for some in rows:
        found.append(some)
        yield
    return found


def _otherwise(span: RaggedModel, stretch: Stretch, chunk: int) -> Iterator[Tensor]:
    """As `replayed`, but added up as a processor may that keeps no order of its own; between forwards as ever."""
    rows = replayed(span, stretch, chunk)
    while True:
        with unordered(span):
            part = next(rows, None)
        if part is None:
            return
        yield part


def made_up(span: RaggedModel, layers: Span, count: int = CALIBRATED) -> list[Stretch]:
    """Texts that nobody wrote: random ids, and what enters the layers; the same at each call.

    Where the layers before are not here, rows are random too, one for each id.
    """
    rng = torch.Generator().manual_seed(0)
    rows = min(CALIBRATED_ROWS, span.max_positions or CALIBRATED_ROWS)
    found = []
    for _ in range(count):
        tokens = torch.randint(span.vocab_size, (rows,), generator=rng)
        text = Stretch(layers, span.numeric_class, tuple(tokens.tolist()))
        if layers.start and span.span.start:
            ids, places = tokens.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            text = replace(text, entering=torch.randn(len(ids), span.hidden_size, generator=rng)[places])
        elif layers.start:
            before = replace(text, layers=Span(0, layers.start))
            text = replace(text, entering=torch.cat(list(replayed(span, before))))
        found.append(text)
    return found


def _judged_picks(
    span: RaggedModel, stretch: Stretch, bounds: Bounds, found: Iterable[Tensor]
) -> ForwardSteps[Judgement]:
    """As `_judged`, of a tail."""
    if any(pick.sampling.multistep for pick in stretch.picks):
        return Unclear("picks of multi-step sampling depend on trees")
    rules = [pick.sampling.rules for pick in stretch.picks]
    if any(one is not None and one.grammar is not None for one in rules):
        return Unclear("picks that follow a grammar are judged by the client that asked for it")
    if any(rules) and len(stretch.tokens) != len(stretch):
        return Unclear("rules of picks look at the text, whose ids are not there")
    limits = Limits(span.vocab_size, len(stretch) + 1, 1, 1)
    state = SessionState.begun(limits, stretch.tokens, ())
    path_rules = {sampling: PathRules(sampling.rules) for sampling in _samplings(stretch) if sampling.rules is not None}
    gaps: list[float] = []
    positions: list[int] = []
    start = 0
    for rows in found:
        for sampling in _samplings(stretch):
            asked = [p for p in stretch.picks if start <= p.after < start + len(rows) and p.sampling == sampling]
            for some in (asked[at : at + SCORED] for at in range(0, len(asked), SCORED)):
                logits = span.logits(rows[[pick.after - start for pick in some]])
                if sampling in path_rules:
                    path_rules[sampling].apply(logits, [TreeNodeId(pick.after) for pick in some], state)
                gaps += _gaps(logits, some, stretch.valid_tokens or span.vocab_size, bounds.pick)
                positions += [pick.after + 1 for pick in some]
        start += len(rows)
        yield
    return judge_picks(torch.tensor(gaps, dtype=torch.float64), positions, bounds)


def _gaps(logits: Tensor, picks: Sequence[Pick], valid_tokens: int, bound: float) -> list[float]:
    """Of picks of one sampling, whose rules have changed the logits already; changed in place."""
    sampling = picks[0].sampling
    named = {pick.after + 1: pick.token for pick in picks}
    tokens = [named.get(place, 0) for place in range(max(named) + 1)]
    places = [pick.after for pick in picks]
    penalty = 1.0 if sampling.rules is None else sampling.rules.repetition_penalty
    unit = max(penalty, 1 / penalty)
    plain = NamedPicks(tokens, places, replace(sampling, rules=None), valid_tokens)
    return [gap / unit for gap in pick_gaps(logits.cpu(), plain, bound * unit)]


def _samplings(stretch: Stretch) -> list[Sampling]:
    return list(dict.fromkeys(pick.sampling for pick in stretch.picks))


def _honest_gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest gap, in our logits, of a token that an honest machine with other last bits may name.

    Its own two best differ from ours by rounding: noise of picks brings any pair of tokens near to each other, so what
    counts is by how much the difference of two logits may be off, of those that are ever picked.
    """
    top = ours.topk(8, dim=1).indices
    off = (ours.gather(1, top) - theirs.gather(1, top)).double()
    return float((off.amax(1) - off.amin(1)).max())
