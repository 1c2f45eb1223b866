"""How close to the best possible is the placement of machines that join one by one?

The weakest layer's rate is set beside the best possible. Small swarms: every assignment of spans there is. Large ones:
the fluid bound and Petals' greedy rule.

    python -m benchmarks placement --record
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.sheet import Recording, Sheet
from swarm.base.cli import make_console
from swarm.base.ids import PeerId
from swarm.routing.placement import Layout, Newcomer, after, petals_span, plan_join

SMALL_LAYERS = 12
LARGE_LAYERS = 80


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure placement."""

    swarms: int = 2_000
    """Random swarms of up to six machines."""
    full: int = 300
    """Of each kind with exactly six machines: there the brute force takes longest."""
    large: tuple[int, ...] = (100, 300, 1_000)
    """Machines of the large swarms."""
    seed: int = 0
    """Of all that is random."""


@dataclass(frozen=True, slots=True)
class RandomSwarm:
    """A random swarm in order of arrival.

    Attributes:
        machines: Of each machine: how many layers it holds, and its layers per second.
    """

    num_layers: int
    machines: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class BestPlacement:
    """The best over all assignments of spans.

    Attributes:
        fastest: The rate of the weakest layer.
        singles: The fewest layers with one holder, after the fewest uncovered layers.
        fastest_in_order: The rate of the weakest layer among the assignments with the fewest uncovered and single
            layers.
    """

    fastest: float
    singles: int
    fastest_in_order: float


@dataclass(frozen=True, slots=True)
class JoinResult:
    """What joining one after another led to.

    Attributes:
        most_moves: The most moves for one join.
    """

    layout: Layout
    moves: int
    most_moves: int
    decision_ms: tuple[float, ...]


def small_swarm(rng: random.Random, num_layers: int, sizes: tuple[int, int] = (1, 12), least: int = 2) -> RandomSwarm:
    """Up to six machines that can hold the model, whose speeds differ by up to ten."""
    while True:
        count = rng.randint(least, 6)
        machines = tuple((rng.randint(*sizes), 10 ** rng.uniform(0, 1)) for _ in range(count))
        if sum(size for size, _ in machines) >= num_layers:
            return RandomSwarm(num_layers, machines)


def large_swarm(rng: random.Random, count: int) -> RandomSwarm:
    """Machines of 4 to 20 layers, whose speeds differ by up to ten."""
    return RandomSwarm(LARGE_LAYERS, tuple((rng.randint(4, 20), 10 ** rng.uniform(0, 1)) for _ in range(count)))


def best_of_all(swarm: RandomSwarm) -> BestPlacement:
    counts, rates = np.zeros((1, swarm.num_layers), np.int8), np.zeros((1, swarm.num_layers))
    layers = np.arange(swarm.num_layers)
    for size, capacity in swarm.machines:
        starts = np.arange(swarm.num_layers - size + 1)[:, None]
        span = (layers >= starts) & (layers < starts + size)
        counts = (counts[:, None] + span).reshape(-1, swarm.num_layers)
        rates = (rates[:, None] + span * (capacity / size)).reshape(-1, swarm.num_layers)
    weakest, holes, singles = rates.min(axis=1), (counts < 1).sum(axis=1), (counts == 1).sum(axis=1)
    need = holes * (swarm.num_layers + 1) + singles
    first = need == need.min()
    return BestPlacement(float(weakest.max()), int(singles[first][0]), float(weakest[first].max()))


def join_all(swarm: RandomSwarm) -> JoinResult:
    """All machines join in order, and move where the plan says so."""
    layout, moves = Layout(swarm.num_layers, []), [0]
    took: list[float] = []
    for number, (size, capacity) in enumerate(swarm.machines):
        newcomer = Newcomer(PeerId(f"{number:04}"), size, capacity)
        began = time.perf_counter()
        plan = plan_join(layout, newcomer)
        took.append((time.perf_counter() - began) * 1e3)
        moves.append(len(plan.moves))
        layout = after(layout.joined(newcomer.at(plan.span.start)), plan.moves)
        layout = Layout(swarm.num_layers, [replace(one, may_move=True) for one in layout.holders])
    return JoinResult(layout, sum(moves), max(moves), tuple(took))


