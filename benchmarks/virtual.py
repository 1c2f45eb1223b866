"""A chain of machines and a draft that take only virtual time: the real decode loop runs against them.

    sweep     (hops + 1) one-way delays, hidden rows over the rate, every hop's forward, and the wait behind others
    draft     so many milliseconds per pass of its model, and more where that is known more closely

Deterministic. Picks and trees are recorded ones.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.recorded import Recorded, RecordedSearch
from client.answers import Answer
from client.draft import NONE
from swarm.budget import EVERYTHING, Worth
from swarm.ids import TreeNodeId
from swarm.messages import Credits, HopTime, Reply, Sampling, Sweep
from swarm.session import Limits, SessionState
from swarm.tree import DraftTree, Picks

T = TypeVar("T")
HOPS = 3
ROW_BYTES = 768
"""Of the demo target's hidden rows in fp32: 192 values."""


@dataclass(slots=True)
class Clock:
    """Virtual milliseconds."""

    now_ms: float = 0.0

    def seconds(self) -> float:
        """For the decode loop."""
        return self.now_ms / 1e3


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take. delay_ms: one way. forward_ms, row_ms: of a hop's forward.

    pass_ms, pass_row_ms: of the draft's model, a pass and each row of it. grow_ms: beside passes, each time that a tree
    grows. learn_ms: from a reply, before the next one is heard.

    others: sweeps of other clients, as large as this one, that a sweep waits behind at each hop. wait_ms: between a
    sweep's arrival at a hop and its forward, with nothing in the way.

    cores: that all machines share, None where each has its own. handling_ms: what they compute for a sweep beside
    forwards and drafts, messages above all: it takes the cores' time, and is part of the delays otherwise.
    handling_row_ms: what they compute for each further row, which is part of nothing else. other_ms: what each hop says
    that messages took of it, which is in `handling_ms` or the delays. between_ms: from a reply's arrival to what the
    client does next.
    """

    delay_ms: float
    mbit: float
    forward_ms: float = 7.0
    row_ms: float = 0.1
    pass_ms: float = 4.0
    pass_row_ms: float = 0.0
    grow_ms: float = 0.0
    learn_ms: float = 0.0
    others: float = 0.0
    wait_ms: float = 0.0
    cores: int | None = None
    handling_ms: float = 0.0
    handling_row_ms: float = 0.0
    other_ms: float = 0.0
    between_ms: float = 0.0

    def compute_ms(self, rows: int) -> float:
        """Of one hop's forward."""
        return self.forward_ms + self.row_ms * rows

    def plain_ms(self) -> float:
        """Of a sweep without a tree, with nobody else there."""
        return (HOPS + 1) * self.delay_ms + HOPS * self.compute_ms(1) + (HOPS - 1) * self.transfer_ms(1)

    def transfer_ms(self, rows: int) -> float:
        """Of hidden rows over one link."""
        return rows * ROW_BYTES * 8 / (self.mbit * 1e3)


class Cores:
    """Cores that several machines share: what is to be computed takes whatever time others have left, in pieces."""

    def __init__(self, count: int | None, clock: Clock) -> None:
        self._clock = clock
        self._taken: list[list[tuple[float, float]]] = [[] for _ in range(count or 0)]

    def take(self, ready_ms: float, took_ms: float) -> tuple[float, float]:
        """From when to when something computes that can from `ready_ms` on.

        At once, where everybody has cores of their own.
        """
        if not self._taken or not took_ms:
            return ready_ms, ready_ms + took_ms
        began_ms, left_ms = None, took_ms
        while left_ms > 1e-9:
            gaps = [self._gap(taken, ready_ms) for taken in self._taken]
            core = min(range(len(gaps)), key=lambda place: (gaps[place][0], -gaps[place][1]))
            start, end = gaps[core]
            ready_ms = min(end, start + left_ms)
            insort(self._taken[core], (start, ready_ms))
            began_ms, left_ms = start if began_ms is None else began_ms, left_ms - (ready_ms - start)
        assert began_ms is not None
        return began_ms, ready_ms

    def _gap(self, taken: list[tuple[float, float]], ready_ms: float) -> tuple[float, float]:
        """When a core is free from then on, and until when."""
        taken[:] = [(start, end) for start, end in taken if end > self._clock.now_ms]
        for start, end in taken:
            if ready_ms < start:
                return ready_ms, start
            ready_ms = max(ready_ms, end)
        return ready_ms, math.inf


class AtOnce(Executor):
    """Runs what it is given where it is given it: virtual time does not pass meanwhile by itself."""

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:  # noqa: ANN401 - Executor's
        """Run it now."""
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **options))
        except Exception as error:  # noqa: BLE001 - the future's business
            done.set_exception(error)
        return done


