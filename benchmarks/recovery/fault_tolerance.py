"""How fast is decoding when hops lose sessions at random, beside restarting and no cache?

The form of the fault-tolerance table of "Distributed Inference and Fine-tuning of Large Language Models Over The
Internet" (arXiv 2312.08361): a failure is a hop that loses all it holds of the session, and lives on. Nodes and the
client share this process; all they say to each other goes over sockets. One step is one sweep of plain decoding.

    restart      the session is opened again and the text begins again from its prompt
    cache-less   every step sends the whole sequence and nothing is kept; a failed step is sent again
    Canopy       the chain is repaired: the hop is attached again and replayed

    python -m benchmarks fault_tolerance --record
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.emulation.swarm import SPANS
from benchmarks.recovery.failure_injection import FailingChain, FailureInjector, nodes_here
from benchmarks.sheet import Sheet
from benchmarks.simulation.acceptance import demo_prompts
from client.chain.chain import Chain, ChainOwner
from client.chain.opening import open_chain
from client.control.policy import SWEEPS_IN_FLIGHT
from client.decode.loop import PREFILLS_IN_FLIGHT, Generation
from client.decode.state import GenerationState
from client.decode.walk import Walk
from client.drafting.drafter import Drafters, NoDrafter
from client.library.jobs import PREFILL_CHUNK, GenerationFactory
from client.library.session import SessionOpener
from client.options import Options as TextOptions
from client.target import load_target
from node.serve import Node
from swarm.demo import TARGET
from swarm.discovery.memory_registry import MemoryNetwork, MemoryRegistry
from swarm.discovery.signed_faults import is_signed
from swarm.errors import RouteError, SwarmError
from swarm.ids import TreeNodeId
from swarm.inference.row_codec import lossless_codec
from swarm.protocol.messages import Open, RouteHop, Sampling, Sweep
from swarm.protocol.session import Limits, SessionState
from swarm.routing.route import Route
from swarm.runtime.console import make_console
from swarm.runtime.library_logging import quiet_libraries
from swarm.transport.dial import Dialer

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Options:
    """Compare methods to outlive failures."""

    chances: tuple[float, ...] = (0.0, 1e-4, 1e-3, 1e-2)
    """For each hop, in each step, to lose its sessions."""
    prompt_tokens: int = 64
    """Tokens of the prompt."""
    new_tokens: int = 128
    """New tokens of each text."""
    repeats: int = 9
    """Texts of each cell."""
    limit_s: float = 60.0
    """A text that takes longer is given up; its steps count for nothing, its time does."""
    delay_ms: float = 0.0
    """One way, on each link."""
    seed: int = 0
    """Of all that is random."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(frozen=True, slots=True)
class Run:
    """One text.

    Attributes:
        way: By which method.
        chance: Probability of a loss, per hop and step.
        tokens: Its tokens; none if it was given up.
        seconds: Wall-clock time.
        steps: Sweeps that were sent for it.
        losses: Losses that it met.
    """

    way: str
    chance: float
    tokens: tuple[int, ...]
    seconds: float
    steps: int
    losses: int

    @property
    def tokens_per_s(self) -> float:
        """Of useful steps."""
        return len(self.tokens) / self.seconds


async def no_detour(avoid: Collection[str], keep: Sequence[RouteHop], *, within_s: float = 0.0) -> Route:
    """Nobody repairs this chain."""
    raise RouteError("the chain is broken", [])


class RecoveryMethods:
    """Three methods to generate the same text."""

    def __init__(self, opener: SessionOpener, drafting: ThreadPoolExecutor) -> None:
        self._opener = opener
        self._jobs = GenerationFactory(opener.target, Drafters(NoDrafter()), drafting, 0)

    async def canopy(self, prompt: tuple[int, ...], new_tokens: int, failures: FailureInjector) -> list[int]:
        """One session, repaired."""
        job = self._job(prompt, new_tokens)
        async with self._opener.open(len(prompt) + new_tokens, 0) as session:
            await _run(job, FailingChain(session.chain, failures), session.walk)
        return job.text.tokens

    async def restart(self, prompt: tuple[int, ...], new_tokens: int, failures: FailureInjector) -> list[int]:
        """Session after session, until one lasts."""
        while True:
            job = self._job(prompt, new_tokens)
            try:
                async with self._fragile(len(prompt) + new_tokens) as chain:
                    walk = Walk(_limits(self._opener, chain), GREEDY)
                    chain.begin(walk.state)
                    await _run(job, FailingChain(chain, failures), walk)
                return job.text.tokens
            except SwarmError:
                continue

    async def cache_less(self, prompt: tuple[int, ...], new_tokens: int, failures: FailureInjector) -> list[int]:
        """Every step cuts off all that the hops hold and sends the whole sequence."""
        made: list[int] = []
        while len(made) < new_tokens:
            try:
                async with self._fragile(len(prompt) + new_tokens) as chain:
                    state = SessionState(_limits(self._opener, chain))
                    chain.begin(state)
                    failing = FailingChain(chain, failures)
                    while len(made) < new_tokens:
                        sweep = whole_sweep((*prompt, *made), state)
                        state.apply(sweep)
                        failing.send(sweep)
                        reply = (await failing.answer()).reply
                        made.append(reply.picks[-1][1])
            except SwarmError:
                continue
        return made

    def _job(self, prompt: tuple[int, ...], new_tokens: int) -> GenerationState:
        return self._jobs.make(prompt, TextOptions(max_new_tokens=new_tokens, seed=0, nodes=0))

    @asynccontextmanager
    async def _fragile(self, window_tokens: int) -> AsyncIterator[Chain]:
        """A chain that ends with its first failure."""
        route = await self._opener.route()
        codec = lossless_codec(torch.float32)
        nodes = (PREFILLS_IN_FLIGHT + 1) * min(PREFILL_CHUNK, window_tokens)
        want = Open(self._opener.identity.fingerprint, window_tokens, SWEEPS_IN_FLIGHT, nodes, codec)
        owner = ChainOwner(no_detour, lambda error: None, lambda rows: None, is_signed)
        async with open_chain(Chain(self._opener.dialer, route, want, owner, wait_s=0.0)) as chain:
            yield chain


