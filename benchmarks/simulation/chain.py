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
from benchmarks.simulation.clock import Clock, FifoServer, Then
from benchmarks.simulation.recorded import RecordedSearch, RecordedText
from client.chain.answers import Answer
from client.draft.drafter import NO_PICKS, TreeDrafter
from client.draft.search.source import Passes, Search
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule
from client.draft.sources.model import LocalSession, ModelSource
from swarm.base.ids import TreeNodeId
from swarm.compute.ragged_batch import RaggedModel
from swarm.protocol.messages import Credits, HopTime, Reply, Sampling, Sweep
from swarm.protocol.session import Limits, SessionState
from swarm.routing.costs import RouteForecast
from swarm.routing.route import Route
from swarm.routing.staircase import BucketSteps, padded_ms


class CountedDrafter(TreeDrafter):
    """A drafter one of whose sources is a model.

    Attributes:
        passes: Passes of the model for the last tree.
        rows: Rows that it ran for the last tree.
    """

    def __init__(self, drafter: TreeDrafter) -> None:
        super().__init__(drafter.sources)
        self._model = next(source for source in drafter.sources if isinstance(source, ModelSource))
        self.passes = self.rows = 0

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        self.passes = self.rows = 0
        return super().grow(sequence, nodes, depth, sampling, stop_rule)

    def _begin(self, search: Search) -> Passes[Search]:
        first = self._model.session.state.next_id
        begun = yield from super()._begin(search)
        self._ran(begun.rounds, first)
        return begun

    def _round(self, search: Search, nodes: Sequence[int]) -> Passes[bool]:
        first = self._model.session.state.next_id
        has_passed = yield from super()._round(search, nodes)
        self._ran(int(has_passed), first)
        return has_passed

    def _ran(self, passes: int, first: int) -> None:
        """The model ran, from that node of its session on."""
        self.passes += passes
        self.rows += max(self._model.session.state.next_id - first, 0)


T = TypeVar("T")
HOPS = 3
CLIENT = "client"
"""A program, as each hop's number is."""
ROW_BYTES = 768
"""Of the demo target's hidden rows in fp32: 192 values."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take. All times are milliseconds.

    Attributes:
        mbit: A link's rate, in Mbit/s.
        forward_ms: A hop's forward, without its rows.
        row_ms: Each row of a hop's forward.
        pass_ms: A pass of the draft's model.
        pass_row_ms: Each row of such a pass.
        grow_ms: Beside passes: each time that a tree grows.
        node_ms: Beside passes: each node that a tree has when it grows.
        turn_ms: Until the drafter has a request, and the loop its tree.
        learn_ms: What the drafter learns from a reply, before the next one is read.
        others: Sweeps of other clients, as large as this one, that a sweep waits behind, hop by hop.
        wait_ms: From a sweep's arrival at a hop to its forward, with nothing in the way.
        cores: Cores that all machines share; None where each machine has its own. One program computes on one core at a
            time.
        handling_ms: What machines compute for a sweep beside forwards and drafts, messages above all. It takes time of
            the shared cores; without shared cores it is part of the delays.
        handling_row_ms: What they compute for each further row. It is part of nothing else.
        other_ms: What each hop reports as the time of messages. It is part of `handling_ms` or of the delays.
        first_ms: What a hop's first forward of each size takes in addition, as on a GPU that loads kernels at first
            use. Sizes are powers of two of rows. One row has run before.
        paces: How many times as long as the mean hop each hop computes; there are so many hops.
        steps: Where rows are padded to buckets: milliseconds of a hop's forward by the rows of a bucket. They replace
            `forward_ms` and `row_ms`.
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
    steps: BucketSteps = ()

    def compute_ms(self, rows: int, hop: int = 0) -> float:
        if self.steps:
            return self.paces[hop] * padded_ms(self.steps, rows)
        return self.paces[hop] * (self.forward_ms + self.row_ms * rows)

    @property
    def hops(self) -> int:
        return len(self.paces)

    def plain_ms(self) -> float:
        """A sweep without a tree, with nobody else there."""
        forecast = self.forecast()
        return forecast.links_ms + forecast.compute_ms + forecast.link_row_ms

    def forecast(self) -> RouteForecast:
        """What routing forecasts for a chain of such machines."""
        links_ms, link_row_ms = (self.hops + 1) * self.delay_ms, (self.hops - 1) * self.transfer_ms(1)
        each_ms = [self.compute_ms(1, hop) for hop in range(self.hops)]
        row_ms, bottleneck_share = self.row_ms * sum(self.paces), max(self.paces) / sum(self.paces)
        return RouteForecast(
            *(links_ms, sum(each_ms), row_ms, link_row_ms),
            hops=self.hops,
            bottleneck_share=bottleneck_share,
            steps=tuple((rows, ms * sum(self.paces)) for rows, ms in self.steps),
        )

    def transfer_ms(self, rows: int) -> float:
        return rows * self.row_bytes * 8 / (self.mbit * 1e3)


class InlineExecutor(Executor):
    """Runs what it is given at once, in the caller's thread. Virtual time does not pass meanwhile."""

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:  # noqa: ANN401 - Executor's
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **options))
        except Exception as error:  # noqa: BLE001 - the future's business
            done.set_exception(error)
        return done


