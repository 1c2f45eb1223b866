"""Whose turn it is to compute: schedule → run → postprocess. Owns no sessions and no network.

Owners are served by fair queueing on measured milliseconds, and the sessions of each in turn (`Turns`), in slices of
at most a quantum (F3): neither a long prefill nor a crowd of sessions holds up another's tree. Slices run on a thread
of their own, short ones in the event loop itself: the way to another core, whose caches are cold, and back would add
much to them. One thread at a time touches tensors.

Where several sessions wait, whole sweeps of others join a slice in one `Batch`, for as long as that
saves those that wait more than it costs those that share it. Each is charged its share; the rest of the time it waited.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, groupby, islice, pairwise
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from node.session.admission import OwnerStanding, of_one
from node.session.step_cost import LoopCost, StepCost
from node.session.sweep_run import AskedPicks, SweepRun, SweepSlice
from swarm.base.errors import ConfigError
from swarm.base.layers import Span
from swarm.compute.compute_thread import ComputeThread
from swarm.compute.devices import synchronize
from swarm.compute.picks.device_picks import picks_on, to_device
from swarm.compute.sampling import pick_together

logger = logging.getLogger(__name__)

# Sweeps of several sessions in one forward. Any topological cut of a sweep gives the same result (F3).
#
# So a member's part is simply the next few nodes of its sweep. Members share the forward and the head; no row sees
# another session's.

SessionT = TypeVar("SessionT")
Forwarded = tuple[torch.Tensor, Mapping[int, torch.Tensor], Sequence[SweepSlice]]
"""Rows [R, hidden_size] that left the span, those that entered layers within it, and whose they are, in order."""


@dataclass(frozen=True, slots=True)
class BatchMember(Generic[SessionT]):
    """One session's part of a batch."""

    session: SessionT
    """Whose sweep it is."""
    run: SweepRun
    rows: int
    """How many of its next tree nodes are run."""


