"""A benchmark's table: on the terminal, as Markdown in a page of docs/benchmarks, as JSON in benchmarks/results.

`--record` writes the Markdown between two comments that name the benchmark, in the one page that has them. All else in
those pages is written by people.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"
NUMBERS = re.compile(r"\[([\s\d.,eE+-]+)\]")
"""A list of numbers in JSON, which goes on one line."""
BAR = r"\|"
"""A bar that ends no column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Where the results go: options of every benchmark that makes a table."""

    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(slots=True)
class Sheet:
    """A table, the notes below it and the measurements behind it.

    Attributes:
        name: The benchmark's name. The two comments in its page and its JSON file are called so.
        title: What the table shows, and how it was measured.
        columns: Titles of the columns. The first column is aligned to the left, the others to the right.
        rows: One cell per column.
        notes: Lines below the table.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        console.print(self.title, style="bold", soft_wrap=True, markup=False, highlight=False)
        table = Table()
        for number, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
        console.print(table, soft_wrap=False)
        for note in self.notes:
            console.print(note, soft_wrap=True, markup=False, highlight=False)

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---"] + ["--:"] * (len(self.columns) - 1))]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"{note}  " for note in self.notes)]).rstrip()

    def record(self) -> None:
        """Write it into its page of docs/benchmarks and its measurements into benchmarks/results.

        Raises:
            ConfigError: no page has its two comments, or more than one has.
        """
        page = page_of(self.name)
        begin, end = markers(self.name)
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        _, _, after = rest.partition(end)
        page.write_text(f"{before}{begin}\n{self.markdown()}\n{end}{after}", encoding="utf-8")
        RESULTS.mkdir(exist_ok=True)
        self.write(RESULTS / f"{self.name}.json")

    def write(self, path: Path) -> None:
        """Write the measurements, and on which machine they were made."""
        text = json.dumps({"machine": machine(), **self.measured}, indent=1, default=str)
        text = NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
        path.write_text(text + "\n", encoding="utf-8")

    def finish(self, console: Console, options: Recording) -> None:
        """Print it, and write what was asked for."""
        self.show(console)
        if options.json is not None:
            self.write(options.json)
        if options.record:
            self.record()


def markers(name: str) -> tuple[str, str]:
    """The two comments between which a benchmark's table lies."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def page_of(name: str) -> Path:
    """The one page of docs/benchmarks that holds a benchmark's table.

    Raises:
        ConfigError: no page has its two comments in order, or they are there more than once.
    """
    begin, end = markers(name)
    found = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        found += [page] * max(text.count(begin), text.count(end))
    if not found:
        raise ConfigError(f"{PAGES}: no page has {begin} and {end}")
    if len(found) > 1:
        names = ", ".join(page.name for page in found)
        raise ConfigError(f"{PAGES}: {begin} and {end} must be there once, and are in {names}")
    _, is_begun, rest = found[0].read_text(encoding="utf-8").partition(begin)
    if not is_begun or end not in rest:
        raise ConfigError(f"{found[0]}: {begin} must come before {end}")
    return found[0]


def machine() -> dict[str, object]:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "card": card,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"