def grown_by_petals(swarm: RandomSwarm) -> Layout:
    """All machines join in order by the baseline's rule; nobody moves."""
    layout = Layout(swarm.num_layers, [])
    for number, (size, capacity) in enumerate(swarm.machines):
        newcomer = Newcomer(PeerId(f"{number:04}"), size, capacity)
        layout = layout.joined(newcomer.at(petals_span(layout, newcomer).start))
    return layout


def small_row(name: str, swarms: Sequence[RandomSwarm], console: Console) -> tuple[str, ...]:
    """One kind of small swarm against brute force."""
    ratios, ordered, baseline, moves = [], [], [], []
    took: list[float] = []
    for swarm in track(swarms, name, console=console):
        best, ours = best_of_all(swarm), join_all(swarm)
        weakest = ours.layout.score().weakest
        ratios.append(weakest / best.fastest)
        ordered.append(min(1.0, weakest / best.fastest_in_order))
        baseline.append(grown_by_petals(swarm).score().weakest / best.fastest)
        moves.append(ours.moves / len(swarm.machines))
        took += ours.decision_ms
    return (
        f"{len(swarms):,} × {name}",
        _mean_and_tail(ordered),
        _mean_and_tail(ratios),
        _mean_and_tail(baseline),
        f"{np.mean(moves):.2f}",
        f"{median(took):.0f} / {max(took):.0f}",
    )


def large_row(swarm: RandomSwarm) -> tuple[str, ...]:
    """One large swarm against the fluid bound."""
    ours, baseline = join_all(swarm), grown_by_petals(swarm)
    bound = baseline.fluid_bound()
    return (
        f"{len(swarm.machines):,} machines × {swarm.num_layers} layers, against the fluid bound",
        "",
        f"{ours.layout.score().weakest / bound:.3f}",
        f"{baseline.score().weakest / bound:.3f}",
        f"{ours.moves / len(swarm.machines):.2f}",
        f"{median(ours.decision_ms):.0f} / {max(ours.decision_ms):.0f}",
    )


def sheet(options: Options, console: Console) -> Sheet:
    made = Sheet(
        "placement",
        "The weakest layer's rate after machines joined one after another, as a part of the best possible",
        (
            *("swarm", "of the best in our order (5th percentile)", "of the fastest", "Petals' greedy rule"),
            *("moves per join", "ms per decision, median / most"),
        ),
        notes=[
            "The best in our order: over all assignments, the fastest among those with the fewest uncovered layers and "
            "then the fewest layers with one holder. The fastest: whatever depends on one machine."
        ],
    )
    kinds: tuple[tuple[str, int, Callable[[random.Random], RandomSwarm]], ...] = (
        ("2–6 machines of 1–12 layers, 12 layers", options.swarms, lambda rng: small_swarm(rng, SMALL_LAYERS)),
        ("6 machines of 2–8 layers, 12 layers", options.full, lambda rng: small_swarm(rng, SMALL_LAYERS, (2, 8), 6)),
        ("6 machines of 3–6 layers, 12 layers", options.full, lambda rng: small_swarm(rng, SMALL_LAYERS, (3, 6), 6)),
    )
    for name, count, make in kinds:
        rng = random.Random(options.seed)
        made.rows.append(small_row(name, [make(rng) for _ in range(count)], console))
    for count in options.large:
        made.rows.append(large_row(large_swarm(random.Random(options.seed), count)))
    made.measured = {"rows": [list(row) for row in made.rows]}
    return made


def _mean_and_tail(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({np.percentile(values, 5):.3f})"


def main() -> None:
    options = tyro.cli(Options)
    console = make_console()
    sheet(options, console).finish(console, options)