class Batch(Generic[SessionT]):
    """Parts of sweeps with the same layers of the same model, run together once.

    Attributes:
        members: one per session; the batch is the first one's turn.
        predicted_ms: what the forward should take; 0 outside the scheduler.
    """

    def __init__(self, members: Sequence[BatchMember[SessionT]], predicted_ms: float = 0.0) -> None:
        self.members = tuple(members)
        self.predicted_ms = predicted_ms
        self._failed: dict[SweepRun, Exception] = {}

    @property
    def rows(self) -> list[int]:
        """How many rows each member brings."""
        return [member.rows for member in self.members]

    @property
    def encode_ms(self) -> float:
        """How long rows of these sweeps were encoded so far."""
        return sum(member.run.encode_ms for member in self.members)

    def run(self) -> dict[SweepRun, Exception]:
        """Run the next rows of every member in one forward, on the calling thread.

        The first part of a sweep also applies truncation and commit, the last one encodes the rows. A joint forward
        that fails is tried again for each alone.

        Returns:
            the runs that failed and why: rows that arrived are not finite or of another width, or whatever the forward
            raised. The others are none the worse.
        """
        lead = self.members[0].run
        slices = self._take()
        started = time.perf_counter()
        working = [piece for piece in slices if piece.chosen]
        for hidden, kept, ran in self._forward(working) if working else ():
            if lead.is_tail:
                self._pick(hidden, ran)
            start = 0
            for piece in ran:
                own = slice(start, start + len(piece.chosen))
                piece.run.keep(piece, hidden[own], {layer: rows[own] for layer, rows in kept.items()})
                start = own.stop
        synchronize(lead.model.device)  # or the next batch would be charged for this
        if working:
            lead.forwards_ms.append((time.perf_counter() - started) * 1e3)  # of one member: a forward counts once
        if not lead.is_tail:
            self._encode(slices)
        return self._failed

    def _take(self) -> list[SweepSlice]:
        slices: list[SweepSlice] = []
        for member in self.members:
            with self._blame(member.run):
                slices.append(member.run.take(member.rows))
        return slices

    def _forward(self, slices: Sequence[SweepSlice]) -> list[Forwarded]:
        """Hidden rows and whose they are, one after the other: one forward for all if it can be."""
        lead, works = self.members[0].run, [piece.work for piece in slices]
        cuts = sorted({layer for piece in slices for layer in piece.run.cuts})
        try:
            if not cuts:
                return [(lead.model.forward(works, lead.span), {}, slices)]
            parts = [Span(*ends) for ends in pairwise((lead.span.start, *cuts, lead.span.end))]
            *kept, hidden = lead.model.forward_parts(works, parts)
            return [(hidden, dict(zip(cuts, kept, strict=True)), slices)]
        except Exception as error:  # noqa: BLE001 - such as no memory for all of them
            if len(slices) == 1:
                self._failed[slices[0].run] = error
                return []
            logger.warning("a forward of %d sessions failed, now each alone: %s", len(slices), error)
            return [result for piece in slices for result in self._forward([piece])]

    def _pick(self, hidden: torch.Tensor, ran: Sequence[SweepSlice]) -> None:
        """Run the head on the rows [R, hidden_size] whose picks a client wants, of all sessions.

        As many at a time as the head's memory bound allows (F3).
        """
        model = self.members[0].run.model
        asked: list[tuple[SweepRun, int, int]] = []
        start = 0
        for piece in ran:
            asked += [(piece.run, start + place, offset) for place, offset in piece.run.asked(piece.chosen)]
            start += len(piece.chosen)
        for first in range(0, len(asked), model.head_rows):
            some = asked[first : first + model.head_rows]
            logits = model.logits(_rows_of(hidden, [row for _, row, _ in some]))
            logits = logits if picks_on(logits.device) else logits.cpu()
            self._pick_after(logits, [(run, offset) for run, _, offset in some])

    def _pick_after(self, logits: torch.Tensor, asked: Sequence[tuple[SweepRun, int]]) -> None:
        """Pick after nodes of all sessions together: on a card, one wait for all of them.

        Args:
            logits: float32 [R, vocab_size]
            asked: [R] whose row it is, and the node by its place in the sweep.
        """
        prepared: list[tuple[SweepRun, AskedPicks]] = []
        first = 0
        for run, of_run in groupby(asked, key=lambda entry: entry[0]):
            offsets = [offset for _, offset in of_run]
            with self._blame(run):
                prepared.append((run, run.prepare(logits, first, offsets)))
            first += len(offsets)
        lead = self.members[0].run
        with self._blame(*(run for run, _ in prepared)):
            requests = [one.request for _, one in prepared if one.request is not None]
            picks = iter(pick_together(logits, requests, lead.valid_tokens, lead.noise))
            for run, one in prepared:
                tokens = one.drawn if one.request is None else next(picks)
                with self._blame(run):
                    if isinstance(tokens, ConfigError):
                        raise tokens
                    run.take_picks(one, tokens)

    def _encode(self, slices: Sequence[SweepSlice]) -> None:
        for piece in slices:
            if piece.run not in self._failed and piece.run.is_done:
                with self._blame(piece.run):
                    piece.run.encode()

    @contextmanager
    def _blame(self, *runs: SweepRun) -> Iterator[None]:
        """What is raised within is these runs' own failure."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other runs go on
            self._failed |= dict.fromkeys(runs, error)


def _rows_of(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a tensor, in rising order; without a copy where none between them is left out."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return hidden[rows[0] : rows[-1] + 1]
    return hidden[to_device(rows, hidden.device)]


# Who computes next: networks by fair queueing, the owners of each likewise, and the sessions of each owner by deficit
# round-robin, all on milliseconds.
#
# An owner is whoever sent the sessions, such as an address: many sessions of one owner get together what one session
# of another gets. A network is where owners come from whom one person may be: many get what a few get. What either
# used is its *virtual time*. The one comes next whose virtual time would be the least after a turn as long as its last
# one, so who sends a sweep and waits for its answer does not wait for all who never stop. Nobody saves time while it is
# idle: whoever comes back begins where those are that have always had work.
#
# Source: A. Demers, S. Keshav, S. Shenker, Analysis and Simulation of a Fair Queueing Algorithm, 1989.

MAX_OWNERS = 4_096
"""Owners and networks whose virtual times are remembered, those that were seen last: more than there are sessions."""
MAX_NEIGHBOURS = 256
"""The same of owners within one network."""


class Owned(Hashable, Protocol):
    """A session as its turns see it."""

    @property
    def owner(self) -> str:
        """Whose it is."""


OwnedT = TypeVar("OwnedT", bound=Owned)


@dataclass(slots=True)
class _Used:
    """What somebody used, in milliseconds.

    Attributes:
        virtual_ms: in all, divided by its shares.
        last_ms: in its last turn, likewise; 0 before the first.
    """

    virtual_ms: float
    last_ms: float = 0.0


class _FairTimes:
    """The virtual times of those that share something, by name. Who did nothing for the longest is forgotten first."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._used: dict[str, _Used] = {}
        self._least_ms = 0.0

    def __len__(self) -> int:
        return len(self._used)

    def resume(self, name: str) -> None:
        """Somebody has work again."""
        used = self._of(name)
        used.virtual_ms = max(used.virtual_ms, self._least_ms)

    def next_of(self, waiting: Collection[str]) -> str:
        """The name that has used the least time and has work; of equals the first."""
        used = {name: self._used.get(name) or _Used(self._least_ms) for name in waiting}
        self._least_ms = max(self._least_ms, min(one.virtual_ms for one in used.values()))
        return min(waiting, key=lambda name: used[name].virtual_ms + used[name].last_ms)

    def charge(self, name: str, shared_ms: float, owes_ms: float | None) -> None:
        """Somebody used so much of its own turn or, with a bound of what it then owes at most, of another's."""
        used = self._of(name)
        spent_ms = used.virtual_ms + shared_ms
        if owes_ms is not None:  # else it would wait for long when those stop
            spent_ms = min(spent_ms, max(used.virtual_ms, self._least_ms + owes_ms))
        used.virtual_ms = spent_ms

    def end_turn(self, name: str, used_ms: float) -> None:
        """Somebody's turn is over, of which it used so much."""
        self._of(name).last_ms = used_ms

    def _of(self, name: str) -> _Used:
        used = self._used.pop(name, None) or _Used(self._least_ms)
        self._used[name] = used
        if len(self._used) > self._max_names:
            del self._used[next(iter(self._used))]
        return used


