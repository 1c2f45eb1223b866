"""How soon can the health page be used, and what does an update cost it?

python -m benchmarks page_load --record
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import tyro
from playwright.sync_api import Browser, CDPSession, sync_playwright
from rich.console import Console

from benchmarks.operations import page_states
from benchmarks.operations.page_server import PageServer
from benchmarks.sheet import Sheet
from swarm.runtime.console import make_console

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LIMIT_MS = 2_000
LAYERS = 80
SHOWN = "text => document.getElementById('swarm').textContent === text"


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the page in headless Chromium on this machine."""

    nodes: tuple[int, ...] = (10, 100, 1_000)
    """Sizes of the swarm, each in turn."""
    repeats: int = 10
    """Of opening the page, each in a browser context of its own."""
    updates: int = 10
    """After each opening."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(slots=True)
class PageTimes:
    """Milliseconds of each opening or update.

    Attributes:
        state_bytes: One state.
        interactive_ms: Until the page can be used.
        opening_cpu_ms: CPU time of the page's main thread until then.
        update_ms: Until the page shows a new state.
        update_cpu_ms: CPU time of that thread for it.
    """

    state_bytes: int = 0
    interactive_ms: list[float] = field(default_factory=list)
    opening_cpu_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    update_cpu_ms: list[float] = field(default_factory=list)


def thread_ms(chrome: CDPSession) -> float:
    """CPU time of the page's main thread so far."""
    metrics = chrome.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "ThreadTime") * 1e3


def open_once(browser: Browser, server: PageServer, states: list[page_states.State], measured: PageTimes) -> None:
    """Open the page with the first state, click, and bring it the others."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        chrome = context.new_cdp_session(page)
        chrome.send("Performance.enable")
        blank_ms, started = thread_ms(chrome), time.perf_counter()
        page.goto(server.url, wait_until="commit")
        page.get_by_role("button", name="Uptime").click()
        page.wait_for_selector("th.is-uptime[aria-sort]")
        measured.interactive_ms.append((time.perf_counter() - started) * 1e3)
        opened_ms = thread_ms(chrome)
        measured.opening_cpu_ms.append(opened_ms - blank_ms)
        for state in states[1:]:
            started = time.perf_counter()
            server.show(state)
            page.wait_for_function(SHOWN, arg=state["swarm"])
            measured.update_ms.append((time.perf_counter() - started) * 1e3)
        measured.update_cpu_ms.append((thread_ms(chrome) - opened_ms) / max(len(states) - 1, 1))


def measure(options: Options, console: Console) -> dict[int, PageTimes]:
    """All sizes in turns, so that what else the machine does meets each of them."""
    found = {count: PageTimes() for count in options.nodes}
    states = {count: _states(count, options.updates) for count in options.nodes}
    for count, measured in found.items():
        measured.state_bytes = len(json.dumps(states[count][0]))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        with PageServer(states[options.nodes[0]][0]).running() as server:
            for number in range(options.repeats):
                for count, some in states.items():
                    server.show(some[0])
                    open_once(browser, server, some, found[count])
                console.print(f"{number + 1} of {options.repeats}")
        browser.close()
    return found


def _states(nodes: int, updates: int) -> list[page_states.State]:
    found = [page_states.crowd(nodes, LAYERS)]
    for number in range(updates):
        found.append(page_states.later(found[-1], swarm=f"update {number}"))
    return found


def sheet(options: Options, found: dict[int, PageTimes]) -> Sheet:
    """The table."""
    made = Sheet(
        "page_load",
        f"The page with {LAYERS} layers, in headless Chromium, 1280 × 900; {options.repeats} openings of each, "
        f"{options.updates} updates after each; median (95 %)",
        ("nodes", "state, kB", "interactive, ms", "page's thread, ms", "update, ms", "its thread, ms"),
    )
    for count, measured in found.items():
        series = (measured.interactive_ms, measured.opening_cpu_ms, measured.update_ms, measured.update_cpu_ms)
        made.rows.append((f"{count:,}", f"{measured.state_bytes / 1e3:.0f}", *map(_spread, series)))
    slowest = max(median(measured.interactive_ms) for measured in found.values())
    made.notes = [f"Asked: interactive in {LIMIT_MS:,} ms; the slowest median is {slowest:,.0f} ms."]
    made.measured = {
        str(count): {name: getattr(one, name) for name in PageTimes.__slots__} for count, one in found.items()
    }
    return made


def _spread(values: list[float]) -> str:
    high = quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
    return f"{median(values):,.0f} ({high:,.0f})"


def main() -> None:
    """Entry point."""
    options, console = tyro.cli(Options, description=__doc__), make_console()
    if not Path(CHROMIUM).exists():
        sys.exit(f"page_load: needs {CHROMIUM}; on Debian: apt-get install chromium")
    if options.repeats < 1 or not options.nodes:
        sys.exit("page_load: at least one repeat and one number of nodes")
    sheet(options, measure(options, console)).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
