"""Which state each row of a batch goes on from and which are kept, for kernels: `make_plan` without rounds and calls.

A row's state before it must be kept, or be that of a row of the batch. Where it is not, the tokens between are run
again first (`MissingStates`), as a batch of their own whose last state is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from swarm.base.errors import LocalProtocolError
from swarm.compute.recurrent.plan import SessionWorks, Work
from swarm.compute.state_step import NO_PARENT, NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from swarm.compute.kv_cache import KvCache

FIELDS: Final = ("line", "slot", "parent", "base", "keep", "spill")


class StateOverflow(Exception):
    """A batch has more states than there is room for; it is to be cut."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """One session's rows `[start, end)` of a batch, which have their slots, or tokens that are run again.

    Attributes:
        line: of the session in the table of addresses.
    """

    kv_cache: KvCache
    line: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MissingStates:
    """Tokens of a session that are to be run again, one after the other.

    Attributes:
        slots: of the tokens.
        entry: where the state after the last one is kept.
    """

    part: StateRows
    works: tuple[Work, ...]
    entry: int

    @property
    def slots(self) -> list[int]:
        return [work.slot for work in self.works]


@dataclass(frozen=True, slots=True)
class StateLimits:
    """What a plan's memory is laid out for.

    Attributes:
        rows: of a batch.
        sessions: of a batch.
        taps: inputs before a row that a convolution reads, or a state has.
        spills: states that the scratch has room for.
    """

    rows: int
    sessions: int
    taps: int
    spills: int

    @property
    def words(self) -> int:
        """int32 of a plan."""
        return self.rows * (len(FIELDS) + self.taps) + 2 * self.sessions

    def cut(self, words: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Fields [FIELDS, rows], sources [rows, taps] and segments [sessions, 2] in a plan's words."""
        ends = np.cumsum([len(FIELDS) * self.rows, self.taps * self.rows])
        fields, sources, segments = np.split(words, ends)
        return fields.reshape(len(FIELDS), -1), sources.reshape(-1, self.taps), segments.reshape(-1, 2)


def missing_states(part: StateRows, most: int) -> MissingStates | None:
    """What is to be run first, at most so many tokens; None where every state before a row is there.

    Raises:
        StateOverflow: no entry is free for it.
    """
    works = SessionWorks.of(part).works
    again: list[Work] = []
    for work in works:
        if work.row is not None or len(again) == most or (again and work.parent is not again[-1]):
            break
        again.append(work)
    if not again:
        return None
    states = part.kv_cache.states
    assert states is not None
    base = again[0].base
    given = states.slots.reserve([again[-1].place], [], spared=[] if base is None else [base])
    if again[-1].place not in given:
        raise StateOverflow("no entry is free for a state that is made again")
    return MissingStates(part, tuple(again), given[again[-1].place])


def plan_again(missing: MissingStates, limits: StateLimits, words: NDArray[np.int32]) -> None:
    """Lay out tokens that are run again, as the only rows of a batch."""
    works = list(missing.works)
    for place, work in enumerate(works):
        work.row = place
    works[-1].entry = missing.entry
    _StateLayout(limits, words).add(missing.part.line, works)


def plan_states(parts: Sequence[StateRows], limits: StateLimits, words: NDArray[np.int32]) -> None:
    """Lay out a batch, and reserve entries for the states that it leaves; nothing is missing.

    Raises:
        StateOverflow: it has more branches than the scratch has room for.
    """
    layout = _StateLayout(limits, words)
    for number, part in enumerate(parts):
        session = SessionWorks.of(part)
        if any(work.row is None for work in session.works):
            raise StateOverflow("a state is missing")
        bases = [work.base for work in session.works if work.base is not None]
        session.keep(session.cut(number, in_sequences=True), bases)
        layout.add(part.line, session.works)


class _StateLayout:
    """Writes a plan."""

    def __init__(self, limits: StateLimits, words: NDArray[np.int32]) -> None:
        words.fill(NONE)
        self._limits = limits
        self._fields, self._sources, self._segments = limits.cut(words)
        self._segments.fill(0)
        self._sessions = self._spilled = 0

    def add(self, line: int, works: Sequence[Work]) -> None:
        """A session's rows, parents before their children."""
        taps = self._limits.taps
        fields = dict(zip(FIELDS, self._fields, strict=True))
        bases: dict[Work, int] = {}
        rows = [_row(work) for work in works]
        for work, row in zip(works, rows, strict=True):
            parent = work.parent
            bases[work] = bases[parent] if parent is not None else NONE if work.base is None else work.base
            fields["line"][row], fields["slot"][row], fields["base"][row] = line, work.slot, bases[work]
            fields["parent"][row] = NO_PARENT if parent is None else _row(parent)
            fields["keep"][row] = NONE if work.entry is None else work.entry
            self._sources[row] = _sources(parent, self._sources, taps, is_fresh=bases[work] == NONE)
            if parent is not None and _row(parent) != row - 1 and fields["spill"][_row(parent)] == NONE:
                fields["spill"][_row(parent)] = self._spilled
                self._spilled += 1
        if self._spilled > self._limits.spills or self._sessions == self._limits.sessions:
            raise StateOverflow(f"{self._spilled} branches, {self._limits.spills} have room")
        self._segments[self._sessions] = rows[0], rows[-1] + 1
        self._sessions += 1


def _row(work: Work) -> int:
    if work.row is None:
        raise LocalProtocolError("states", "a token that is run again has no row")
    return work.row


def _sources(parent: Work | None, known: NDArray[np.int32], taps: int, *, is_fresh: bool) -> NDArray[np.int32]:
    """Where the inputs before a row are: its parent's row, and behind that what is before the parent."""
    if parent is not None:
        return np.concatenate([[_row(parent)], known[_row(parent), : taps - 1]]).astype(np.int32)
    return np.full(taps, NONE, np.int32) if is_fresh else (-2 - np.arange(taps)).astype(np.int32)
