"""Does the replay in virtual time predict the speed of real nodes?

Six cells of the grid again, with real nodes over the emulated network. Plain decoding and what the controller chooses
go in turns, and another client makes the same texts with trees of one size. Then the cells are replayed with the costs
that were seen: a hop's forward and what a row adds, what drafting and messages take of the cores that everything here
shares, what a sweep takes beyond all that. Each cell is replayed with several delays around the one that was seen,
because a single replay depends on which node just goes with a sweep.

    sudo python -m benchmarks cells --record
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor as Pool
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.control.cells_worker import CHOSEN, FIXED, FIXED_NODES, METHODS, PLAIN, Job
from benchmarks.control.pipe import whole_target
from benchmarks.control.replay import ReplaySetup, one_core, replay_texts
from benchmarks.emulation.client_process import run_part
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from benchmarks.emulation.swarm import SPANS, hosted_swarm
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import HOPS, Costs, VirtualDrafter
from benchmarks.simulation.profiles import FIRST_SEED, PROFILES
from benchmarks.simulation.recorded import RecordedText, generate_texts, prompts_of
from client.base.options import DraftOptions
from client.base.target import load_target
from client.decode.goodput import Goodput
from client.decode.policy import FixedPolicy, SpeculationPolicy
from client.draft.drafter import TreeDrafter
from client.draft.loading import load_drafter
from client.library.jobs import MAX_NODES
from client.tools.bench.paired_ratio import Median, median_of, ratios
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

CELLS = (
    ("1 ms, 1 Gbit/s", "passages", 1.0),
    ("10 ms, 200 Mbit/s", "code-like", 0.0),
    ("25 ms, 100 Mbit/s", "passages", 0.0),
    ("25 ms, 100 Mbit/s", "repetitive", 1.0),
    ("50 ms, 20 Mbit/s", "passages", 1.0),
    ("100 ms, 50 Mbit/s", "repetitive", 0.0),
)
WARM_PAIRS = 1
"""The first pair of a cell opens connections; it is not counted."""
SHIFTS_MS = (-0.2, -0.1, 0.0, 0.1, 0.2)
"""A cell is replayed with delays that differ from the mean one by so much, as those of its trips do."""

Run = dict[str, Any]
"""What `cells_worker` measures of one text by one method."""
Speeds = dict[str, list[float]]
"""Tokens per second of counted texts, by method."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure six cells of the replay's grid."""

    prompts: int = 24
    """Of each kind. There are twelve of code-like and of repetitive text, which are used twice then."""
    pairs: int = 25
    """Prompts that go through all methods."""
    new_tokens: int = 64
    """New tokens of each text."""
    kind: NetworkKind | None = None
    """tun needs root; left out: the best that this machine allows."""
    again: Path | None = None
    """Results of an earlier run, to be replayed once more instead of measuring anew."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell. Speeds are tokens per second, by method.

    A replayed text's speed is the harmonic mean over the replays.

    Attributes:
        costs: What the cell's runs showed of the machine and the network.
        ratio: Chosen over plain on real nodes: the median over pairs.
        single_ratios: The same of each replay by itself.
    """

    costs: Costs
    real: dict[str, float]
    virtual: dict[str, float]
    ratio: Median
    virtual_ratio: Median
    single_ratios: tuple[float, ...]

    @property
    def off(self) -> float:
        """How far the replay's ratio of chosen to plain is from the real one, 0 is not at all."""
        return self.virtual_ratio.value / self.ratio.value - 1


async def measure(network: str, options: Options, console: Console) -> list[Run]:
    costs = PROFILES[network]
    cells = tuple((kind, temperature) for name, kind, temperature in CELLS if name == network)
    with tempfile.TemporaryDirectory(prefix="canopy-cells-") as temporary:
        folder = Path(temporary)
        shape = LinkShape(delay_ms=costs.delay_ms, mbit=costs.mbit)
        async with (
            open_network(NetworkPlan(len(SPANS) + 2, shape), options.kind) as net,
            hosted_swarm(net, folder) as hosted,
        ):
            console.print(f"{network}: {net.kind} network ({net.reason})")
            result = str(folder / "result.json")
            job = Job(hosted.peer, cells, options.prompts, options.pairs, options.new_tokens, result, os.getpid())
            found: list[Run] = await run_part("benchmarks.control.cells_worker", asdict(job), net, folder, console)
            return found


