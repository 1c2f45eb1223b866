"""In which order mixers run a forward's rows: the same for every mixer, so it is made once.

A row needs the state after its parent. Rows whose parents are done make one **round**; in it, single rows of all
sessions are one batched step, and each long chain is a sequence of its own. A state that is not kept is made again:
the tokens between the nearest state before and the row join the plan, and only their states are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from swarm.base.errors import LocalProtocolError
from swarm.compute.state_slots import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarm.compute.kv_cache import KvCache
    from swarm.compute.state_slots import SessionStates
    from swarm.compute.tree_attention import SessionRange

MIN_SEQUENCE = 12
"""A chain of so many rows is run as a sequence; a shorter one row by row, which leaves a state after each."""
SEQUENCE_ROWS = 256
"""Rows of a sequence at a time, to bound memory; its state is kept after each piece where there is room."""


@dataclass(slots=True, eq=False)
class Work:
    """One token that mixers run.

    Attributes:
        row: in the forward; None for one whose state alone is used.
        parent: the work before it; None where a kept state, or nothing, is before it.
        base: the entry of that state; None where the text begins here.
        entry: where its state is kept, if it is.
        at: its state's place among those of its round.
    """

    place: Place
    slot: int
    row: int | None
    parent: Work | None
    base: int | None
    children: int = 0
    unit: Unit | None = None
    entry: int | None = None
    at: int = 0


@dataclass(slots=True, eq=False)
class Unit:
    """Works that run one after the other: one, or the piece of a long chain."""

    works: list[Work]
    session: int
    round: int


@dataclass(frozen=True, slots=True)
class MixerRun:
    """One call of a mixer.

    Attributes:
        rows: int64 [n], of the plan's rows: new rows of the forward first, then those run again.
        before: int64 [batch], the states before, among those of the round before; None where texts begin.
        is_sequence: whether the rows are one sequence rather than a batch of steps.
        new: int64 [k], which of the n rows are new ones; None for all.
        targets: int64 [k], their rows in the forward.
    """

    rows: torch.Tensor
    before: torch.Tensor | None
    is_sequence: bool
    new: torch.Tensor | None
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Keeping:
    """States of a round that a session keeps: at `entries`, those at `places` of the round."""

    states: SessionStates
    entries: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """Calls that need nothing of each other, and what is kept of them."""

    runs: tuple[MixerRun, ...]
    keeping: tuple[Keeping, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How mixers run a forward.

    Attributes:
        again: sessions' slots that are run again, after the new rows.
        bases: sessions' states that the first round begins from, one after the other.
        rounds: in order.
    """

    new_rows: int
    again: tuple[tuple[KvCache, torch.Tensor], ...]
    bases: tuple[tuple[SessionStates, torch.Tensor], ...]
    rounds: tuple[Round, ...]


class SessionPart(Protocol):
    """A session's rows in a forward, which have their slots: a `SessionRange`, or as much of one as a plan needs."""

    @property
    def kv_cache(self) -> KvCache: ...

    @property
    def start(self) -> int: ...

    @property
    def rows(self) -> int: ...


@dataclass(slots=True)
class SessionWorks:
    """One session's works while the plan is made, parents first."""

    part: SessionPart
    states: SessionStates
    works: list[Work] = field(default_factory=list)
    known: dict[Place, Work] = field(default_factory=dict)

    @classmethod
    def of(cls, part: SessionPart) -> SessionWorks:
        """Those of a session's new rows.

        Raises:
            LocalProtocolError: it has no room for states.
        """
        if part.kv_cache.states is None:
            raise LocalProtocolError("states", "this session has no room for states")
        session = cls(part, part.kv_cache.states)
        session.gather()
        return session

    def gather(self) -> None:
        """Find the works of all new rows, and of what is before them and not kept."""
        slots = self.part.kv_cache.slots
        first = slots.used - self.part.rows
        for offset in range(self.part.rows):
            live = first + offset - slots.committed
            before = self._state_after(slots.parent(live))
            self._add(Place(node=slots.ids[live]), first + offset, self.part.start + offset, before)

    def _state_after(self, node: int | None) -> Work | int | None:
        """The work, or else the entry, with the state after a live node, by its row; None where no token is before."""
        slots = self.part.kv_cache.slots
        known = None if node is None else self.known.get(Place(node=slots.ids[node]))
        if known is not None:
            return known
        missing: list[int] = []
        state: Work | int | None = None
        for live in reversed([] if node is None else slots.ancestors(node)):
            place = Place(node=slots.ids[live])
            state = self.known.get(place)
            if state is None:
                state = self.states.slots.find(place)
            if state is not None:
                break
            missing.append(live)
        else:
            state = self._state_at_tip()
        for live in reversed(missing):
            state = self._add(Place(node=slots.ids[live]), slots.committed + live, None, state)
        return state

    def _state_at_tip(self) -> Work | int | None:
        length = self.part.kv_cache.slots.committed
        tip = self.known.get(Place(length))
        if tip is not None or not length:
            return tip
        start = self.states.slots.last_before(length)
        state: Work | int | None = self.states.slots.find(Place(start)) if start else None
        for slot in range(start, length):
            state = self._add(Place(slot + 1), slot, None, state)
        return state

    def _add(self, place: Place, slot: int, row: int | None, before: Work | int | None) -> Work:
        parent, base = (before, None) if isinstance(before, Work) else (None, before)
        work = Work(place, slot, row, parent, base)
        if parent is not None:
            parent.children += 1
        self.works.append(work)
        self.known[place] = work
        return work

    def cut(self, number: int, *, in_sequences: bool) -> list[Unit]:
        """Units, in an order in which they may run."""
        chains: list[list[Work]] = []
        of: dict[Work, list[Work]] = {}
        for work in self.works:
            if work.parent is not None and work.parent.children == 1:
                of[work] = of[work.parent]
                of[work].append(work)
            else:
                of[work] = [work]
                chains.append(of[work])
        units = []
        for chain in chains:
            size = SEQUENCE_ROWS if in_sequences and len(chain) >= MIN_SEQUENCE else 1
            for start in range(0, len(chain), size):
                works = chain[start : start + size]
                before = works[0].parent
                assert before is None or before.unit is not None
                unit = Unit(works, number, 0 if before is None or before.unit is None else before.unit.round + 1)
                for work in works:
                    work.unit = unit
                units.append(unit)
        return units

    def keep(self, units: Sequence[Unit], spared: Sequence[int] = ()) -> None:
        """Give entries to the states that this forward leaves: the deepest one, the tip's, and others by depth.

        Args:
            spared: entries that are not given to others.
        """
        ends = [unit.works[-1] for unit in units]
        if not ends:
            return
        deepest = max(units, key=lambda unit: unit.round).works[-1]
        tip = self.known.get(Place(self.part.kv_cache.slots.committed))
        needed = [work.place for work in ends if work is deepest or work is tip]
        rest = sorted(units, key=lambda unit: (len(unit.works) == 1, unit.round))  # pieces of long chains first
        wanted = [unit.works[-1].place for unit in rest]
        given = self.states.slots.reserve(needed, wanted, spared)
        for work in ends:
            work.entry = given.get(work.place)


