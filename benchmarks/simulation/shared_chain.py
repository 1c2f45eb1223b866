"""Many clients on one chain in virtual time: real decode loops, real logs of sessions, a node's real scheduler.

Only what takes time is not real: forwards, links and drafts last as long as `Costs` says, and picks and trees are
recorded ones. Each client drafts on a machine of its own, and each hop computes on one of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

from benchmarks.simulation.chain import HOPS, Costs, RecordedDrafter, RecordedTail
from benchmarks.simulation.recorded import RecordedText
from client.chain.answers import Answer
from client.decode.loop import Generation
from client.decode.policy import SWEEPS_IN_FLIGHT, SpeculationPolicy
from client.decode.state import GenerationState
from client.decode.text_stream import TextStream
from client.decode.walk import Walk
from client.draft.drafter import NoDrafter
from client.library.jobs import MAX_NODES, PREFILL_CHUNK
from node.session.admission import CARRIED, PAID_BY, OwnerStanding, standing_of
from node.session.scheduler import Batch, Engine, PendingWork, Schedulable
from node.session.step_cost import StepCost
from node.session.sweep_run import SweepRun
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.compute.compute_thread import ComputeThread
from swarm.protocol.hop_log import HopLog, SweepWork
from swarm.protocol.messages import Credits, HopTime, Reply, Sweep, SweepFrame
from swarm.protocol.session import Limits
from swarm.routing.route import Route

T = TypeVar("T")
IN_ORDER_S = 1e-8
"""Between two messages of one link: timers that are due at one moment come in any order."""
WINDOW = 64
"""Tokens of a session's window beyond its text."""


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """What things take on a chain that many share, in milliseconds.

    Attributes:
        chain: what they take for one.
        session_ms: each further session in a forward.
        key_ms: each token that a row attends to.
    """

    chain: Costs
    session_ms: float = 0.3
    key_ms: float = 3e-6

    def forward_ms(self, runs: Sequence[tuple[int, int]]) -> float:
        """A forward of (rows, tokens that each attends to), session by session."""
        runs = [run for run in runs if run[0]]
        if not runs:
            return 0.0
        keys = sum(rows * context for rows, context in runs)
        return (
            self.chain.compute_ms(sum(rows for rows, _ in runs))
            + self.session_ms * (len(runs) - 1)
            + keys * self.key_ms
        )


@dataclass(eq=False, slots=True)
class VirtualRun:
    """A sweep at a hop; stands for a `SweepRun`."""

    work: SweepWork
    context: int
    remaining: int
    compute_ms: float = 0.0
    encode_ms: float = 0.0

    @property
    def is_done(self) -> bool:
        return not self.remaining


class VirtualCompute:
    """A hop's compute thread: a batch takes virtual time."""

    def __init__(self, costs: SharedCosts) -> None:
        self._costs = costs

    async def run(self, _: object, batch: Batch[Schedulable]) -> tuple[dict[SweepRun, Exception], float]:
        runs = [(cast("VirtualRun", member.run), member.rows) for member in batch.members]
        took_ms = self._costs.forward_ms([(rows, run.context) for run, rows in runs])
        await asyncio.sleep(took_ms / 1e3)
        for run, rows in runs:
            run.remaining -= rows
        return {}, took_ms


@dataclass(eq=False, slots=True)
class Flight:
    """A sweep on its way.

    Attributes:
        times: what hops report so far.
        kept: whether each of its nodes was run by the hop before.
    """

    sweep: Sweep
    picks: tuple[tuple[TreeNodeId, int], ...]
    sent_s: float
    times: list[HopTime] = field(default_factory=list)
    kept: tuple[bool, ...] | None = None


class VirtualSession:
    """One session at one hop, as its engine sees it."""

    def __init__(self, hop: SharedHop, owner: str, limits: Limits, leave: Callable[[Flight, int], None]) -> None:
        self.owner = owner
        self.log = HopLog(limits)
        self._hop, self._leave = hop, leave
        self._flights: dict[int, tuple[Flight, float]] = {}
        self._running: VirtualRun | None = None

    def arrive(self, flight: Flight) -> None:
        self._flights[flight.sweep.sequence] = flight, asyncio.get_running_loop().time()
        self.log.receive(SweepFrame(flight.sweep, flight.kept))
        self._hop.engine.submit(self)

    def pending(self) -> PendingWork | None:
        rows = self.log.next_rows if self._running is None else self._running.remaining
        return None if rows is None else PendingWork(self._hop.span, rows, len(self.log.executed.committed))

    def next_run(self) -> SweepRun | None:
        if self._running is None:
            work = self.log.next_work()
            if work is not None:
                self._running = VirtualRun(work, len(self.log.executed.committed), len(work.run))
        return cast("SweepRun | None", self._running)

    def finish(self, run: SweepRun) -> None:
        work, self._running = run.work, None
        flight, arrived_s = self._flights.pop(work.frame.sweep.sequence)
        stayed_ms = (asyncio.get_running_loop().time() - arrived_s) * 1e3
        flight.times.append(HopTime(max(stayed_ms - run.compute_ms, 0.0), run.compute_ms, 0.0, self._hop.delay_ms))
        ran = set(work.run)
        flight.kept = tuple(offset in ran for offset in range(len(work.frame.sweep.tokens)))
        self._leave(flight, len(ran))

    def fail(self, error: Exception, run: SweepRun | None = None) -> None:
        raise AssertionError("a virtual sweep cannot fail") from error


