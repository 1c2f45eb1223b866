"""How far two honest machines may be apart, and what follows where they are farther. Pure; runs no layer.

A row's distance is the root mean square of a difference over that of the row that was recomputed. What is honest
depends on the model, on the two numeric classes and on the layers, so bounds are calibrated on the layers themselves
(`swarm.trust.replay.calibrate`). Where a class gives a row the same bits whatever is computed beside it, or differs in
its last bits alone, each row is judged. In coarser types one row says little: other weights lie nearer to the truth
than rounding. There the median of `WINDOW` rows is judged, which hardly varies, and no row may lie far out.

Decision: docs/decisions/0091-audits-recompute.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from swarm.protocol.numeric_class import NumericClass, promises_texts, without_rounding

FLOOR: Final = 1e-5
"""Of a row, where only the order of sums differs: some seven times the largest that was measured."""
ROOM: Final = 7.0
"""So many times what calibration found may a row of an exact class differ."""
COARSE_ROOM: Final = 2.0
"""The same for one row of a coarse class …"""
MEDIAN_ROOM: Final = 1.5
"""… and for the median of a window."""
PICK_FLOOR: Final = 1e-3
"""Of a pick's gap: the best score less that of the named token."""
PICK_ROOM: Final = 3.0
FAR_MEDIAN, FAR_ROW, FAR_PICK = 3e-2, 0.2, 1.0
"""What honest machines of a coarse class do not reach, where nobody calibrated: at least twice what was measured."""
WINDOW: Final = 64
"""Rows whose median is judged."""
FEWEST: Final = 16
"""Rows without which nothing is judged: the first row of a text is the same in many, and says nothing alone."""
PLACES_TOLD: Final = 8


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is honest between two numeric classes in some layers of a model.

    Attributes:
        ours: the class that recomputes.
        theirs: the class of what is judged.
        row: of the distance of one row.
        pick: of a pick's gap, in logits.
        median: of the median distance of `WINDOW` rows; None where each row is judged by itself.
    """

    ours: str
    theirs: str
    row: float = FLOOR
    pick: float = PICK_FLOOR
    median: float | None = None

    @classmethod
    def known(cls, ours: str, theirs: str) -> Bounds | None:
        """Those that hold for every model; None where they must be calibrated."""
        if is_exact(ours, theirs):
            return cls(ours, theirs)
        if promises_texts(ours) and without_rounding(ours) == without_rounding(theirs):
            return cls(ours, theirs, FAR_ROW, FAR_PICK, FAR_MEDIAN)
        return None


@dataclass(frozen=True, slots=True)
class Agrees:
    """The rows, or picks, are what the layers make of what entered.

    Attributes:
        count: how many were judged.
        largest: distance of a row, or gap of a pick.
        bound: that it keeps.
    """

    count: int
    largest: float
    bound: float


@dataclass(frozen=True, slots=True)
class Differs:
    """They are not.

    Attributes:
        what: `rows` or `picks`.
        places: their positions, the first `PLACES_TOLD`; of a window, its first row.
        count: how many differ.
        largest: distance or gap; infinite for values that are not finite.
        bound: that it breaks.
    """

    what: str
    places: tuple[int, ...]
    count: int
    largest: float
    bound: float


@dataclass(frozen=True, slots=True)
class Unclear:
    """Nothing follows.

    Attributes:
        reason: why, for people.
    """

    reason: str


Judgement = Agrees | Differs | Unclear


def is_exact(one: str, other: str) -> bool:
    """Whether honest rows of two machines differ in last bits alone: in fp32, by a card's kernels, on one kind of CPU.

    Args:
        one: a numeric class, as a machine signs it.
        other: the other machine's.
    """
    found = NumericClass.parse(one)
    return one == other and found is not None and found.is_same_everywhere


def bounds_of(ours: str, theirs: str, distances: Sequence[Tensor], gaps: Sequence[float] = ()) -> Bounds:
    """The bounds that follow from what honest computations of one thing differed by.

    Args:
        ours: the class that recomputes.
        theirs: the class of what is judged.
        distances: float64 [rows] each, of texts that were computed in two ways.
        gaps: the largest gaps of honest picks.
    """
    largest = max((float(each.max()) for each in distances), default=0.0)
    pick = max([PICK_FLOOR, *(PICK_ROOM * gap for gap in gaps)])
    if is_exact(ours, theirs):
        return Bounds(ours, theirs, max(FLOOR, ROOM * largest), pick)
    median = max((median for each in distances for _, median in _medians(each)), default=0.0)
    return Bounds(ours, theirs, max(FLOOR, COARSE_ROOM * largest), pick, max(FLOOR, MEDIAN_ROOM * median))


def row_distances(found: Tensor, claimed: Tensor) -> Tensor:
    """How far claimed rows are from those that were recomputed.

    Args:
        found: [n, width]
        claimed: [n, width] of any floating type.

    Returns:
        float64 [n]; infinite where a claimed value is not finite.
    """
    ours, theirs = found.double(), claimed.double().to(found.device)
    size = ours.square().mean(1).sqrt()
    apart = (ours - theirs).square().mean(1).sqrt()
    relative = torch.where(apart == 0, 0.0, apart / size)
    return torch.where(theirs.isfinite().all(1), relative, math.inf)


def judge_rows(distances: Tensor, bounds: Bounds, first: int = 0) -> Judgement:
    """What follows from the distances of a stretch's rows.

    Args:
        distances: float64 [n], of consecutive positions.
        first: the first one's position.
    """
    if len(distances) < FEWEST:
        return Unclear(f"{len(distances)} rows are too few to judge; {FEWEST} are needed")
    wrong = (~(distances <= bounds.row)).nonzero().flatten().tolist()
    if wrong == [0] and first == 0 and bool(distances[0].isfinite()):
        return Unclear("only the text's first row differs, which nothing follows from")
    if wrong:
        places = tuple(first + place for place in wrong[:PLACES_TOLD])
        return Differs("rows", places, len(wrong), float(distances.max()), bounds.row)
    if bounds.median is None:
        return Agrees(len(distances), float(distances.max()), bounds.row)
    medians = _medians(distances)
    beyond = [(start, median) for start, median in medians if median > bounds.median]
    largest = max(median for _, median in medians)
    if beyond:
        places = tuple(first + start for start, _ in beyond[:PLACES_TOLD])
        return Differs("rows", places, len(beyond) * WINDOW, largest, bounds.median)
    return Agrees(len(distances), largest, bounds.median)


def judge_picks(gaps: Tensor, positions: Sequence[int], bounds: Bounds) -> Judgement:
    """What follows from the gaps of picks.

    Args:
        gaps: float64 [n]
        positions: [n] of the picked tokens.
    """
    if len(gaps) == 0:
        return Unclear("no pick was asked for")
    wrong = (~(gaps <= bounds.pick)).nonzero().flatten().tolist()
    if wrong:
        places = tuple(positions[place] for place in wrong[:PLACES_TOLD])
        return Differs("picks", places, len(wrong), float(gaps.max()), bounds.pick)
    return Agrees(len(gaps), float(gaps.max()), bounds.pick)


def together(verdicts: Sequence[Judgement]) -> Judgement:
    """One verdict of several: the first that differs, else the first that is unclear, else the last."""
    for kind in (Differs, Unclear):
        for verdict in verdicts:
            if isinstance(verdict, kind):
                return verdict
    return verdicts[-1] if verdicts else Unclear("nothing was compared")


def _medians(distances: Tensor) -> list[tuple[int, float]]:
    """First row and median of each window; the last one reaches back where rows are left over."""
    count = len(distances)
    starts = range(0, max(count - WINDOW, 0) + 1, WINDOW)
    cuts = [*starts, *([count - WINDOW] if count > WINDOW and count % WINDOW else [])]
    return [(start, float(distances[start : start + WINDOW].median())) for start in cuts]
