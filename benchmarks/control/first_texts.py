"""How fast is the first text of a client that knows nothing of its draft and its route?

As in `benchmarks.control.replay`, but every prompt is a new client's: its acceptance probabilities, the calibration of
its look-up and its controller begin anew. It knows only what routing forecasts. Beside it: one client that generates
all texts, and clients with no forecast or a wrong one.

    python -m benchmarks first_texts --record
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor as Pool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch
import tyro
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.control.replay import IN_FLIGHT, SIZES, ReplaySetup, one_core, replay_text, replay_texts
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs
from benchmarks.simulation.profiles import CARDS, FIRST_SEED, PROFILES
from benchmarks.simulation.recorded import KINDS, ModelPair, RecordedText, prompts_of, record_trees
from client.control.goodput import Goodput
from client.control.policy import FixedPolicy, SpeculationPolicy
from client.library.jobs import MAX_NODES
from swarm.demo import DRAFT, TARGET
from swarm.inference.ragged_batch import load_whole
from swarm.protocol.messages import Sampling
from swarm.routing.costs import RouteForecast
from swarm.runtime.cli import make_console

WRONG = 3.0

Forecast = Callable[[Costs], RouteForecast | None]


def wrong_forecast(links: float, compute: float, row: float) -> Forecast:
    """A forecast that is so many times the truth."""

    def forecast(costs: Costs) -> RouteForecast:
        true = costs.forecast()
        rows_ms = (row * true.row_ms, row * true.link_row_ms)
        steps = tuple((rows, compute * ms) for rows, ms in true.steps)
        return RouteForecast(links * true.links_ms, compute * true.compute_ms, *rows_ms, hops=true.hops, steps=steps)

    return forecast


FORECASTS: dict[str, Forecast] = {
    "nothing": lambda _: None,
    "far, rows dear": wrong_forecast(WRONG, 1 / WRONG, WRONG),
    "near, all dear": wrong_forecast(1 / WRONG, WRONG, WRONG),
    "all cheap": wrong_forecast(1 / WRONG, 1 / WRONG, 1 / WRONG),
    "rows free": wrong_forecast(1, 1, 0),
}


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure first texts."""

    prompts: int = 6
    """Of each kind."""
    new_tokens: int = 64
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    networks: tuple[str, ...] = tuple(PROFILES)
    """Which networks; "cards, 1 ms, 1 Gbit/s" and "cards, 25 ms, 100 Mbit/s" have synthetic cards as well."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. Speeds are tokens per virtual second.

    Attributes:
        best: The best fixed choice: tree size and sweeps in flight.
        first: First texts, each by a new client.
        later: One client that generates all texts.
        least: The least that a single first text has of plain decoding's speed.
        misled: First texts with a wrong forecast, by its name.
    """

    name: tuple[str, str, float]
    plain: float
    best: tuple[int, int]
    fixed: float
    first: float
    later: float
    least: float
    misled: dict[str, float]


def texts_of(kind: str, temperature: float, options: Options) -> list[RecordedText]:
    """Texts and trees, each of a draft that has learned nothing before."""
    pair = ModelPair(load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32), options.new_tokens)
    made: list[RecordedText] = []
    for place, prompt in enumerate(prompts_of(kind, options.prompts)):
        made += record_trees(pair, [prompt], [Sampling(FIRST_SEED + place, temperature)])
    return made


def measure(name: tuple[str, str, float], texts: Sequence[RecordedText]) -> Cell:
    """All methods of one cell."""
    costs, tokenizer = (PROFILES | CARDS)[name[0]], AutoTokenizer.from_pretrained(TARGET)

    def each(way: Callable[[], SpeculationPolicy], forecast: Forecast = Costs.forecast) -> list[tuple[int, float]]:
        setup = ReplaySetup(forecast=forecast)
        return [asyncio.run(replay_text(text, costs, way(), tokenizer, setup))[:2] for text in texts]

    fixed = {
        (size, flights): speed(each(partial(FixedPolicy, size, flights)))
        for size in sorted({*SIZES, *(rows - 1 for rows, _ in costs.steps)})
        for flights in (IN_FLIGHT if size else (1,))
    }
    best = max(fixed, key=fixed.__getitem__)
    fresh = partial(Goodput, MAX_NODES)
    first, plain = each(fresh), each(partial(FixedPolicy, 0))
    return Cell(
        name,
        fixed[0, 1],
        best,
        fixed[best],
        speed(first),
        replay_texts(texts, costs, fresh(), tokenizer).tokens_per_s,
        min(speed([ours]) / speed([theirs]) for ours, theirs in zip(first, plain, strict=True)),
        {said: speed(each(fresh, forecast)) for said, forecast in FORECASTS.items()},
    )


def speed(told: Sequence[tuple[int, float]]) -> float:
    """All tokens over all seconds."""
    return sum(count for count, _ in told) / sum(seconds for _, seconds in told)


def sheet(cells: Sequence[Cell], options: Options) -> Sheet:
    made = Sheet(
        "first_texts",
        "Tokens per virtual second of first texts, each by a client that knows nothing yet",
        (
            *("network, text", "T", "plain", "best fixed (K × in flight)"),
            *("first texts", "of plain", "of best fixed"),
            *("one client's, of best fixed", *(f"forecast: {said}" for said in FORECASTS)),
        ),
    )
    for cell in cells:
        network, kind, temperature = cell.name
        made.rows.append(
            (
                *(f"{network}, {kind}", f"{temperature:g}", f"{cell.plain:.1f}"),
                f"{cell.fixed:.1f} ({cell.best[0]} × {cell.best[1]})",
                *(f"{cell.first:.1f}", f"{cell.first / cell.plain:.2f}"),
                *(f"{cell.first / cell.fixed:.2f}", f"{cell.later / cell.fixed:.2f}"),
                *(f"{cell.misled[said] / cell.first - 1:+.0%}" for said in FORECASTS),
            )
        )
    of_best = min(cell.first / cell.fixed for cell in cells)
    wrong = ", ".join(f"{said} {min(cell.misled[said] / cell.first - 1 for cell in cells):+.0%}" for said in FORECASTS)
    made.notes.append(
        f"Least of the best fixed choice: {of_best:.2f}; least of plain that a single text had: "
        f"{min(cell.least for cell in cells):.2f}. {options.prompts} prompts of each kind, {options.new_tokens} new "
        f"tokens each. Fixed choices have the same trees. Forecasts that are off, {WRONG:g} times each or rows "
        f"that cost nothing, against true ones at worst: {wrong}."
    )
    made.measured = {
        "cells": [
            {"cell": list(cell.name), "plain": cell.plain, "best": list(cell.best), "fixed": cell.fixed}
            | {"first": cell.first, "later": cell.later, "least_of_plain": cell.least, "misled": cell.misled}
            for cell in cells
        ]
    }
    return made


def main() -> None:
    options = tyro.cli(Options)
    one_core()
    console = make_console()
    with Pool(os.cpu_count(), get_context("spawn"), one_core) as pool:
        kinds = [(kind, temperature) for kind in KINDS for temperature in options.temperatures]
        recording = [pool.submit(texts_of, *kind, options) for kind in kinds]
        texts = dict(
            zip(kinds, [work.result() for work in track(recording, "recording", console=console)], strict=True)
        )
        work = [pool.submit(measure, (network, *kind), texts[kind]) for network in options.networks for kind in kinds]
        cells = [cell.result() for cell in track(work, "cells", console=console)]
    sheet(cells, options).finish(console, options)