@dataclass(slots=True)
class SimulatedSweep:
    """A sweep on its way. Times are of the virtual clock.

    Attributes:
        arrived_ms: When it arrived at the hop where it is.
        times: What each hop reports so far.
    """

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
class SimulatedHop:
    """A hop: three things that each do one thing at a time.

    Attributes:
        link: Carries rows to the next hop.
    """

    program: FifoServer = field(default_factory=FifoServer)
    model: FifoServer = field(default_factory=FifoServer)
    link: FifoServer = field(default_factory=FifoServer)


NodePicks = tuple[tuple[TreeNodeId, int], ...]
"""What a tail picked after nodes."""


class Tail(Protocol):
    def picks(self, sweep: Sweep) -> NodePicks:
        """What is picked after the nodes of a sweep, each of which comes once."""
        ...


class RecordedTail:
    """A recorded text's picks; after what is not in it, token 0."""

    def __init__(self, recorded: RecordedText, credits: Credits) -> None:
        self._text = recorded.tokens
        self._state = SessionState(Limits(1 << 20, credits.window_tokens, credits.sweeps, credits.nodes))
        self._true: set[TreeNodeId | None] = {None}

    def picks(self, sweep: Sweep) -> NodePicks:
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

    def picks(self, sweep: Sweep) -> NodePicks:
        return tuple(answer(self._session, sweep).picks)


