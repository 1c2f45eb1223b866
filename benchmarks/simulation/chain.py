"""A chain of machines and a draft that take only virtual time: the real decode loop runs against them.

    sweep     (hops + 1) one-way delays, hidden rows over the rate, every hop's forward, and the wait behind others
    draft     so many milliseconds per pass of its model, and more where that is known more closely

Deterministic. Picks and trees are recorded ones (`RecordedTail`, `RecordedDrafter`), or those of models that run for it
and whose own time does not count (`ModelTail`, `VirtualDrafter`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from benchmarks.simulation.acceptance import answer
from benchmarks.simulation.clock import Clock, Line, Then
from benchmarks.simulation.counted import CountedDrafter
from benchmarks.simulation.recorded import Recorded, RecordedSearch
from client.chain.answers import Answer
from client.drafting.drafter import NO_PICKS, TreeDrafter
from client.drafting.search.local_session import LocalSession
from client.drafting.search.stopping import NO_LIMIT, StopRule
from client.drafting.search.tree import DraftTree, Picks
from swarm.ids import TreeNodeId
from swarm.inference.ragged_batch import RaggedModel
from swarm.protocol.messages import Credits, HopTime, Reply, Sampling, Sweep
from swarm.protocol.session import Limits, SessionState
from swarm.routing.costs import RouteForecast

T = TypeVar("T")
HOPS = 3
CLIENT = "client"
"""A program, as each hop's number is."""
ROW_BYTES = 768
"""Of the demo target's hidden rows in fp32: 192 values."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take. delay_ms: one way. row_bytes: of a hidden row. forward_ms, row_ms: of a hop's forward.

    pass_ms, pass_row_ms: of the draft's model, a pass and each row of it. grow_ms, node_ms: beside passes, each time
    that a tree grows and for each node that it has then. turn_ms: until the drafter has heard of it, and the loop of
    the tree. learn_ms: from a reply, before the next one is heard.

    others: sweeps of other clients, as large as this one, that a sweep waits behind, hop by hop. wait_ms: between a
    sweep's arrival at a hop and its forward, with nothing in the way.

    cores: that all machines share, None where each has its own; a machine's program computes on one at a time.
    handling_ms: what they compute for a sweep beside forwards and drafts, messages above all: it takes the cores'
    time, and is part of the delays otherwise. handling_row_ms: what they compute for each further row, which is part
    of nothing else. other_ms: what each hop says that messages took of it, which is in `handling_ms` or the delays.

    first_ms: what a hop's first forward with so many rows, up to the next power of two, takes beside all that, such as
    a card that loads kernels when they are used first; one row it had before.
    """

    delay_ms: float
    mbit: float
    forward_ms: float = 7.0
    row_ms: float = 0.1
    pass_ms: float = 4.0
    pass_row_ms: float = 0.0
    grow_ms: float = 0.0
    node_ms: float = 0.0
    turn_ms: float = 0.0
    learn_ms: float = 0.0
    others: tuple[float, ...] = (0.0,) * HOPS
    wait_ms: float = 0.0
    cores: int | None = None
    handling_ms: float = 0.0
    handling_row_ms: float = 0.0
    other_ms: float = 0.0
    row_bytes: int = ROW_BYTES
    first_ms: float = 0.0
    paces: tuple[float, ...] = (1.0,) * HOPS

    def compute_ms(self, rows: int, hop: int = 0) -> float:
        """Of one hop's forward."""
        return self.paces[hop] * (self.forward_ms + self.row_ms * rows)

    def plain_ms(self) -> float:
        """Of a sweep without a tree, with nobody else there."""
        forecast = self.forecast()
        return forecast.links_ms + forecast.compute_ms + forecast.link_row_ms

    def forecast(self) -> RouteForecast:
        """What routing would say of a chain of such machines."""
        links_ms, link_row_ms = (HOPS + 1) * self.delay_ms, (HOPS - 1) * self.transfer_ms(1)
        each_ms = [self.compute_ms(1, hop) for hop in range(HOPS)]
        row_ms, bottleneck_share = self.row_ms * sum(self.paces), max(self.paces) / sum(self.paces)
        return RouteForecast(links_ms, sum(each_ms), row_ms, link_row_ms, hops=HOPS, bottleneck_share=bottleneck_share)

    def transfer_ms(self, rows: int) -> float:
        """Of hidden rows over one link."""
        return rows * self.row_bytes * 8 / (self.mbit * 1e3)


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


