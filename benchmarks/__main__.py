"""The one runner: `python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME [OPTIONS]` runs one."""

from __future__ import annotations

import ast
import difflib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.cli import make_console

PROGRAMS: Final = {
    "control": ("cells", "pipe", "prefill", "replay"),
    "drafting": ("calibration", "codec", "drafters", "near_ties", "pick_gaps", "quantised", "vocabularies"),
    "emulation": ("homes", "network"),
    "models": ("families",),
    "operations": ("agents", "api_overhead", "page_server"),
    "recovery": ("faults", "soak"),
    "redteam": ("audits", "costs", "leakage", "redteam"),
    "routing": ("placement",),
    "simulation": ("acceptance",),
    "speed": (
        "card",
        "card_formats",
        "card_swarm",
        "commitments",
        "crowd",
        "footprint",
        "grown",
        "hop",
        "load",
        "local",
        "long",
        "losses",
        "offload",
        "star",
        "wide_area",
    ),
}
"""Names of the benchmarks, by the folder that they lie in. A name never changes: recorded tables stand beside it."""
MODULES: Final = {"homes": "homes_faults", "network": "network_check"}
"""Names that differ from their module's."""
PARTS: Final = {
    "audits": ("audits_honest", "audits_liars"),
    "codec": ("codec_cost", "codec_effect"),
    "wide_area": ("wide_area", "own_layers"),
}
"""Tables of the benchmarks that make more than one. All others make one, which is called like them."""


def names() -> tuple[str, ...]:
    return tuple(name for room in PROGRAMS.values() for name in room)


def module_of(name: str) -> str:
    """The dotted module behind a benchmark's name.

    Raises:
        KeyError: there is no such benchmark.
    """
    for room, inside in PROGRAMS.items():
        if name in inside:
            return f"benchmarks.{room}.{MODULES.get(name, name)}"
    raise KeyError(name)


def summary_of(name: str) -> str:
    """The first sentence of a benchmark's docstring, read without importing it."""
    path = Path(__file__).parent.joinpath(*module_of(name).split(".")[1:]).with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def show_all(console: Console) -> None:
    """Print one line per benchmark, below the folder that it lies in."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for room, inside in PROGRAMS.items():
        table.add_row(Text(room, style="bold"), "")
        for name in inside:
            table.add_row(f"  {name}", Text(summary_of(name)))
    console.print(table)
    console.print("\nRun one: python -m benchmarks NAME [--help]", markup=False, highlight=False)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in {"-h", "--help"}:
        show_all(make_console())
        return
    name, options = sys.argv[1], sys.argv[2:]
    try:
        module = module_of(name)
    except KeyError:
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        sys.exit(f"benchmarks: no benchmark is called {name}{hint} (python -m benchmarks lists them)")
    os.environ["CANOPY_SWARMS"] = "none"  # a benchmark's swarm is not the one that its user joined last
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # its handlers end programs that start while others speak gRPC
    sys.argv = [f"python -m benchmarks {name}", *options]
    import_module(module).main()


if __name__ == "__main__":
    main()