class Turns(Generic[OwnedT]):
    """Sessions that wait to compute.

    A balance is what a session may still use of its turn, in milliseconds. It saves nothing while it is idle and keeps
    what it owes: a quantum at most for what it used of others' turns.
    """

    def __init__(self, quantum_ms: float, standing: Callable[[str], OwnerStanding] = of_one) -> None:
        """Wait for the first session.

        Args:
            quantum_ms: what a turn adds to a balance.
            standing: what an owner counts for.
        """
        self._quantum_ms = quantum_ms
        self.standing = standing
        self._order: deque[str] = deque()
        self._queues: dict[str, deque[OwnedT]] = {}
        self._waiting: set[OwnedT] = set()
        self._balances_ms: WeakKeyDictionary[OwnedT, float] = WeakKeyDictionary()
        self._network_of: dict[str, str] = {}
        self._crowds: Counter[str] = Counter()
        self._networks = _FairTimes(MAX_OWNERS)
        self._owners: OrderedDict[str, _FairTimes] = OrderedDict()
        self._serving: str | None = None
        self._shares, self._network_shares = 1, 1
        self._left_ms = self._used_ms = 0.0

    def __bool__(self) -> bool:
        """Whether a session waits, apart from the one whose turn it is."""
        return bool(self._order)

    def submit(self, session: OwnedT) -> None:
        """Queue a session; harmless when it is queued already, or has its turn."""
        if session not in self._waiting:
            self._waiting.add(session)
            self._queue(session, is_next=False)

    def begin(self) -> OwnedT:
        """Take the session whose turn it is."""
        owner = self._serving
        if owner not in self._queues or self._left_ms <= 0:
            owner = self._next_owner()
            self._serving, self._used_ms = owner, 0.0
            self._shares, self._network_shares = self._shares_of(owner)
            self._left_ms = self._quantum_ms * self._sessions(owner)
        session = self._queues[owner].popleft()
        self._drop_empty(owner)
        balance_ms = self._balances_ms.get(session, 0.0)
        self._balances_ms[session] = balance_ms if balance_ms > 0 else balance_ms + self._quantum_ms
        return session

    def left_ms(self, session: OwnedT) -> float:
        """What the session whose turn it is may still use; not above 0 at the end of its turn or its owner's."""
        left_ms = self._balances_ms[session]
        is_alone = not self._order or (len(self._order) == 1 and self._order[0] == session.owner)
        return left_ms if is_alone else min(left_ms, self._left_ms)

    def charge(self, session: OwnedT, milliseconds: float, *, is_lead: bool) -> None:
        """A session used so much; one that joined another's turn owes a quantum at most, and so does its owner."""
        least_ms = float("-inf") if is_lead else -self._quantum_ms
        self._balances_ms[session] = max(self._balances_ms.get(session, 0.0) - milliseconds, least_ms)
        owner = session.owner
        network, is_served = self._network(owner), owner == self._serving
        if is_served:
            self._left_ms -= milliseconds
            self._used_ms += milliseconds
        shares, network_shares = (self._shares, self._network_shares) if is_served else self._shares_of(owner)
        owes_ms = None if is_served else self._quantum_ms
        self._owners_of(network).charge(owner, milliseconds / shares, owes_ms)
        self._networks.charge(network, milliseconds / network_shares, owes_ms)

    def end(self, session: OwnedT, *, has_work: bool) -> None:
        """The session's turn is over."""
        owner = session.owner
        if has_work:
            self._queue(session, is_next=self._balances_ms[session] > 0)
        else:
            self._waiting.discard(session)
            self._balances_ms[session] = min(self._balances_ms.get(session, 0.0), 0.0)
        if owner not in self._queues or self._left_ms <= 0 or len(self._order) == 1:
            self._pass_on(owner)

    def joining(self, leader: OwnedT) -> Iterator[OwnedT]:
        """Who else waits, in the order of their turns; of another owner no more than in a turn of it."""
        owners = [leader.owner] if leader.owner in self._queues else []
        owners += [owner for owner in self._order if owner != leader.owner]
        many = {owner: len(self._queues[owner]) if owner == leader.owner else self._sessions(owner) for owner in owners}
        for place in count():
            owners = [owner for owner in owners if place < many[owner]]
            if not owners:
                return
            for owner in owners:
                yield from islice(self._queues[owner], place, place + 1)

    def _sessions(self, owner: str) -> int:
        """How many sessions' turns an owner has in its own."""
        return max(min(len(self._queues.get(owner, ())), self.standing(owner).sessions), 1)

    def _shares_of(self, owner: str) -> tuple[int, int]:
        """By what an owner's time is divided, and its network's."""
        shares, network = self._sessions(owner) * self.standing(owner).shares, self._network(owner)
        return shares, max(shares, min(self._crowds[network], self.standing(owner).neighbours))

    def _next_owner(self) -> str:
        waiting: dict[str, list[str]] = {}
        for owner in self._order:
            waiting.setdefault(self._network(owner), []).append(owner)
        network = self._networks.next_of(waiting)
        return self._owners_of(network).next_of(waiting[network])

    def _network(self, owner: str) -> str:
        """Where an owner comes from; whoever comes from nowhere is a network of its own."""
        network = self._network_of.get(owner)
        if network is None:
            found = self.standing(owner).network
            network = self._network_of[owner] = f"owner {owner}" if found is None else found
            if len(self._network_of) > MAX_OWNERS:
                del self._network_of[next(iter(self._network_of))]
        return network

    def _owners_of(self, network: str) -> _FairTimes:
        """The times of the owners of a network."""
        times = self._owners.pop(network, None) or _FairTimes(MAX_NEIGHBOURS)
        self._owners[network] = times
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)
        return times

    def _queue(self, session: OwnedT, *, is_next: bool) -> None:
        owner = session.owner
        if owner not in self._queues:
            self._queues[owner] = deque()
            network = self._network(owner)
            self._crowds[network] += 1
            self._networks.resume(network)
            self._owners_of(network).resume(owner)
            # The owner whose turn it is goes on where it was.
            (self._order.appendleft if owner == self._serving else self._order.append)(owner)
        queue = self._queues[owner]
        (queue.appendleft if is_next else queue.append)(session)

    def _pass_on(self, owner: str) -> None:
        """The owner's turn is over."""
        if owner != self._serving:
            return
        if owner in self._queues:
            self._order.remove(owner)
            self._order.append(owner)
        network = self._network(owner)
        self._owners_of(network).end_turn(owner, self._used_ms / self._shares)
        self._networks.end_turn(network, self._used_ms / self._network_shares)
        self._serving, self._left_ms = None, 0.0

    def _drop_empty(self, owner: str) -> None:
        if not self._queues[owner]:
            del self._queues[owner]
            self._order.remove(owner)
            network = self._network(owner)
            self._crowds[network] -= 1
            if not self._crowds[network]:
                del self._crowds[network]