@dataclass(slots=True)
class Flight:
    """A sweep on its way. arrived_ms, started_ms, compute_ms: at the hop where it is."""

    sequence: int
    rows: int
    picks: tuple[tuple[TreeNodeId, int], ...]
    sent_ms: float
    arrived_ms: float = 0.0
    started_ms: float = 0.0
    compute_ms: float = 0.0
    times: list[HopTime] = field(default_factory=list)
    is_back: bool = False
    back_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A hop: its program, which hears and says one thing at a time; its model; and the link behind it."""

    program: Line = field(default_factory=Line)
    model: Line = field(default_factory=Line)
    link: Line = field(default_factory=Line)


Answered = tuple[tuple[TreeNodeId, int], ...]
"""What a tail picked after nodes."""


class Tail(Protocol):
    """Picks for a chain."""

    def picks(self, sweep: Sweep) -> Answered:
        """What is picked after the nodes of a sweep, each of which comes once."""
        ...


class RecordedTail:
    """A recorded text's picks; after what is not in it, token 0."""

    def __init__(self, recorded: Recorded, credits: Credits) -> None:
        self._text = recorded.tokens
        self._state = SessionState(Limits(1 << 20, credits.window_tokens, credits.sweeps, credits.nodes))
        self._true: set[TreeNodeId | None] = {None}

    def picks(self, sweep: Sweep) -> Answered:
        """What follows in the text."""
        applied, picks, text = self._state.apply(sweep), list[tuple[TreeNodeId, int]](), self._text
        for node, token, parent, position in zip(
            applied.appended, sweep.tokens, sweep.parents, applied.positions, strict=True
        ):
            is_true = parent in self._true and position < len(text) and text[position] == token
            if is_true:
                self._true.add(node)
            if node >= sweep.picks_from:
                follows = is_true and position + 1 < len(text)
                picks.append((node, text[position + 1] if follows else 0))
        return tuple(picks)


class ModelTail:
    """What the target itself picks, behind dead branches too."""

    def __init__(self, target: RaggedModel, credits: Credits) -> None:
        limits = Limits(target.vocab_size, credits.window_tokens, credits.sweeps + 1, 2 * credits.nodes)
        self._session = LocalSession(target, limits)

    def picks(self, sweep: Sweep) -> Answered:
        """One forward of the whole target."""
        return tuple(answer(self._session, sweep).picks)


