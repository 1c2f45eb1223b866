"""Machines that die or hang while a text is made, as real processes: the text is the undisturbed one, token for token.

One swarm for all: two holders per span. Who is stopped goes on afterwards; who is killed stays dead, so that each kill
strikes another span, and the last test starts one of them again. All strikes and phases: `python -m
benchmarks.recovery.faults`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

import client.library.jobs
from benchmarks.emulation.swarm import covered
from benchmarks.simulation.acceptance import demo_prompts
from client import AsyncSwarm, Result
from client.base.options import GenerateOptions
from client.chain.chain import Chain
from client.tools.demo.delay_proxy import free_ports
from swarm.demo import DRAFT, TARGET
from swarm.protocol.limits import BLOCK_TOKENS
from swarm.protocol.messages import Ready, Sweep
from swarm.routing import route as routing
from swarm.routing.costs import Candidate, CostTable, RouteQuery, tabulate
from tests.e2e.programs import Program, bootstrap, info, program, serve, within

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SPANS = ("0-4", "4-8", "8-12")
OPTIONS: GenerateOptions = {"max_new_tokens": 28, "nodes": 8}
GREEDY: GenerateOptions = {**OPTIONS, "temperature": 0.0}
SAMPLED: GenerateOptions = {**OPTIONS, "temperature": 1.0, "seed": 3}
PREFILL_SWEEPS = 6


@dataclass(slots=True)
class Machine:
    """One node's process, started with `command`."""

    command: list[str]
    program: Program
    address: str = ""
    peer: str = ""

    @property
    def span(self) -> str:
        return self.command[self.command.index("--layers") + 1]

    def wait(self) -> None:
        """Until it is listed."""
        _, _, self.address, _, self.peer = self.program.wait_for(r"serving at \S+ as \S+").split()

    def signal(self, number: int) -> None:
        """Send a signal to its process."""
        self.program.process.send_signal(number)

    @contextmanager
    def started_again(self, log: Path) -> Iterator[None]:
        """The same command, so the same identity, layers and port."""
        self.program.process.wait()
        with program(self.command, log) as self.program:
            self.wait()
            yield


@dataclass(slots=True)
class Machines:
    """The swarm and a client in this process. It strikes when a sweep with a certain number is sent."""

    all: list[Machine]
    swarm: AsyncSwarm
    victims: list[Machine]

    def of(self, peer: str) -> Machine:
        return next(one for one in self.all if one.peer == peer)

    @contextmanager
    def strike(self, position: int, number: int, at: int) -> Iterator[None]:
        """Send a signal to the hop at this position when sweep `at` of the next text leaves."""
        send = Chain.send
        self.victims.clear()

        def striking(chain: Chain, sweep: Sweep) -> None:
            send(chain, sweep)
            if sweep.sequence == at and not self.victims:
                self.victims.append(self.of(chain.route.hops[position].peer))
                self.victims[0].signal(number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Chain, "send", striking)
            yield

    def grown(self, before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """By node: snapshots taken and given since `before`, of those that live and did."""
        now = self.paths()
        return {
            peer: (restores - before[peer][0], replays - before[peer][1])
            for peer, (restores, replays) in now.items()
            if (restores, replays) != before[peer]
        }

    def paths(self) -> dict[str, tuple[int, int]]:
        """By node: snapshots taken and given since it started."""
        living = [one for one in self.all if one.program.process.poll() is None]
        found = {one.peer: info(one.address).counters for one in living}
        return {peer: (count.restores, count.replays) for peer, count in found.items()}

    def are_free(self) -> bool:
        """Whether all who live hold nothing in time."""

        def free() -> bool:
            asked = [info(one.address) for one in self.all if one.program.process.poll() is None]
            return all(one.sessions == 0 and one.kv_tokens_free == one.kv_tokens_total for one in asked)

        return within(15, free)


def tabulate_evenly(candidates: Sequence[Candidate], query: RouteQuery) -> CostTable:
    """CostTable as if all were equally far: on one busy machine delays are chance, and a hop more would seem to pay."""
    near = [one._replace(record=replace(one.record, delays_ms=())) for one in candidates]
    return tabulate(near, replace(query, delays_ms={}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machines]:
    """Two holders per span, a warm client."""
    torch.set_num_threads(1)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "tabulate", tabulate_evenly)
        peer = stack.enter_context(bootstrap(tmp_path_factory.mktemp("bootstrap")))
        found = []
        ports = iter(free_ports(2 * len(SPANS)))
        for holder in "ab":
            folder = tmp_path_factory.mktemp(holder)
            for span in SPANS:
                command = [*serve(TARGET, span, peer, folder), "--port", str(next(ports))]
                running = stack.enter_context(program(command, folder / f"{span}.log"))
                found.append(Machine(command, running))
            for machine in found[-len(SPANS) :]:  # not all at once: each takes seconds of CPU
                machine.wait()
        async with AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, calibration=None, audit=0.0) as swarm:
            await covered(swarm)
            await swarm.generate("It", max_new_tokens=3, nodes=1)
            yield Machines(found, swarm, [])


