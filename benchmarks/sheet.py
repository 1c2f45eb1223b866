"""One table of BENCHMARKS.md: on the terminal, as Markdown in its section, as JSON beside it.

Every program of this folder makes one. `--record` writes it into BENCHMARKS.md, between two comments that name the
program, and its measurements to benchmarks/results; everything else in that file is written by people.
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

from swarm.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "BENCHMARKS.md"
RESULTS = ROOT / "benchmarks" / "results"
NUMBERS = re.compile(r"\[([\s\d.,eE+-]+)\]")
"""A list of numbers in JSON, which goes on one line."""
BAR = r"\|"
"""A bar that ends no column."""


@dataclass(slots=True)
class Sheet:
    """A table, the notes below it and the measurements behind it.

    name: the program's; its section in BENCHMARKS.md and its JSON file are called so. measured: anything that JSON
    holds.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        """Print it."""
        table = Table(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(note, soft_wrap=True, markup=False, highlight=False)

    def markdown(self) -> str:
        """The table and its notes."""
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---"] + ["--:"] * (len(self.columns) - 1))]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"{note}  " for note in self.notes)]).rstrip()

    def record(self) -> None:
        """Write it into its section of BENCHMARKS.md and its measurements into benchmarks/results.

        Raises:
            ConfigError: BENCHMARKS.md has no such section.
        """
        begin, end = f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"
        page = PAGE.read_text(encoding="utf-8")
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ConfigError(f"{PAGE.name} has no section between {begin} and {end}")
        PAGE.write_text(f"{before}{begin}\n{self.markdown()}\n{end}{after}", encoding="utf-8")
        RESULTS.mkdir(exist_ok=True)
        self.write(RESULTS / f"{self.name}.json")

    def write(self, path: Path) -> None:
        """Write the measurements, and on which machine they were made."""
        text = json.dumps({"machine": machine(), **self.measured}, indent=1, default=str)
        text = NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
        path.write_text(text + "\n", encoding="utf-8")

    def finish(self, console: Console, *, record: bool, path: Path | None = None) -> None:
        """Print it, and write what was asked for."""
        self.show(console)
        if path is not None:
            self.write(path)
        if record:
            self.record()


def machine() -> dict[str, object]:
    """What a measurement was made on."""
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