def machine_of(runs: Sequence[Run]) -> Costs:
    """What all runs, of all cells, show of the machine: a line through the CPU time of all but forwards and drafting.

    All programs share this machine's cores, so what messages take of these counts too; not what a run takes at its
    beginning, and not what all programs use as time passes, however many sweeps there are, which one network alone
    could not tell apart.
    """
    took = [(1, len(run["sweeps"]), _further_rows(run), 1e3 * len(run["tokens"]) / run["tokens_per_s"]) for run in runs]
    _, handling_ms, handling_row_ms, _ = _fit(took, [_rest_ms(run) for run in runs])
    return Costs(
        0.0,
        0.0,
        cores=os.cpu_count(),
        handling_ms=handling_ms,
        handling_row_ms=handling_row_ms,
        other_ms=median(ms for run in runs for sweep in run["sweeps"] for ms in sweep["other_ms"]),
    )


def drafting_of(runs: Sequence[Run], machine: Costs) -> Costs:
    """The machine, and what one cell's runs say of drafting there: a line through its CPU time.

    Of the cell itself, as forwards are: where programs wait longer between two sweeps, both take more.
    """
    chosen = [run for run in runs if run["way"] == CHOSEN]
    grown = [one for run in chosen for one in run["grown"]]
    grow_ms, pass_ms, pass_row_ms, node_ms = _fit([(1, *what) for _, *what in grown], [ms for ms, *_ in grown])
    return replace(
        machine,
        pass_ms=pass_ms,
        pass_row_ms=pass_row_ms,
        grow_ms=grow_ms,
        node_ms=node_ms,
        turn_ms=max(median(_turn_ms(run) for run in runs if run["way"] == FIXED), 0.0),
        learn_ms=fmean(ms for run in chosen for ms in run["learned"]),
    )


def costs_of(runs: Sequence[Run], machine: Costs, nominal: Costs) -> Costs:
    """What one cell's plain sweeps showed, and what rows added where trees have one size.

    Means, as times add up to the speeds that are compared. All beside queues and forwards is delay, what makes some
    trips longer too: sweeps that are on their way together share it.
    """
    plain, fixed = ([sweep for run in runs if run["way"] == way for sweep in run["sweeps"]] for way in (PLAIN, FIXED))
    one_row = fmean(ms for sweep in plain for ms in sweep["compute_ms"])
    more_ms = fmean(ms for sweep in fixed for ms in sweep["compute_ms"]) - one_row
    row_ms = max(more_ms, 0.0) / max(fmean(sweep["rows"] for sweep in fixed) - 1, 1.0)
    took_ms = fmean(1e3 / run["tokens_per_s"] for run in runs if run["way"] == PLAIN)
    known_ms = fmean(sum(sweep["queue_ms"]) + sum(sweep["compute_ms"]) for sweep in plain)
    rest_ms = took_ms - known_ms - (HOPS - 1) * nominal.transfer_ms(1)
    return replace(
        machine,
        mbit=nominal.mbit,
        delay_ms=max(rest_ms / (HOPS + 1), nominal.delay_ms),
        forward_ms=one_row - row_ms,
        row_ms=row_ms,
        wait_ms=fmean(ms for sweep in plain for ms in sweep["queue_ms"]),
        paces=_paces(plain, fixed),
    )