class VirtualChain:
    """Answers sweeps with a tail's picks, after the time that they would take."""

    def __init__(self, tail: Tail, costs: Costs, clock: Clock, credits: Credits) -> None:
        self.credits = credits
        self.first_link_ms = costs.delay_ms
        self._tail = tail
        self._costs = costs
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self._client, self._hops = Line(), [Machine() for _ in range(HOPS)]
        self._ran = {(hop, 0) for hop in range(HOPS)}

    @property
    def route_key(self) -> Hashable:
        """There is one route."""
        return "virtual"

    @property
    def has_answer(self) -> bool:
        """Whether a reply is there by now."""
        return bool(self._flights) and self._flights[0].is_back

    def send(self, sweep: Sweep) -> None:
        """Start a sweep: it computes when the one before it has left."""
        flight = Flight(sweep.sequence, len(sweep.tokens), self._tail.picks(sweep), self._clock.now_ms)
        self._flights.append(flight)
        self._client.join(partial(self._handle, flight, CLIENT), partial(self._travel, flight, 0))

    async def answer(self) -> Answer:
        """The next reply; time passes until it is there."""
        flight = self._flights[0]
        self._clock.until(lambda: flight.is_back)
        self._flights.popleft()
        return Answer(Reply(flight.sequence, 0, flight.picks, tuple(flight.times)), flight.back_ms - flight.sent_ms)

    async def idle(self, most_ms: float) -> None:
        """Time passes until a reply is there, or so much of it."""
        over: list[bool] = []
        self._clock.after(most_ms, lambda: over.append(True))
        self._clock.until(lambda: bool(over) or self.has_answer)

    def _handle(self, flight: Flight, program: Hashable, then: Then) -> None:
        """A machine's program reads and writes a sweep's messages."""
        self._clock.compute(self._handling_ms + self._further_ms(flight), then, program)

    def _travel(self, flight: Flight, to: int) -> None:
        """To a hop, or back to the client; what the machine behind computed for messages is in the delay."""
        arrive = self._arrive if to < HOPS else self._come_back
        self._clock.after(self._costs.delay_ms - self._handling_ms, partial(arrive, flight, to))

    def _arrive(self, flight: Flight, hop: int) -> None:
        flight.arrived_ms = self._clock.now_ms
        self._hops[hop].program.join(partial(self._handle, flight, hop), partial(self._heard, flight, hop))

    def _heard(self, flight: Flight, hop: int) -> None:
        work, then = partial(self._forward, flight, hop), partial(self._leave, flight, hop)
        self._clock.after(self._costs.wait_ms, partial(self._hops[hop].model.join, work, then))

    def _forward(self, flight: Flight, hop: int, then: Then) -> None:
        compute_ms, size = self._costs.compute_ms(flight.rows, hop), (hop, (flight.rows - 1).bit_length())
        if size not in self._ran:
            self._ran.add(size)
            compute_ms += self._costs.first_ms
        flight.compute_ms = compute_ms

        def begin() -> None:
            flight.started_ms = self._clock.now_ms
            self._clock.compute(compute_ms, then, hop)

        self._clock.after(compute_ms * self._costs.others[hop], begin)

    def _leave(self, flight: Flight, hop: int) -> None:
        """A hop is done: it says what that took, and its link takes the rows."""
        now_ms = self._clock.now_ms
        waited_ms = flight.started_ms - flight.arrived_ms - self._handling_ms - self._further_ms(flight)
        took_ms = now_ms - flight.started_ms
        lost_ms = max(took_ms - flight.compute_ms, 0.0) if self._clock.cores else 0.0  # waiting, say nodes on CPUs
        times = HopTime(waited_ms + lost_ms, took_ms - lost_ms, self._costs.other_ms, self._costs.delay_ms)
        flight.times.append(times)
        bytes_ms = self._costs.transfer_ms(flight.rows) if hop < HOPS - 1 else 0.0
        self._hops[hop].link.join(partial(self._clock.after, bytes_ms), partial(self._travel, flight, hop + 1))

    def _come_back(self, flight: Flight, _: int) -> None:
        flight.is_back, flight.back_ms = True, self._clock.now_ms

    @property
    def _handling_ms(self) -> float:
        return self._costs.handling_ms / (HOPS + 1)

    def _further_ms(self, flight: Flight) -> float:
        """What a machine computes for rows after the first, beside forwards."""
        return self._costs.handling_row_ms / (HOPS + 1) * (flight.rows - 1)


class RecordedDrafter:
    """Grows recorded trees; what the model would have run takes time."""

    def __init__(self, recorded: Recorded, costs: Costs, clock: Clock) -> None:
        self._recorded = recorded
        self._costs = costs
        self._clock = clock
        self._length = 0
        self._search: RecordedSearch | None = None

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """The recorded tree's best part; a search goes on where it was."""
        length, costs, search = len(sequence), self._costs, self._search
        if search is None or length != self._length:
            passed = () if search is None else tuple(sequence[self._length :])
            expanded = search.below(passed) if search is not None and passed else set[tuple[int, ...]]()
            tree, without_model = self._recorded.trees[length], self._recorded.looked_up.get(length, ())
            search = RecordedSearch(tree, without_model, expanded, self._pass)
        tree = search.go_on(nodes, depth, stop_rule)
        self._clock.take(costs.grow_ms + costs.node_ms * len(tree), CLIENT)
        self._clock.wait(costs.turn_ms)
        self._length, self._search = length, search
        return tree

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """It has learned what it will, but takes the time."""
        self._clock.take(self._costs.learn_ms, CLIENT)

    def _pass(self, rows: int) -> None:
        self._clock.take(self._costs.pass_ms + self._costs.pass_row_ms * rows, CLIENT)


class VirtualDrafter(CountedDrafter):
    """A real drafter; what it ran takes virtual time, and no other."""

    def __init__(self, drafter: TreeDrafter, costs: Costs, clock: Clock) -> None:
        super().__init__(drafter)
        self._costs = costs
        self._clock = clock

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """What it grows."""
        tree, costs = super().grow(sequence, nodes, depth, sampling, stop_rule), self._costs
        self._clock.take(costs.grow_ms + costs.node_ms * len(tree), CLIENT)
        self._clock.wait(costs.turn_ms)
        return tree

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """What it learns."""
        super().learn(tree, picks, others)
        self._clock.take(self._costs.learn_ms, CLIENT)

    def _ran(self, passes: int, first: int) -> None:
        before = self.rows
        super()._ran(passes, first)
        self._clock.take(self._costs.pass_ms * passes + self._costs.pass_row_ms * (self.rows - before), CLIENT)