class SharedHop:
    """A machine: the engine of a node, and one link to the next."""

    def __init__(self, costs: SharedCosts, place: int, standing: Callable[[str], OwnerStanding] = standing_of) -> None:
        chain = costs.chain
        cost = StepCost(chain.forward_ms, chain.row_ms)
        self.engine = Engine(cost, cast("ComputeThread", VirtualCompute(costs)), standing=standing)
        self.span = Span(place, place + 1)
        self.delay_ms = chain.delay_ms
        self._chain = chain
        self._is_last = place == HOPS - 1
        self._link_free_s = 0.0

    def travel(self, rows: int, arrive: Callable[[], None]) -> None:
        """Send rows to the next machine, behind what its link carries already."""
        loop = asyncio.get_running_loop()
        bytes_ms = 0.0 if self._is_last else self._chain.transfer_ms(rows)
        self._link_free_s = max(self._link_free_s, loop.time()) + bytes_ms / 1e3 + IN_ORDER_S
        loop.call_at(self._link_free_s + self.delay_ms / 1e3, arrive)


class SharedChain:
    """One client's session on a chain that others use too; what the decode loop needs of a chain."""

    def __init__(self, hops: Sequence[SharedHop], recorded: RecordedText, owner: str) -> None:
        window = len(recorded.tokens) + WINDOW
        self.credits = Credits(window, SWEEPS_IN_FLIGHT, MAX_NODES + 3 * PREFILL_CHUNK)
        self.first_link_ms = hops[0].delay_ms
        limits = Limits(1 << 20, window, self.credits.sweeps, self.credits.nodes)
        self._tail = RecordedTail(recorded, self.credits)
        self._hops = hops
        whose = standing_of(owner).network or owner
        owners = [owner, *[f"{CARRIED}10.0.0.{place} {PAID_BY}{whose}" for place in range(1, len(hops))]]
        self._sessions = [
            VirtualSession(hop, owned_by, limits, self._leaving(place))
            for place, (hop, owned_by) in enumerate(zip(hops, owners, strict=True))
        ]
        self._back: deque[tuple[Flight, float]] = deque()
        self._came = asyncio.Event()
        self._sent_s = 0.0

    @property
    def hops(self) -> int:
        return len(self._hops)

    @property
    def route(self) -> Route:
        """There is none: nobody watches picks in virtual time."""
        raise NotImplementedError

    @property
    def route_key(self) -> Hashable:
        return "shared"

    @property
    def has_answer(self) -> bool:
        return bool(self._back)

    def send(self, sweep: Sweep) -> None:
        loop = asyncio.get_running_loop()
        flight = Flight(sweep, self._tail.picks(sweep), loop.time())
        self._sent_s = max(self._sent_s, loop.time()) + IN_ORDER_S
        loop.call_at(self._sent_s + self.first_link_ms / 1e3, self._sessions[0].arrive, flight)

    async def answer(self) -> Answer:
        while not self._back:
            self._came.clear()
            await self._came.wait()
        flight, back_s = self._back.popleft()
        ran = {flight.sweep.first_id + place for place, kept in enumerate(flight.kept or ()) if kept}
        picks = tuple((node, token) for node, token in flight.picks if node in ran)
        return Answer(Reply(flight.sweep.sequence, 0, picks, tuple(flight.times)), (back_s - flight.sent_s) * 1e3)

    async def idle(self, max_ms: float, /) -> None:
        if not self._back:
            self._came.clear()
            try:
                async with asyncio.timeout(max_ms / 1e3):
                    await self._came.wait()
            except TimeoutError:
                pass

    def _leaving(self, place: int) -> Callable[[Flight, int], None]:
        def leave(flight: Flight, rows: int) -> None:
            if place + 1 < len(self._sessions):
                self._hops[place].travel(rows, lambda: self._sessions[place + 1].arrive(flight))
            else:
                self._hops[place].travel(rows, lambda: self._come_back(flight))

        return leave

    def _come_back(self, flight: Flight) -> None:
        self._back.append((flight, asyncio.get_running_loop().time()))
        self._came.set()