@pytest.fixture
def ids() -> list[int]:
    """A prompt of several sweeps."""
    return demo_prompts(1)[0][: BLOCK_TOKENS - 1]  # less than machines keep


@pytest.fixture(autouse=True)
def short_chunks(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.library.jobs, "PREFILL_CHUNK", -(-(len(ids) - 1) // PREFILL_SWEEPS))


def check_path(machines: Machines, result: Result, grown: dict[str, tuple[int, int]], position: int) -> None:
    """One repair: nobody but the victim's replacement was given a snapshot, and by nobody but its predecessor."""
    (repair,) = result.stats.repairs
    (victim,) = machines.victims
    assert repair.replaced == (victim.peer,)
    assert not repair.is_move
    replacement = next(one for one in machines.all if one.span == victim.span and one is not victim)
    assert grown[replacement.peer][0] == 1
    assert sum(restores for restores, _ in grown.values()) == 1
    assert sum(replays for _, replays in grown.values()) == (position > 0), "the client gives to the first hop"


# Hanging: nothing breaks, it is only silent; afterwards it goes on and still believes in its session


@pytest.mark.crossing(part=(1, 3))
@pytest.mark.parametrize(
    ("position", "at", "options"),
    [(1, 3, SAMPLED), (2, PREFILL_SWEEPS + 3, GREEDY), (0, PREFILL_SWEEPS + 2, SAMPLED)],
    ids=["middle in prefill", "tail", "first"],
)
async def test_a_machine_that_hangs(
    position: int, at: int, options: GenerateOptions, machines: Machines, ids: list[int]
) -> None:
    plain = await machines.swarm.generate(ids, **options)
    assert plain.stats.prefill_sweeps == PREFILL_SWEEPS
    before = machines.paths()
    with machines.strike(position, signal.SIGSTOP, at):
        try:
            result = await machines.swarm.generate(ids, **options)
        finally:
            machines.victims[0].signal(signal.SIGCONT)
    assert result.tokens == plain.tokens
    assert await asyncio.to_thread(machines.are_free)
    if at > PREFILL_SWEEPS:  # in the prompt, the hops behind may have had nothing yet
        check_path(machines, result, machines.grown(before), position)


async def test_a_machine_that_wakes_up_does_no_harm(
    machines: Machines, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for dead and replaced, it computes what it had received and sends it on, while the text goes on."""
    plain = await machines.swarm.generate(ids, **SAMPLED)
    hear, woken = Chain.on_ready, 0

    def waking(chain: Chain, ready: Ready) -> None:
        nonlocal woken
        if ready.generation and not woken:
            woken += 1
            machines.victims[0].signal(signal.SIGCONT)
        hear(chain, ready)

    monkeypatch.setattr(Chain, "on_ready", waking)
    with machines.strike(1, signal.SIGSTOP, PREFILL_SWEEPS + 2):
        result = await machines.swarm.generate(ids, **SAMPLED)
    assert woken
    assert result.tokens == plain.tokens
    assert await asyncio.to_thread(machines.are_free)


# Dying


@pytest.mark.crossing(part=(0, 3))
@pytest.mark.parametrize(("position", "options"), [(0, GREEDY), (1, SAMPLED), (2, SAMPLED)])
async def test_a_machine_that_is_killed(
    position: int, options: GenerateOptions, machines: Machines, ids: list[int]
) -> None:
    plain = await machines.swarm.generate(ids, **options)
    before = machines.paths()
    with machines.strike(position, signal.SIGKILL, PREFILL_SWEEPS + 3):
        result = await machines.swarm.generate(ids, **options)
    assert result.tokens == plain.tokens
    assert await asyncio.to_thread(machines.are_free)
    check_path(machines, result, machines.grown(before), position)


async def test_a_machine_that_was_killed_comes_back_as_itself(
    machines: Machines, ids: list[int], tmp_path: Path
) -> None:
    """And takes the place of the one that had taken its."""
    holders = [one for one in machines.all if one.span == "4-8"]
    dead = next((one for one in holders if one.program.process.poll() is not None), holders[0])
    dead.program.process.kill()  # nothing, where a test before this one did
    peer = dead.peer
    plain = await machines.swarm.generate(ids, **SAMPLED)
    with dead.started_again(tmp_path / "again.log"):
        assert dead.peer == peer
        hops = (await machines.swarm.generate(ids, **SAMPLED)).stats.hops
        with machines.strike(1, signal.SIGSTOP, PREFILL_SWEEPS + 3):
            try:
                result = await machines.swarm.generate(ids, **SAMPLED)
            finally:
                machines.victims[0].signal(signal.SIGCONT)
        assert result.tokens == plain.tokens
        assert len(result.stats.repairs) == 1
        assert {hops[1], result.stats.hops[1]} == {f"{one.peer[-8:]} 4-8" for one in holders}
