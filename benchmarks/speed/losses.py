"""What do lost packets cost?

Texts go over an emulated network whose links lose more and more of what they carry. Every program runs on a host of its
own. No machine fails here: each repair is a false alarm, of a machine whose packets were lost several times in a row.
Plain decoding and what the controller chooses go in turns, and must make the same text.

    sudo python -m benchmarks losses --record
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from benchmarks.emulation.client_process import run_part, work
from benchmarks.emulation.network import NetworkPlan, open_network
from benchmarks.emulation.swarm import SPANS, ServeOptions, covered, hosted_swarm
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import demo_prompts
from benchmarks.simulation.profiles import FIRST_SEED
from client.base.stats import Result
from client.library.aio import AsyncSwarm
from client.tools.bench.paired_ratio import median_of, ratios
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console
from swarm.demo import DRAFT, TARGET

PLAIN, CHOSEN = "plain", "chosen"
WAYS: dict[str, int | None] = {PLAIN: 0, CHOSEN: None}


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        pairs: Passages, one per pair.
    """

    peer: str
    temperature: float
    pairs: int
    new_tokens: int
    result: str


async def run_pairs(job: Job) -> list[dict[str, Any]]:
    runs, prompts = [], demo_prompts(job.pairs)
    async with AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None) as swarm:
        await covered(swarm)
        await swarm.generate(prompts[0], max_new_tokens=8)
        for pair in range(job.pairs):
            swarm.forget_texts()
            texts = []
            for way in WAYS if pair % 2 == 0 else reversed(WAYS):
                result, waits = await _generate(swarm, prompts[pair % len(prompts)], WAYS[way], job, FIRST_SEED + pair)
                stats = result.stats
                repairs = [repair.seconds for repair in stats.repairs]
                said = f", repaired in {', '.join(f'{s:.2f}' for s in repairs)} s" if repairs else ""
                print(f"pair {pair}, {way}: {stats.tokens_per_s:.1f} tokens/s{said}", flush=True)  # noqa: T201
                texts.append(result.tokens)
                runs.append(
                    {"pair": pair, "way": way, "tokens": stats.tokens, "seconds": stats.total_s}
                    | {"tokens_per_s": stats.tokens_per_s, "repairs": repairs, "waits": [max(waits)]}
                    | {"is_same": texts[0] == result.tokens}
                )
    return runs


async def _generate(
    swarm: AsyncSwarm, prompt: list[int], nodes: int | None, job: Job, seed: int
) -> tuple[Result, list[float]]:
    """One text, and the seconds between its pieces."""
    result, waits, before = None, [0.0], time.monotonic()
    async for piece in swarm.stream(
        prompt, max_new_tokens=job.new_tokens, temperature=job.temperature, seed=seed, nodes=nodes
    ):
        now, result = time.monotonic(), piece.result
        waits.append(now - before)
        before = now
    assert result is not None, "a stream ends with a result or an error"
    return result, waits


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what lost packets cost."""

    losses: tuple[float, ...] = (0.0, 0.002, 0.01, 0.03)
    """Probabilities that a packet is lost."""
    delay_ms: float = 25.0
    """One way, on each link."""
    mbit: float = 100.0
    """Rate of each link."""
    jitter_ms: float = 5.0
    """Largest extra delay of a packet."""
    pairs: int = 12
    """Texts at each loss rate, plain and as the controller chooses."""
    new_tokens: int = 96
    """New tokens of each text."""
    temperature: float = 0.0
    """Of sampling; 0 is greedy."""
    spares: int = 0
    """Machines that could take each one's place."""
    seed: int = 0
    """Of losses and jitter."""


async def measure(loss: float, options: Options, console: Console) -> list[dict[str, Any]]:
    spans = SPANS * (1 + options.spares)
    shape = LinkShape(options.delay_ms, options.mbit, options.jitter_ms, loss)
    with tempfile.TemporaryDirectory(prefix="canopy-losses-") as temporary:
        folder = Path(temporary)
        plan = NetworkPlan(len(spans) + 2, shape, options.seed)
        async with open_network(plan) as net, hosted_swarm(net, folder, ServeOptions(spans=spans)) as hosted:
            console.print(f"{loss:.1%} lost: {net.kind} network ({net.reason})")
            result = str(folder / "result.json")
            job = asdict(Job(hosted.peer, options.temperature, options.pairs, options.new_tokens, result))
            runs: list[dict[str, Any]] = await run_part("benchmarks.speed.losses", job, net, folder, console)
            return runs


def row(loss: float, runs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    plain, chosen = ([run for run in runs if run["way"] == way] for way in (PLAIN, CHOSEN))
    speeds = [sum(run["tokens"] for run in of) / sum(run["seconds"] for run in of) for of in (plain, chosen)]
    repairs = [repair for run in runs for repair in run["repairs"]]
    ratio = median_of(ratios([run["tokens_per_s"] for run in chosen], [run["tokens_per_s"] for run in plain]))
    minutes = sum(run["seconds"] for run in runs) / 60
    return (
        *(f"{loss:.1%}", *(f"{speed:.1f}" for speed in speeds), str(ratio)),
        *(f"{len(repairs) / minutes:.1f}", f"{max(repairs, default=0.0):.1f}"),
        f"{max(wait for run in runs for wait in run['waits']):.1f}",
        "yes" if all(run["is_same"] for run in runs) else "no",
    )


def sheet(found: dict[float, list[dict[str, Any]]], options: Options) -> Sheet:
    made = Sheet(
        "losses",
        f"Lost packets at {options.delay_ms:g} … {options.delay_ms + options.jitter_ms:g} ms, {options.mbit:g} Mbit/s",
        (
            *("lost", "plain, tokens/s", "chosen, tokens/s", "chosen / plain (95 %)", "false alarms per minute"),
            *("longest repair, s", "longest wait for text, s", "same text"),
        ),
        [row(loss, runs) for loss, runs in found.items()],
    )
    made.notes.append(
        f"{options.pairs} pairs of {options.new_tokens} new tokens at temperature {options.temperature:g}; speeds: all "
        f"tokens over all time, repairs included; ratios: medians over pairs. Machines in reserve per span: "
        f"{options.spares}."
    )
    made.measured = {"options": {"spares": options.spares, "temperature": options.temperature}} | {
        "losses": [{"loss": loss, "runs": runs} for loss, runs in found.items()]
    }
    return made


async def _run(options: Options, console: Console) -> dict[float, list[dict[str, Any]]]:
    return {loss: await measure(loss, options, console) for loss in options.losses}


def main() -> None:
    """Measure and print; with a job, be the client's part."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(Job, run_pairs)
        return
    options = tyro.cli(Options)
    console = make_console()
    sheet(asyncio.run(_run(options, console)), options).finish(console, options)


if __name__ == "__main__":
    main()