class LateDrafts(Executor):
    """A drafting thread: what runs on it takes virtual time of its own client alone. Also the clock that drafts move.

    Attributes:
        running_ms: what the work in hand took so far.
    """

    def __init__(self) -> None:
        self.running_ms = 0.0

    def take(self, took_ms: float, program: Hashable = None) -> None:
        self.running_ms += took_ms

    def wait(self, wait_ms: float) -> None:
        self.running_ms += wait_ms

    def seconds(self) -> float:
        """The client's clock, which work on this thread sees move."""
        return asyncio.get_running_loop().time() + self.running_ms / 1e3

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:  # noqa: ANN401 - Executor's
        done: Future[T] = Future()
        self.running_ms = 0.0
        result = work(*args, **options)
        took_s, self.running_ms = self.running_ms / 1e3, 0.0

        def end() -> None:
            if not done.cancelled():
                done.set_result(result)

        asyncio.get_running_loop().call_later(took_s, end)
        return done


@dataclass(slots=True)
class VirtualClient:
    """One client, which makes recorded texts one after another.

    Attributes:
        came: (second, tokens that became certain then).
        first_s: how long each text's first token took.
        texts_told: texts that are done.
    """

    hops: Sequence[SharedHop]
    costs: SharedCosts
    texts: Sequence[RecordedText]
    policy: SpeculationPolicy
    tokenizer: object
    owner: str
    drafts: bool = True
    came: list[tuple[float, int]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    texts_told: int = 0

    async def tell_on(self) -> None:
        """Text after text, until it is left."""
        while True:
            await self.tell(self.texts[self.texts_told % len(self.texts)])

    async def tell(self, recorded: RecordedText) -> None:
        """One text, which must be the recorded one.

        Raises:
            AssertionError: it is another.
        """
        chain, drafting = SharedChain(self.hops, recorded, self.owner), LateDrafts()
        new = len(recorded.tokens) - len(recorded.prompt)
        text = TextStream(self.tokenizer, recorded.prompt, max_new_tokens=new)  # type: ignore[arg-type]
        drafter = RecordedDrafter(recorded, self.costs.chain, drafting) if self.drafts else NoDrafter()  # type: ignore[arg-type]
        job = GenerationState(
            *(recorded.prompt, recorded.sampling, self.policy, PREFILL_CHUNK, new, text, drafter, drafting),
            clock=drafting.seconds,
        )
        self.policy.expect(chain.route_key, self.costs.chain.forecast())
        limits = Limits(1 << 20, chain.credits.window_tokens, chain.credits.sweeps, chain.credits.nodes)
        loop, told = asyncio.get_running_loop(), 0
        began_s = loop.time()
        async for _ in Generation(job, chain, Walk(limits, recorded.sampling)).run():
            if len(text.tokens) > told:
                if not told:
                    self.first_s.append(loop.time() - began_s)
                self.came.append((loop.time(), len(text.tokens) - told))
                told = len(text.tokens)
        assert tuple(text.tokens) == recorded.tokens[len(recorded.prompt) :], "another text"
        self.texts_told += 1

    def tokens_within(self, begin_s: float, end_s: float) -> int:
        """Tokens that became certain in that time."""
        return sum(count for at_s, count in self.came if begin_s <= at_s < end_s)

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """From one arrival of tokens to the next, in that time."""
        times = [at_s for at_s, _ in self.came if begin_s <= at_s < end_s]
        return [(later - earlier) * 1e3 for earlier, later in pairwise(times)]


@asynccontextmanager
async def shared_hops(
    costs: SharedCosts, standing: Callable[[str], OwnerStanding] = standing_of
) -> AsyncIterator[list[SharedHop]]:
    """The machines of a chain, whose engines run."""
    hops = [SharedHop(costs, place, standing) for place in range(HOPS)]
    async with TaskScope() as scope:
        running = [scope.spawn(hop.engine.run()) for hop in hops]
        yield hops
        for task in running:
            task.cancel()


def with_prompt(recorded: RecordedText, prompt_tokens: int, new_tokens: int) -> RecordedText:
    """A text behind a prompt of so many tokens, without trees."""
    prompt = tuple((recorded.prompt * (prompt_tokens // len(recorded.prompt) + 1))[:prompt_tokens])
    return replace(recorded, prompt=prompt, tokens=(*prompt, *recorded.tokens[-new_tokens:]), trees={}, looked_up={})