def _paces(*ways: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """How many times as long as the mean each hop computes, over all methods. The last one has a head, and picks."""
    each = np.array([np.mean([sweep["compute_ms"] for sweep in sweeps], axis=0) for sweeps in ways])
    return tuple((each / each.mean(axis=1, keepdims=True)).mean(axis=0).tolist())


def _fit(what: Sequence[tuple[float, ...]], took_ms: Sequence[float]) -> list[float]:
    """What each of some things takes, least squares; never less than nothing."""
    return [max(float(ms), 0.0) for ms in np.linalg.lstsq(np.array(what, dtype=np.float64), took_ms)[0]]


def _rest_ms(run: Run) -> float:
    """CPU milliseconds of all programs beside forwards and drafting."""
    known = sum(sum(sweep["compute_ms"]) for sweep in run["sweeps"])
    known += sum(ms for ms, *_ in run["grown"]) + sum(run["learned"])
    return float(run["cpu_ms"] - known)


def _turn_ms(run: Run) -> float:
    """Milliseconds that each tree took beside its CPU time, where nothing else is computed meanwhile."""
    waited_ms = sum(sweep["draft_ms"] for sweep in run["sweeps"])
    return float(waited_ms - sum(ms for ms, *_ in run["grown"])) / max(len(run["grown"]), 1)


def _further_rows(run: Run) -> int:
    """Rows beside the first one of each sweep."""
    return int(sum(sweep["rows"] - 1 for sweep in run["sweeps"]))


def check_texts(runs: Sequence[Run], texts: Sequence[RecordedText]) -> None:
    """Make sure that all runs generated the recorded texts.

    Raises:
        AssertionError: a text is another.
    """
    for one in runs:
        recorded = texts[one["pair"]]
        assert tuple(one["tokens"]) == recorded.tokens[len(recorded.prompt) :][: len(one["tokens"])], "another text"


def compare(costs: Costs, real: Speeds, replays: Sequence[Speeds]) -> CellResult:
    """One cell: real speeds, and the replays' with the costs that were seen."""
    virtual = {way: [harmonic_mean(of) for of in zip(*(one[way] for one in replays), strict=True)] for way in METHODS}
    return CellResult(
        costs,
        {way: harmonic_mean(of) for way, of in real.items()},
        {way: harmonic_mean(of) for way, of in virtual.items()},
        median_of(ratios(real[CHOSEN], real[PLAIN])),
        median_of(ratios(virtual[CHOSEN], virtual[PLAIN])),
        tuple(median(ratios(one[CHOSEN], one[PLAIN])) for one in replays),
    )


def replayed(texts: Sequence[RecordedText], costs: Costs) -> Speeds:
    """Speeds of each method, with draft and target that run as the real ones do."""
    policies: dict[str, SpeculationPolicy] = {
        PLAIN: FixedPolicy(0),
        FIXED: FixedPolicy(FIXED_NODES),
        CHOSEN: Goodput(MAX_NODES),
    }
    return {way: _speeds_of(texts, costs, policy)[WARM_PAIRS:] for way, policy in policies.items()}


def _speeds_of(texts: Sequence[RecordedText], costs: Costs, policy: SpeculationPolicy) -> list[float]:
    """Speeds of texts one after another, by one client that begins knowing nothing."""
    drafter = load_drafter(TARGET, load_target(TARGET), DraftOptions((DRAFT,), "cpu")).drafter
    assert isinstance(drafter, TreeDrafter)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    setup = ReplaySetup(partial(VirtualDrafter, drafter, costs), whole_target())
    speeds: list[float] = []
    for text in texts:
        if text.prompt == texts[0].prompt:
            drafter.forget()  # all texts were generated once, as by the real client
        speeds.append(replay_texts([text], costs, policy, tokenizer, setup).tokens_per_s)
    return speeds


def sheet(found: dict[tuple[str, str, float], CellResult], options: Options) -> Sheet:
    made = Sheet(
        "cells",
        "Six cells with real nodes over the emulated network, and the replay with the costs seen there; tokens/s",
        (
            *("network, text", "T", "plain", "replayed", f"K = {FIXED_NODES}", "replayed", "chosen", "replayed"),
            *("chosen / plain (95 %)", "replayed", "off", "forward + row, ms", "hop by hop, ×", "to start, ms"),
            *("tree + pass + its row + node, ms", "heard, learned"),
        ),
    )
    for (network, kind, temperature), cell in found.items():
        costs = cell.costs
        speeds = [f"{speed:.1f}" for way in (PLAIN, FIXED, CHOSEN) for speed in (cell.real[way], cell.virtual[way])]
        least, most = min(cell.single_ratios), max(cell.single_ratios)
        ratio = (str(cell.ratio), f"{cell.virtual_ratio.value:.2f} ({least:.2f} … {most:.2f})", f"{cell.off:+.0%}")
        seen = (
            f"{costs.forward_ms:.1f} + {costs.row_ms:.2f}",
            " ".join(f"{pace:.2f}" for pace in costs.paces),
            f"{costs.wait_ms:.2f}",
            f"{costs.grow_ms:.1f} + {costs.pass_ms:.1f} + {costs.pass_row_ms:.2f} + {costs.node_ms:.3f}",
            f"{costs.turn_ms:.1f}, {costs.learn_ms:.1f}",
        )
        made.rows.append((f"{network}, {kind}", f"{temperature:g}", *speeds, *ratio, *seen))
    cell = next(iter(found.values()))
    costs = cell.costs
    made.notes.append(
        f"{options.pairs - WARM_PAIRS} pairs of {options.new_tokens} new tokens; speeds: harmonic means over texts; "
        f"K = {FIXED_NODES}: by another client, one sweep at a time. To start: from a sweep's arrival at a hop to its "
        "forward, plain. Heard, learned: until the loop has a tree, and what a lesson takes from a reply, ms. Replayed "
        f"{len(SHIFTS_MS)} times, with delays up to {max(SHIFTS_MS):g} ms from the mean one: "
        "all together (the least and the most of single replays)."
    )
    made.notes.append(
        f"All programs share {costs.cores} cores, here and in the replay. From all runs: {costs.handling_ms:.1f} + "
        f"{costs.handling_row_ms:.2f} ms per further row for a sweep's messages on all machines and the network "
        "emulator. From each cell's own: forwards and drafting."
    )
    made.measured = {"cells": [{"cell": list(key), **asdict(cell)} for key, cell in found.items()]}
    return made


def main() -> None:
    options = tyro.cli(Options)
    quiet_libraries()
    console = make_console()
    networks = dict.fromkeys(name for name, _, _ in CELLS)
    if options.again is None:
        raw = {name: asyncio.run(measure(name, options, console)) for name in networks}
    else:
        raw = json.loads(options.again.read_text(encoding="utf-8"))["runs"]
    one_core()
    machine = machine_of([run for some in raw.values() for run in some if run["pair"] >= WARM_PAIRS])
    found = {}
    with Pool(os.cpu_count(), get_context("spawn"), one_core) as pool:
        for cell in CELLS:
            name, kind, temperature = cell
            prompts = prompts_of(kind, options.prompts)
            told = [prompts[pair % len(prompts)] for pair in range(options.pairs)]
            samplings = [Sampling(FIRST_SEED + pair, temperature) for pair in range(options.pairs)]
            texts = generate_texts(whole_target(), told, samplings, options.new_tokens)
            runs = [one for one in raw[name] if (one["kind"], one["temperature"]) == (kind, temperature)]
            check_texts(runs, texts)
            counted = [one for one in runs if one["pair"] >= WARM_PAIRS]
            costs = costs_of(counted, drafting_of(counted, machine), PROFILES[name])
            real = {way: [one["tokens_per_s"] for one in counted if one["way"] == way] for way in METHODS}
            shifted = [replace(costs, delay_ms=costs.delay_ms + shift_ms) for shift_ms in SHIFTS_MS]
            found[cell] = compare(costs, real, list(pool.map(partial(replayed, texts), shifted)))
            sheet({cell: found[cell]}, options).show(console)
    made = sheet(found, options)
    made.measured["runs"] = raw
    made.finish(console, options)
