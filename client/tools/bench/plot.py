"""Pictures of measurements: speed and acceptance against the tree size, and a sweep's waterfall; terminal and PNG.

Owns no numbers: it draws the points and stages that it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.table import Table

from client.base.stats import Stats
from swarm.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"draft": "#b07d2b", "wire": "#3b6ea8", "queue": "#a33b3b", "compute": "#3a7d44", "rest": "#8a8a8a"}
"""Colours of a sweep's stages, by kind; rich and matplotlib both read them."""
SPEED, ACCEPTED = COLOURS["wire"], COLOURS["compute"]
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Point:
    """One way of decoding.

    Attributes:
        size: K, or a word for it.
        tokens_per_s: median over answers.
        acceptance_length: mean over answers.
    """

    size: str
    tokens_per_s: float
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class WaterfallStage:
    """One stage of a sweep.

    Attributes:
        kind: one of `COLOURS`.
        ms: how long the sweep was in it.
    """

    name: str
    kind: str
    ms: float


def parts_of(stats: Stats) -> tuple[WaterfallStage, ...]:
    """The stages of a generation's sweeps that began a tree, in order, each a median; empty without such sweeps."""
    sweeps = [sweep for sweep in stats.sweeps if not sweep.is_part]
    hops = max((len(sweep.hops) for sweep in sweeps), default=0)
    alike = [sweep for sweep in sweeps if len(sweep.hops) == hops]
    if not alike:
        return ()
    found = [
        WaterfallStage("draft", "draft", median(sweep.draft_ms for sweep in alike)),
        WaterfallStage("client → hop 0", "wire", median(sweep.first_link_ms for sweep in alike)),
    ]
    for hop in range(hops):
        times = [sweep.hops[hop] for sweep in alike]
        after = f"hop {hop} → {'client' if hop == hops - 1 else f'hop {hop + 1}'}"
        found += [
            WaterfallStage(f"hop {hop} queue", "queue", median(time.queue_ms for time in times)),
            WaterfallStage(f"hop {hop} compute", "compute", median(time.compute_ms for time in times)),
            WaterfallStage(f"hop {hop} messages", "rest", median(time.other_ms for time in times)),
            WaterfallStage(after, "wire", median(time.link_ms for time in times)),
        ]
    return (*found, WaterfallStage("not accounted for", "rest", max(median(sweep.other_ms for sweep in alike), 0.0)))


def curves(points: Sequence[Point]) -> Table:
    """Tokens per second and acceptance length against K, as bars."""
    table = Table(title="speed and acceptance against the tree size")
    for title in ("K", "tokens/s", "", "acceptance", ""):
        table.add_column(title, justify="right" if title else "left")
    fastest = max((point.tokens_per_s for point in points), default=0.0) or 1.0
    longest = max((point.acceptance_length for point in points), default=0.0) or 1.0
    for point in points:
        table.add_row(
            point.size,
            f"{point.tokens_per_s:.1f}",
            Bar(fastest, 0, point.tokens_per_s, width=BAR_WIDTH // 2, color=SPEED),
            f"{point.acceptance_length:.2f}",
            Bar(longest, 0, point.acceptance_length, width=BAR_WIDTH // 2, color=ACCEPTED),
        )
    return table


def waterfall(parts: Sequence[WaterfallStage]) -> Table:
    """A sweep's stages one after another, as bars that begin where the stage before ended."""
    table = Table(title="one sweep, median ms")
    for title in ("part", "ms", ""):
        table.add_column(title, justify="right" if title == "ms" else "left")
    ends = list(accumulate(part.ms for part in parts))
    total = ends[-1] if ends else 0.0
    for part, end in zip(parts, ends, strict=True):
        table.add_row(
            part.name,
            f"{part.ms:.1f}",
            Bar(total or 1.0, end - part.ms, end, width=BAR_WIDTH, color=COLOURS[part.kind]),
        )
    table.add_row("whole sweep", f"{total:.1f}", "", style="bold")
    return table


def check(path: Path) -> None:
    """Check that a plot can be written, before a long measurement.

    Raises:
        ConfigError: another kind of file, or no such folder.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: is drawn as PNG; let the name end with .png")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.absolute().parent} does not exist")


def draw(path: Path, title: str, points: Sequence[Point], parts: Sequence[WaterfallStage]) -> None:
    """Write the PNG: two panels over K, and the waterfall below.

    Raises:
        ConfigError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.2))
    sizes = [point.size for point in points]
    speeds, accepted = [point.tokens_per_s for point in points], [point.acceptance_length for point in points]
    _curve(figure.add_subplot(grid[0, 0]), sizes, speeds, ("tokens/s", SPEED))
    _curve(figure.add_subplot(grid[0, 1]), sizes, accepted, ("acceptance length", ACCEPTED))
    _stages(figure.add_subplot(grid[1, :]), parts)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def _curve(axes: Axes, sizes: Sequence[str], values: Sequence[float], named: tuple[str, str]) -> None:
    title, colour = named
    places = range(len(sizes))
    fixed = [place for place in places if sizes[place] != "chosen"]
    axes.plot(fixed, [values[place] for place in fixed], marker="o", color=colour)
    for place in places:
        if place not in fixed:
            axes.plot([place], [values[place]], marker="D", markersize=8, color=colour, linestyle="none")
            axes.axhline(values[place], color=colour, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{values[place]:.3g}", (place, values[place]), textcoords="offset points", xytext=(0, 7), ha="center"
        )
    axes.set_xticks(list(places), sizes)
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_ylim(0, max(values, default=1.0) * 1.18)
    axes.set_xlabel("tree nodes per sweep (K)")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)


def _stages(axes: Axes, parts: Sequence[WaterfallStage]) -> None:
    ends = list(accumulate(part.ms for part in parts))
    for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
        axes.barh(row, part.ms, left=end - part.ms, color=COLOURS[part.kind])
        axes.annotate(f"{part.ms:.1f}", (end, row), textcoords="offset points", xytext=(3, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(parts)), [part.name for part in parts], fontsize=8)
    axes.set_xlim(0, 1.06 * (ends[-1] if ends else 1.0))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title("one sweep, medians")
    axes.spines[["top", "right"]].set_visible(False)