SHARERS_RATE = 0.05
SHORT_FORWARDS, SHORT_SLICE = 2.0, 0.2
"""While others come, a slice is so many times a forward's base or, if that is longer, such a part of a quantum."""
LONG_SLICE = 1.3
"""A sweep is cut where it would take so many times a short slice."""
COMING_S = 1.0
"""Whoever came so lately may come again while a slice runs."""

T = TypeVar("T")


class Latecomers:
    """Who came lately with sweeps that one slice holds whole: the newest two, so that each has others."""

    def __init__(self) -> None:
        self._came_s: dict[Hashable, float] = {}

    def note(self, owner: Hashable, now_s: float) -> None:
        """Such a sweep of this owner was run."""
        self._came_s.pop(owner, None)
        self._came_s[owner] = now_s
        if len(self._came_s) > 2:
            del self._came_s[next(iter(self._came_s))]

    def are_expected(self, owner: Hashable, now_s: float) -> bool:
        """Whether another owner may come while a slice of this one runs."""
        return any(now_s - came_s < COMING_S for other, came_s in self._came_s.items() if other != owner)


@dataclass(frozen=True, slots=True)
class PendingWork:
    """What a session would run next."""

    span: Span
    """Runs of one span may share a forward."""
    rows: int
    """How many, at most."""
    context: int = 0
    """Tokens that they attend to."""


