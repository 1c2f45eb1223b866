"""`client demo`: streams a text from a swarm on this machine, then compares speculation with plain decoding.

The streamed text is the client's first one: it learns what sweeps cost on this swarm while it chooses tree sizes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from client.base.options import check_text
from client.base.stats import Result
from client.tools.demo.swarm import SPANS, demo_swarm, wait_covered
from swarm.base.cli import make_console
from swarm.base.errors import ConfigError
from swarm.demo import DRAFT, TARGET

if TYPE_CHECKING:
    from client.library.aio import AsyncSwarm

METHODS = {"as it comes": None, "a tree of 32 at a time": 32, "plain decoding": 0}
"""Decoding methods with their tree nodes per sweep; None: the controller chooses them, and the sweeps in flight."""
DELAY_MS = 25.0
MAX_DELAY_MS = 10_000
MAX_TOKENS = 1_024
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Run a bootstrap peer, three nodes and a client on this machine, stream a text and compare speeds.

    Everything is started as a user would start it, and nothing is left running.

    Attributes:
        delay_ms: one-way delay of each link, in milliseconds (default: DELAY_MS, else 25).
        tokens: length of the text.
        prompt: text to continue.
        seed: the same seed gives the same text.
    """

    delay_ms: Annotated[float | None, tyro.conf.arg(metavar="MS")] = None
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 64
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "It was a dark night, and the old captain"
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 11


def run(command: Demo) -> int:
    """Run the demo; returns the exit code.

    Raises:
        SwarmError: an option is invalid, or a program did not start.
    """
    delay_ms = _delay_ms(command.delay_ms)
    if not 1 <= command.tokens <= MAX_TOKENS:
        raise ConfigError(f"--tokens {command.tokens}: give 1 to {MAX_TOKENS}")
    check_text(command.prompt, "prompt")
    try:
        asyncio.run(_until_ended(command, delay_ms, make_console()))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return 0


def _delay_ms(option: float | None) -> float:
    name, text = ("--delay-ms", option) if option is not None else ("DELAY_MS", os.environ.get("DELAY_MS", DELAY_MS))
    try:
        delay_ms = float(text)
    except ValueError:
        delay_ms = -1.0
    if not 0 <= delay_ms <= MAX_DELAY_MS:
        raise ConfigError(f"{name} {text}: give milliseconds from 0 to {MAX_DELAY_MS}")
    return delay_ms


async def _until_ended(command: Demo, delay_ms: float, console: Console) -> None:
    """Run the demo; SIGTERM and SIGHUP end it in order, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None, "called within asyncio.run"
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    await _demo(command, delay_ms, console)


async def _demo(command: Demo, delay_ms: float, console: Console) -> None:
    console.print(f"starting a bootstrap peer and {len(SPANS)} nodes; every link has {delay_ms:g} ms one-way delay")
    async with demo_swarm(delay_ms, console) as peer:
        from client.library.aio import AsyncSwarm  # loaded by now, see demo_swarm

        connecting = AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None)
        async with connecting as swarm:
            await wait_covered(swarm, console)
            await swarm.generate(command.prompt, max_new_tokens=4, seed=command.seed)  # opens the connections
            results = {}
            for number, (name, nodes) in enumerate(METHODS.items()):
                if number:
                    console.print(f"the same again, {name} …", style="dim")
                results[name] = await _stream(swarm, command, None if number else console, nodes)
    console.print(_table(results, delay_ms, command.seed))


async def _stream(swarm: AsyncSwarm, command: Demo, console: Console | None, nodes: int | None) -> Result:
    """Generate the text, and print it as it comes if there is a console; earlier texts are forgotten first."""
    swarm.forget_texts()
    if console is not None:
        console.print(f"\n{command.prompt}", end="", style="bold")
    result = None
    pieces = swarm.stream(
        command.prompt, max_new_tokens=command.tokens, temperature=TEMPERATURE, seed=command.seed, nodes=nodes
    )
    async for piece in pieces:
        if console is not None:
            console.print(piece.text, end="")
        result = piece.result
    if console is not None:
        console.print("\n")
    assert result is not None, "a stream ends with a result or an error"
    return result


def _table(results: dict[str, Result], delay_ms: float, seed: int) -> Table:
    first, *_, plain = results.values()
    same = "yes" if all((one.tokens, one.text) == (plain.tokens, plain.text) for one in results.values()) else "NO"
    plain_speed = plain.stats.tokens_per_s  # 0 for a text of one token
    compared = f" · {first.stats.tokens_per_s / plain_speed:.2f} × as fast" if plain_speed else ""
    table = Table(
        title=f"{len(SPANS)} nodes on this machine, links with {delay_ms:g} ms artificial one-way delay",
        caption=f"same text: {same}{compared} · temperature {TEMPERATURE:g}, seed {seed}, fp32",
    )
    for title in ("", "tokens/s", "trees", "acceptance length", "ms per sweep"):
        table.add_column(title, justify="right" if title else "left")
    for name, result in results.items():
        stats = result.stats
        cells = (f"{stats.tokens_per_s:.1f}", f"{stats.trees}", f"{stats.acceptance_length:.2f}")
        table.add_row(name, *cells, f"{stats.ms_per_sweep:.0f}")
    return table