def _limits(opener: SessionOpener, chain: Chain) -> Limits:
    credits = chain.credits
    return Limits(opener.target.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)


async def _run(job: GenerationState, chain: FailingChain, walk: Walk) -> None:
    async for _ in Generation(job, chain, walk).run():
        pass


def whole_sweep(sequence: tuple[int, ...], state: SessionState) -> Sweep:
    """The sweep that forgets everything and brings a whole sequence, of which only the last token's pick is wanted."""
    first = state.next_id
    return Sweep(
        sequence=state.sequence + 1,
        committed=0,
        first_id=first,
        tokens=sequence,
        parents=(None, *(TreeNodeId(first + offset) for offset in range(len(sequence) - 1))),
        picks_from=TreeNodeId(first + len(sequence) - 1),
        generation=0,
        acked=state.sequence,
        truncate_to=0 if state.sequence else None,
        commit_to=None,
        sampling=None if state.sequence else GREEDY,
    )


Generate = Callable[[tuple[int, ...], int, FailureInjector], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class ToleranceBench:
    """What the runs share.

    Attributes:
        nodes: The nodes, by peer id.
        prompt: Tokens of the prompt.
        options: Of the program.
    """

    nodes: dict[str, Node]
    prompt: tuple[int, ...]
    options: Options

    async def run(self, name: str, generate: Generate, chance: float, number: int) -> Run:
        """One text by one method. Repeats of one number have the same losses by all methods."""
        options = self.options
        failures = FailureInjector(self.nodes, chance, random.Random(f"{options.seed}/{chance}/{number}"))
        started, tokens = time.perf_counter(), []
        try:
            async with asyncio.timeout(options.limit_s):
                tokens = await generate(self.prompt, options.new_tokens, failures)
        except TimeoutError:
            pass
        seconds = time.perf_counter() - started
        return Run(name, chance, tuple(tokens), seconds, failures.steps, failures.losses)


async def measure(options: Options, console: Console) -> list[Run]:
    """All methods at all probabilities, side by side."""
    prompt = tuple(demo_prompts(1, tokens=options.prompt_tokens)[0])
    with tempfile.TemporaryDirectory(prefix="canopy-faults-") as temporary, ThreadPoolExecutor(1) as drafting:
        async with nodes_here(Path(temporary), SPANS, options.delay_ms) as (network, nodes), Dialer() as dialer:
            methods = RecoveryMethods(await _opener(network, nodes[0], dialer), drafting)
            bench = ToleranceBench({node.peer_id: node for node in nodes}, prompt, options)
            all_methods = {"restart": methods.restart, "cache-less": methods.cache_less, "Canopy": methods.canopy}
            for name, generate in all_methods.items():
                await bench.run(name, generate, 0.0, 0)  # warm
            rounds = [(number, chance) for number in range(options.repeats) for chance in options.chances]
            return [
                await bench.run(name, generate, chance, number)
                for number, chance in track(rounds, "rounds", console=console)
                for name, generate in all_methods.items()
            ]


async def _opener(network: MemoryNetwork, node: Node, dialer: Dialer) -> SessionOpener:
    target = replace(await asyncio.to_thread(load_target, TARGET), eos_ids=frozenset())
    return SessionOpener(target, node.identity, MemoryRegistry(network), dialer, (), 0)


def sheet(runs: Sequence[Run], options: Options) -> Sheet:
    """The table."""
    made = Sheet(
        "fault_tolerance",
        f"Steps (tokens) per second, {options.new_tokens} tokens after {options.prompt_tokens}, plain decoding, "
        f"{len(SPANS)} hops, {options.delay_ms:g} ms one way; {options.repeats} texts each",
        ("each hop loses its sessions, probability per step", *(f"{chance:g}" for chance in options.chances)),
        measured={"runs": [{**asdict(run), "tokens_per_s": run.tokens_per_s} for run in runs]},
    )
    for way in dict.fromkeys(run.way for run in runs):
        cells = []
        for chance in options.chances:
            some = [run for run in runs if (run.way, run.chance) == (way, chance)]
            cells.append(_cell(some))
        made.rows.append((way, *cells))
    given_up, same = sum(not run.tokens for run in runs), "yes" if is_same(runs) else "NO"
    made.notes = [
        "All tokens over all time, a session's opening and its prompt included (median over the texts; failures met).",
        f"Longer than {options.limit_s:g} s, and given up: {given_up} of {len(runs)} texts. Same text always: {same}.",
    ]
    return made


def is_same(runs: Sequence[Run]) -> bool:
    """Whether all texts that were finished are one and the same."""
    return len({run.tokens for run in runs if run.tokens}) == 1


def _cell(runs: Sequence[Run]) -> str:
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    speeds = f"{tokens / seconds:.2f} ({median(run.tokens_per_s for run in runs):.2f}" if tokens else "– (–"
    return f"{speeds}; {sum(run.losses for run in runs)})"


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    console = make_console()
    runs = asyncio.run(measure(options, console))
    sheet(runs, options).finish(console, record=options.record, path=options.json)
    sys.exit(not is_same(runs))


if __name__ == "__main__":
    main()