class Schedulable(Owned, Protocol):
    """A session as the engine sees it."""

    def pending(self) -> PendingWork | None:
        """What `next_run` would give, which is not begun by asking; None when nothing waits."""

    def next_run(self) -> SweepRun | None:
        """The sweep to work on: the one begun, or the next in order; None when nothing waits.

        Raises:
            SwarmError: the next one cannot be worked on.
        """

    def finish(self, run: SweepRun) -> None:
        """Take a finished sweep."""

    def fail(self, error: Exception, run: SweepRun | None = None) -> None:
        """Take the error that ended a sweep, or without `run` the error of `next_run`."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch."""

    failed: Mapping[SweepRun, Exception]
    """The runs that failed, and why."""
    started_s: float
    """When the batch began, on the clock of `time.perf_counter`."""
    computed_ms: float
    """How long it computed; encoding is not part of it."""


def _run_timed(batch: Batch[Schedulable]) -> tuple[dict[SweepRun, Exception], float]:
    """Run it; returns the runs that failed and why, and milliseconds that this thread had a CPU."""
    started = time.thread_time()
    failed = batch.run()
    return failed, (time.thread_time() - started) * 1e3


class Engine:
    """One compute thread shared fairly by the owners of a node's sessions, and by the sessions of each.

    Attributes:
        worked_ms: what all batches took so far.
        loop_cost: what sweeps cost the event loop beside their forwards.
    """

    def __init__(
        self,
        cost: StepCost,
        compute: ComputeThread,
        quantum_ms: float = 50.0,
        *,
        counts_cpu: bool = False,
        standing: Callable[[str], OwnerStanding] = of_one,
    ) -> None:
        """Make an engine that computes nothing until `run`.

        Args:
            cost: a first prediction; the engine learns on.
            compute: where it computes.
            quantum_ms: what a turn adds to a session's balance, and the longest step.
            counts_cpu: only the time on a CPU is computing; when others had it, the sweep waited.
            standing: as for `Turns`.
        """
        self._cost = cost
        self._counts_cpu = counts_cpu
        self._quantum_ms = quantum_ms
        self._turns: Turns[Schedulable] = Turns(quantum_ms, standing)
        self._wake = asyncio.Event()
        self.worked_ms = 0.0
        self.loop_cost = LoopCost()
        self._sharers = 1.0
        self._compute = compute
        self._latecomers = Latecomers()

    async def on_thread(self, call: Callable[[], T]) -> T:
        """Run a call on the compute thread, between slices."""
        return await self._compute.run(call)

    def submit(self, session: Schedulable) -> None:
        """Queue a session that has work; harmless when it is queued already."""
        self._turns.submit(session)
        self._wake.set()

    async def run(self) -> None:
        """Serve turns until cancelled."""
        while True:
            await self._wake.wait()
            while self._turns:
                await self._next_turn()
            self._wake.clear()

    async def _next_turn(self) -> None:
        session = self._turns.begin()
        try:
            await self._turn(session)
        except Exception as error:  # noqa: BLE001 - whatever one session does, the others have their turns
            self._give_up(session, error)

    def _give_up(self, session: Schedulable, error: Exception) -> None:
        self._turns.end(session, has_work=False)
        try:
            session.fail(error)
        except Exception as trouble:
            logger.error("a session could not even be ended", exc_info=trouble)

    async def _turn(self, session: Schedulable) -> None:
        """Serve a session until its quantum is used up or nothing waits."""
        while self._turns.left_ms(session) > 0:
            batch = self._schedule(session)
            if batch is None:
                self._turns.end(session, has_work=False)
                return
            result = await self._run_batch(batch)
            self._postprocess(batch, result)
        self._turns.end(session, has_work=True)

    def _schedule(self, leader: Schedulable) -> Batch[Schedulable] | None:
        """The next slice of the session whose turn it is, and the sweeps that share its forward."""
        run = self._next_run(leader)
        if run is None:
            return None
        budget_ms = min(self._turns.left_ms(leader), self._slice_ms(leader, run))
        rows = self._cost.slice_rows(run.remaining, budget_ms, run.context)
        members = [BatchMember(leader, run, rows), *self._joining(leader, rows)]
        attending_ms = sum(self._cost.attention_ms(member.rows, member.run.context) for member in members)
        own_ms = self._cost.predict_ms(sum(member.rows for member in members), len(members))
        return Batch(members, own_ms + attending_ms)

    def _slice_ms(self, leader: Schedulable, run: SweepRun) -> float:
        """How long the next slice of a sweep may take.

        Whoever arrives meanwhile waits for its end. So while others come for sweeps of one slice, a long one goes in
        short slices: as short as is worth a forward of their own.
        """
        whole_ms = self._cost.predict_ms(run.remaining) + self._cost.attention_ms(run.remaining, run.context)
        is_awaited = whole_ms > LONG_SLICE * self._short_ms and self._may_others_come(leader)
        return self._short_ms if is_awaited else self._quantum_ms

    @property
    def _short_ms(self) -> float:
        return min(max(SHORT_FORWARDS * self._cost.base_ms, SHORT_SLICE * self._quantum_ms), self._quantum_ms)

    def _may_others_come(self, leader: Schedulable) -> bool:
        return self._latecomers.are_expected(self._whose(leader), time.perf_counter())

    def _whose(self, session: Schedulable) -> Hashable:
        """With whom a session counts as one: its network or, where its owner carries the sessions of many, itself."""
        standing = self._turns.standing(session.owner)
        return id(session) if standing.sessions > 1 else standing.crowd or session.owner

    async def _run_batch(self, batch: Batch[Schedulable]) -> BatchResult:
        """Compute a batch on the compute thread."""
        started_s, encoded_ms = time.perf_counter(), batch.encode_ms
        failed: Mapping[SweepRun, Exception]
        try:
            failed, on_cpu_ms = await self._compute.run(_run_timed, batch)
        except Exception as error:  # noqa: BLE001 - whatever a forward raises is its sweeps' fault, not the node's
            failed, on_cpu_ms = {member.run: error for member in batch.members}, 0.0
        measured_ms = (time.perf_counter() - started_s) * 1e3
        encoded_ms = batch.encode_ms - encoded_ms
        computed_ms = max((min(on_cpu_ms, measured_ms) if self._counts_cpu else measured_ms) - encoded_ms, 0.0)
        return BatchResult(failed, started_s, computed_ms)

    def _postprocess(self, batch: Batch[Schedulable], result: BatchResult) -> None:
        """Hand results to their sessions, charge each its share of the time, and learn what the batch cost."""
        rows = batch.rows
        seen = sum(member.rows * member.run.context for member in batch.members)
        self._sharers += SHARERS_RATE * (len(rows) - self._sharers)
        for member, share in zip(batch.members, self._cost.shares(rows, self._sharers), strict=True):
            if member.run.is_done and not member.run.compute_ms:
                self._latecomers.note(self._whose(member.session), result.started_s)
            member.run.compute_ms += result.computed_ms * share
            self._end(member, result.failed.get(member.run))
        passed_ms = (time.perf_counter() - result.started_s) * 1e3  # what sessions did with results is charged too
        self.worked_ms += passed_ms
        shares = self._cost.shares(rows)
        if not result.failed:
            self._cost.learn(sum(rows), result.computed_ms, len(rows), seen // max(sum(rows), 1))
        self._charge(batch, [passed_ms * share for share in shares])

    def _charge(self, batch: Batch[Schedulable], charged_ms: Sequence[float]) -> None:
        """Take from each balance what it used."""
        lead = batch.members[0].session
        for member, milliseconds in zip(batch.members, charged_ms, strict=True):
            self._turns.charge(member.session, milliseconds, is_lead=member.session is lead)

    def _next_run(self, session: Schedulable) -> SweepRun | None:
        try:
            return session.next_run()
        except Exception as error:  # noqa: BLE001 - one session's failure must not end the others
            session.fail(error)
            return None

    def _joining(self, leader: Schedulable, rows: int) -> Iterator[BatchMember[Schedulable]]:
        """Others whose whole sweeps share the forward of these rows, in the order of their turns.

        The law: one more member delays everybody in the batch by what it adds, and spares all that wait, itself
        included, one base. It joins while the first is no more than the second, so a round of turns is never longer
        for it. No batch is longer than a quantum. On a staircase those who fit into the bucket add nothing.
        """
        own = leader.pending()
        if own is None or not self._turns:
            return
        waiting = [
            (other, work)
            for other in self._turns.joining(leader)
            if (work := other.pending()) and work.span == own.span
        ]
        left, sessions, cost = len(waiting), 1, self._cost
        of = Counter({self._whose(leader): rows})
        are_others = any(self._whose(other) not in of for other, _ in waiting) or self._may_others_come(leader)
        max_of = cost.rows_within(self._short_ms if are_others else self._quantum_ms)
        for other, work in waiting:
            adds_ms = cost.joining_ms(work.rows, rows) + cost.attention_ms(work.rows, work.context)
            pays = sessions * adds_ms <= left * cost.spared_ms(work.rows, rows)
            max_rows = cost.rows_within(self._quantum_ms - sessions * cost.per_session_ms)
            whose = self._whose(other)
            is_crowd = whose in of and of[whose] + work.rows > max_of
            if not pays or rows + work.rows > max_rows or is_crowd:
                continue
            run = self._next_run(other)
            if run is None:
                continue
            of[whose] += work.rows
            sessions, rows, left = sessions + 1, rows + run.remaining, left - 1
            yield BatchMember(other, run, run.remaining)

    def _end(self, member: BatchMember[Schedulable], error: Exception | None) -> None:
        """Hand a sweep that is done, or failed, back to its session."""
        try:
            if error is not None:
                member.session.fail(error, member.run)
            elif member.run.is_done:
                self.loop_cost.end_sweep()
                member.session.finish(member.run)
        except Exception as trouble:  # noqa: BLE001 - one session's failure must not end the others
            member.session.fail(trouble, member.run)