def make_plan(parts: Sequence[SessionRange], device: torch.device, *, in_sequences: bool) -> StepPlan:
    """Plan a forward, and reserve entries for the states that it leaves.

    Args:
        parts: the rows of each session, which have their slots.
        in_sequences: whether mixers can go on with a sequence from a state; else every chain is run row by row.
    """
    sessions = []
    units: list[Unit] = []
    for number, part in enumerate(parts):
        session = SessionWorks.of(part)
        own = session.cut(number, in_sequences=in_sequences)
        session.keep(own)
        sessions.append(session)
        units += own
    return _RoundLayout(sessions, units, device).plan()


class _RoundLayout:
    """Turns units into indices."""

    def __init__(self, sessions: Sequence[SessionWorks], units: Sequence[Unit], device: torch.device) -> None:
        self._sessions = sessions
        self._device = device
        self._rounds: list[list[Unit]] = [[] for _ in range(1 + max(unit.round for unit in units))]
        for unit in units:
            self._rounds[unit.round].append(unit)
        self._new_rows = sum(session.part.rows for session in sessions)
        self._again: dict[Work, int] = {}
        for session in sessions:
            for work in session.works:
                if work.row is None:
                    self._again[work] = self._new_rows + len(self._again)

    def plan(self) -> StepPlan:
        again = [
            (each.part.kv_cache, [work.slot for work in each.works if work.row is None]) for each in self._sessions
        ]
        bases: dict[tuple[int, int], int] = {}  # session, entry → place among the bases
        for number, session in enumerate(self._sessions):
            for work in session.works:
                if work.base is not None:
                    bases.setdefault((number, work.base), len(bases))
        entries = [[entry for owner, entry in bases if owner == number] for number in range(len(self._sessions))]
        return StepPlan(
            self._new_rows,
            tuple((kv_cache, self._index(slots)) for kv_cache, slots in again if slots),
            tuple(
                (session.states, self._index(own)) for session, own in zip(self._sessions, entries, strict=True) if own
            ),
            tuple(self._round(units, bases) for units in self._rounds),
        )

    def _round(self, units: Sequence[Unit], bases: dict[tuple[int, int], int]) -> Round:
        runs: list[MixerRun] = []
        order: list[Unit] = []

        def run(some: Sequence[Unit], *, is_sequence: bool) -> None:
            before = [self._before(unit, bases) for unit in some]
            works = [work for unit in some for work in unit.works]
            new = [at for at, work in enumerate(works) if work.row is not None]
            runs.append(
                MixerRun(
                    self._index([self._again[work] if work.row is None else work.row for work in works]),
                    None if None in before else self._index([place for place in before if place is not None]),
                    is_sequence,
                    None if len(new) == len(works) else self._index(new),
                    self._index([work.row for work in works if work.row is not None]),
                )
            )
            order.extend(some)

        steps = [unit for unit in units if len(unit.works) == 1]
        for begins in (True, False):
            some = [unit for unit in steps if (self._before(unit, bases) is None) == begins]
            if some:
                run(some, is_sequence=False)
        for unit in units:
            if len(unit.works) > 1:
                run([unit], is_sequence=True)
        for at, unit in enumerate(order):
            unit.works[-1].at = at
        return Round(tuple(runs), tuple(self._keeping(order)))

    @staticmethod
    def _before(unit: Unit, bases: dict[tuple[int, int], int]) -> int | None:
        """Where the state before a unit is among those of the round before; None where a text begins."""
        first = unit.works[0]
        if first.parent is not None:
            return first.parent.at
        return None if first.base is None else bases[unit.session, first.base]

    def _keeping(self, order: Sequence[Unit]) -> list[Keeping]:
        keeping = []
        for number, session in enumerate(self._sessions):
            kept = [unit.works[-1] for unit in order if unit.session == number]
            kept = [work for work in kept if work.entry is not None]
            if kept:
                entries = [work.entry for work in kept if work.entry is not None]
                keeping.append(Keeping(session.states, self._index(entries), self._index([work.at for work in kept])))
        return keeping

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