class VirtualChain:
    """Answers sweeps with a recorded text's picks, after the time that they would take."""

    first_link_ms = 0.0

    def __init__(self, recorded: Recorded, costs: Costs, clock: Clock, credits: Credits, cores: Cores) -> None:
        self.credits = credits
        self._cores = cores
        self._recorded = recorded
        self._costs = costs
        self._clock = clock
        self._state = SessionState(Limits(1 << 20, credits.window_tokens, credits.sweeps, credits.nodes))
        self._true: set[TreeNodeId | None] = {None}
        self._due: deque[tuple[float, float, Reply]] = deque()
        self._hops_free_ms, self._links_free_ms = [0.0] * HOPS, [0.0] * HOPS

    @property
    def route_key(self) -> Hashable:
        """There is one route."""
        return "virtual"

    @property
    def has_answer(self) -> bool:
        """Whether a reply is there by now."""
        return bool(self._due) and self._due[0][1] <= self._clock.now_ms

    def send(self, sweep: Sweep) -> None:
        """Start a sweep: it computes when the one before it has left."""
        applied = self._state.apply(sweep)
        picks = []
        text = self._recorded.tokens
        for node, token, parent, position in zip(
            applied.appended, sweep.tokens, sweep.parents, applied.positions, strict=True
        ):
            is_true = parent in self._true and position < len(text) and text[position] == token
            if is_true:
                self._true.add(node)
            if node >= sweep.picks_from:
                follows = is_true and position + 1 < len(text)
                picks.append((node, text[position + 1] if follows else 0))
        arrives_ms, times = self._pass(len(sweep.tokens))
        self._due.append((self._clock.now_ms, arrives_ms, Reply(sweep.sequence, 0, tuple(picks), times)))

    def _pass(self, rows: int) -> tuple[float, tuple[HopTime, ...]]:
        """When a sweep's reply arrives, and what its hops report: each hop and link does one thing at a time."""
        costs, times = self._costs, list[HopTime]()
        now = self._handle(self._clock.now_ms, rows) + costs.delay_ms
        for hop in range(HOPS):
            arrived, compute = now + self._further_ms(rows), costs.compute_ms(rows)
            ready = max(self._handle(now, rows) + costs.wait_ms, self._hops_free_ms[hop])
            started, ended = self._cores.take(ready + compute * costs.others, compute)
            self._hops_free_ms[hop] = ended
            times.append(HopTime(started - arrived, ended - started, costs.other_ms, costs.delay_ms))
            now = ended
            if hop < HOPS - 1:
                self._links_free_ms[hop] = max(now, self._links_free_ms[hop]) + costs.transfer_ms(rows)
                now = self._links_free_ms[hop]
            now += costs.delay_ms
        return now, tuple(times)

    def _handle(self, now_ms: float, rows: int) -> float:
        """When a machine is done with a sweep's messages; without others, what the first row takes is in the delays."""
        handling, further = self._costs.handling_ms / (HOPS + 1), self._further_ms(rows)
        return self._cores.take(now_ms, handling + further)[1] - handling

    def _further_ms(self, rows: int) -> float:
        """What a machine computes for rows after the first, beside forwards."""
        return self._costs.handling_row_ms / (HOPS + 1) * (rows - 1)

    async def answer(self) -> Answer:
        """The next reply; time passes until it is there."""
        sent, due, reply = self._due.popleft()
        self._clock.now_ms = max(self._clock.now_ms, due) + self._costs.between_ms
        return Answer(reply, due - sent)


class RecordedDrafter:
    """Grows recorded trees; what the model would have run takes time."""

    def __init__(self, recorded: Recorded, costs: Costs, clock: Clock, cores: Cores) -> None:
        self._recorded = recorded
        self._cores = cores
        self._costs = costs
        self._clock = clock
        self._length = 0
        self._search: RecordedSearch | None = None

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: Worth = EVERYTHING
    ) -> DraftTree:
        """The recorded tree's best part; a search goes on where it was."""
        length = len(sequence)
        search, before = self._search, self._search.passes if self._search is not None else 0
        if search is None or length != self._length:
            passed = () if search is None else tuple(sequence[self._length :])
            expanded = search.below(passed) if search is not None and passed else set[tuple[int, ...]]()
            tree, without_model = self._recorded.trees[length], self._recorded.looked_up.get(length, ())
            search, before = RecordedSearch(tree, without_model, expanded), 0
        tree = search.go_on(nodes, depth, worth)
        for rows in search.rows[before:]:
            self._take(self._costs.pass_ms + self._costs.pass_row_ms * rows)
        self._take(self._costs.grow_ms)
        self._length, self._search = length, search
        return tree

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NONE) -> None:
        """It has learned what it will, but takes the time."""
        self._take(self._costs.learn_ms)

    def _take(self, took_ms: float) -> None:
        self._clock.now_ms = self._cores.take(self._clock.now_ms, took_ms)[1]