class VirtualChain:
    """Answers sweeps with a tail's picks, after the time that they would take."""

    def __init__(self, tail: Tail, costs: Costs, clock: Clock, credits: Credits) -> None:
        self.credits = credits
        self.first_link_ms = costs.delay_ms
        self._tail = tail
        self._costs = costs
        self._clock = clock
        self._flights: deque[SimulatedSweep] = deque()
        self._client, self._hops = FifoServer(), [SimulatedHop() for _ in range(costs.hops)]
        self._ran = {(hop, 0) for hop in range(costs.hops)}

    @property
    def hops(self) -> int:
        return self._costs.hops

    @property
    def route(self) -> Route:
        """There is none: nobody watches picks in virtual time."""
        raise NotImplementedError

    @property
    def route_key(self) -> Hashable:
        return "virtual"

    @property
    def has_answer(self) -> bool:
        """Whether a reply is there by now."""
        return bool(self._flights) and self._flights[0].is_back

    def send(self, sweep: Sweep) -> None:
        """Start a sweep: it computes when the one before it has left."""
        flight = SimulatedSweep(sweep.sequence, len(sweep.tokens), self._tail.picks(sweep), self._clock.now_ms)
        self._flights.append(flight)
        self._client.join(partial(self._handle, flight, CLIENT), partial(self._travel, flight, 0))

    async def answer(self) -> Answer:
        """The next reply; time passes until it is there."""
        flight = self._flights[0]
        self._clock.until(lambda: flight.is_back)
        self._flights.popleft()
        return Answer(Reply(flight.sequence, 0, flight.picks, tuple(flight.times)), flight.back_ms - flight.sent_ms)

    async def idle(self, max_ms: float) -> None:
        """Time passes until a reply is there, or so much of it."""
        over: list[bool] = []
        self._clock.after(max_ms, lambda: over.append(True))
        self._clock.until(lambda: bool(over) or self.has_answer)

    def _handle(self, flight: SimulatedSweep, program: Hashable, then: Then) -> None:
        """A machine's program reads and writes a sweep's messages."""
        self._clock.compute(self._handling_ms + self._further_ms(flight), then, program)

    def _travel(self, flight: SimulatedSweep, to: int) -> None:
        """To a hop, or back to the client; what the machine behind computed for messages is in the delay."""
        arrive = self._arrive if to < self._costs.hops else self._come_back
        self._clock.after(self._costs.delay_ms - self._handling_ms, partial(arrive, flight, to))

    def _arrive(self, flight: SimulatedSweep, hop: int) -> None:
        flight.arrived_ms = self._clock.now_ms
        self._hops[hop].program.join(partial(self._handle, flight, hop), partial(self._heard, flight, hop))

    def _heard(self, flight: SimulatedSweep, hop: int) -> None:
        work, then = partial(self._forward, flight, hop), partial(self._leave, flight, hop)
        self._clock.after(self._costs.wait_ms, partial(self._hops[hop].model.join, work, then))

    def _forward(self, flight: SimulatedSweep, hop: int, then: Then) -> None:
        compute_ms, size = self._costs.compute_ms(flight.rows, hop), (hop, (flight.rows - 1).bit_length())
        if size not in self._ran:
            self._ran.add(size)
            compute_ms += self._costs.first_ms
        flight.compute_ms = compute_ms

        def begin() -> None:
            flight.started_ms = self._clock.now_ms
            self._clock.compute(compute_ms, then, hop)

        self._clock.after(compute_ms * self._costs.others[hop], begin)

    def _leave(self, flight: SimulatedSweep, hop: int) -> None:
        """A hop is done: it says what that took, and its link takes the rows."""
        now_ms = self._clock.now_ms
        waited_ms = flight.started_ms - flight.arrived_ms - self._handling_ms - self._further_ms(flight)
        took_ms = now_ms - flight.started_ms
        lost_ms = max(took_ms - flight.compute_ms, 0.0) if self._clock.cores else 0.0  # waiting, say nodes on CPUs
        times = HopTime(waited_ms + lost_ms, took_ms - lost_ms, self._costs.other_ms, self._costs.delay_ms)
        flight.times.append(times)
        bytes_ms = self._costs.transfer_ms(flight.rows) if hop < self._costs.hops - 1 else 0.0
        self._hops[hop].link.join(partial(self._clock.after, bytes_ms), partial(self._travel, flight, hop + 1))

    def _come_back(self, flight: SimulatedSweep, _: int) -> None:
        flight.is_back, flight.back_ms = True, self._clock.now_ms

    @property
    def _handling_ms(self) -> float:
        return self._costs.handling_ms / (self._costs.hops + 1)

    def _further_ms(self, flight: SimulatedSweep) -> float:
        """What a machine computes for rows after the first, beside forwards."""
        return self._costs.handling_row_ms / (self._costs.hops + 1) * (flight.rows - 1)


class RecordedDrafter:
    """Grows recorded trees; what the model would have run takes time."""

    def __init__(self, recorded: RecordedText, costs: Costs, clock: Clock) -> None:
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
    """A real drafter. What its model ran takes virtual time, and nothing else does."""

    def __init__(self, drafter: TreeDrafter, costs: Costs, clock: Clock) -> None:
        super().__init__(drafter)
        self._costs = costs
        self._clock = clock

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        tree, costs = super().grow(sequence, nodes, depth, sampling, stop_rule), self._costs
        self._clock.take(costs.grow_ms + costs.node_ms * len(tree), CLIENT)
        self._clock.wait(costs.turn_ms)
        return tree

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        super().learn(tree, picks, others)
        self._clock.take(self._costs.learn_ms, CLIENT)

    def _ran(self, passes: int, first: int) -> None:
        before = self.rows
        super()._ran(passes, first)
        self._clock.take(self._costs.pass_ms * passes + self._costs.pass_row_ms * (self.rows - before), CLIENT)
