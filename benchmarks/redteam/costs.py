"""Which input costs a reader most of a processor, and most memory, per byte?

A search for each reader of what strangers send: mutants of the dearest inputs so far, for as long as asked. Grammars
and chat templates are read as the programs read them, in workers under leases; Markdown by the chat page in Chromium;
messages and records in this process. Ends with status 1 where one takes more than its reader's bound.

    python -m benchmarks costs --seconds 60 --only grammars templates
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import http.server
import json
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tyro
from playwright.sync_api import sync_playwright

from benchmarks.redteam.fuzzing.parsers import Subject, all_subjects
from benchmarks.sheet import Sheet
from client.dialogue.rendering import RENDERING, TemplateRenderer
from swarm.base.cli import make_console
from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.compute.grammars import COMPILING, GRAMMAR_BYTES, MATCHING, GrammarCompiler
from swarm.demo import TARGET
from swarm.protocol.pick_rules import Grammar, GrammarKind

PARSER_S, PARSER_BYTES = 0.25, 64 << 20
"""What one message of at most 64 KiB may take."""
PAGE_S = 2.0
"""What one text of at most 64 KiB may take of the page."""
SLACK_S = 0.5
"""The system ends a process a little after its lease; other programs run too."""
TOKENS: Final = 4
"""How far into a text a grammar is followed."""
BEST: Final = 16
"""Inputs by each measure that are changed again."""
MAX_BYTES: Final = 1 << 16
CHROMIUM: Final = "/usr/bin/chromium"
ARGUMENTS: Final = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
PAGE: Final = Path(__file__).parents[2] / "client" / "api" / "page"
RENDER: Final = """async (text) => {
  const { render } = await import("/markdown.js");
  const began = performance.now();
  render(document.createElement("div"), text);
  return performance.now() - began;
}"""


@dataclass(frozen=True, slots=True)
class Options:
    """Look for the dearest inputs."""

    seconds: float = 20.0
    """For each reader."""
    seed: int = 1
    """Of the mutants."""
    only: tuple[str, ...] = ()
    """Readers, by the beginnings of their names (default: all)."""
    json: Path | None = None
    """Write the dearest inputs into this file."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one input took.

    Attributes:
        seconds: Of a processor where that is known, else in all.
        memory_bytes: Beyond what was held before; 0 where it is not measured.
    """

    seconds: float
    memory_bytes: int = 0
    is_ended: bool = False


Spend = Callable[[str], Spent]


@dataclass(frozen=True, slots=True)
class Reader:
    name: str
    seeds: Sequence[str]
    mutate: Callable[[random.Random, str], str]
    spend: Spend
    seconds: float
    memory_bytes: int


@dataclass(slots=True)
class Dearest:
    """The dearest inputs of one reader, by one measure: a heap of (measure, number, input, what it took)."""

    measure: Callable[[str, Spent], float]
    kept: list[tuple[float, int, str, Spent]] = field(default_factory=list)

    def add(self, number: int, text: str, spent: Spent) -> None:
        """Keep it, if it is among the dearest."""
        heapq.heappush(self.kept, (self.measure(text, spent), number, text, spent))
        if len(self.kept) > BEST:
            heapq.heappop(self.kept)

    @property
    def best(self) -> tuple[str, Spent]:
        _, _, text, spent = max(self.kept, key=lambda one: one[:2])
        return text, spent


@dataclass(slots=True)
class Search:
    """A search that is over.

    Attributes:
        ended: How many of them a lease ended.
        by_time: Dearest in seconds per byte.
        by_memory: Dearest in memory per byte.
        largest: What took most memory in all.
    """

    reader: Reader
    tried: int = 0
    ended: int = 0
    by_time: Dearest = field(default_factory=lambda: Dearest(lambda text, took: took.seconds / (len(text) + 8)))
    by_memory: Dearest = field(default_factory=lambda: Dearest(lambda text, took: took.memory_bytes / (len(text) + 8)))
    longest: Dearest = field(default_factory=lambda: Dearest(lambda _, took: took.seconds))
    largest: Dearest = field(default_factory=lambda: Dearest(lambda _, took: took.memory_bytes))

    def run(self, seconds: float, rng: random.Random) -> None:
        until = time.monotonic() + seconds
        for text in self.reader.seeds:
            self._try(text)
        while time.monotonic() < until:
            self.step(rng)

    def step(self, rng: random.Random) -> None:
        """Try one mutant, mostly of one of the dearest."""
        pools = (self.by_time, self.by_memory, self.longest)
        parent = rng.choice(rng.choice(pools).kept)[2] if rng.random() < 0.9 else rng.choice(self.reader.seeds)
        self._try(self.reader.mutate(rng, parent)[:MAX_BYTES])

    def _try(self, text: str) -> None:
        spent = self.reader.spend(text)
        self.tried += 1
        self.ended += spent.is_ended
        for one in (self.by_time, self.by_memory, self.longest, self.largest):
            one.add(self.tried, text, spent)

    @property
    def is_held(self) -> bool:
        """Whether nothing took more than it may."""
        slowest, largest = self.longest.best[1], self.largest.best[1]
        return slowest.seconds <= self.reader.seconds + SLACK_S and largest.memory_bytes <= self.reader.memory_bytes

    def row(self) -> tuple[str, ...]:
        (text, spent), (_, longest), (_, largest) = self.by_time.best, self.longest.best, self.largest.best
        return (
            self.reader.name,
            f"{self.tried:,}",
            f"{spent.seconds * 1e3 / len(text):.3g} ms ({len(text):,} B)" if text else "0",
            f"{longest.seconds:.3g} s",
            f"{self.reader.seconds:.3g} s",
            f"{largest.memory_bytes / 2**20:.3g} MiB",
            f"{self.ended:,}",
            "held" if self.is_held else "**broken**",
        )


# Mutants of texts


def mutate_text(pieces: Sequence[str]) -> Callable[[random.Random, str], str]:
    """Mutants that repeat, nest and splice, with pieces that mean something to the reader."""

    def mutate(rng: random.Random, text: str) -> str:
        at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        inner = text[at:end]
        match rng.randrange(6):
            case 0:
                return text[:at] + rng.choice(pieces) + text[at:]
            case 1:
                return text[:at] + inner * rng.choice((2, 3, 8, 40)) + text[end:]
            case 2:
                before, _, after = rng.choice([piece for piece in pieces if "…" in piece]).partition("…")
                return text[:at] + before + inner + after + text[end:]
            case 3:
                return text[:at] + text[end:] or text
            case 4:
                return text[:at] + str(rng.choice((0, 1, 9, 30, 100, 1_000, 10**6))) + text[at:]
            case _:
                return text + rng.choice(pieces)

    def plain(rng: random.Random, text: str) -> str:
        return mutate(rng, text).replace("…", "")

    return plain


REGEX = (
    "(…){30}",
    "(…){1,30}",
    "(…)*",
    "(…)+",
    "(…|…)",
    "a",
    ".",
    "[a-z]",
    "\\w",
    "(?i:…)",
    "(…)?",
    "(.*…){9}",
    "&",
    "|",
)
LARK = (
    "start: …\n",
    "x: /…/\n",
    "(…)~30",
    "(…)~1..30",
    "(…)*",
    "(…)|(…)",
    ' "a" ',
    " x ",
    "/[a-z]{30}/",
    " & /…/",
    "\n",
)
SCHEMA = (
    '{"type":"object","properties":{"a":…}}',
    '{"type":"array","items":…,"maxItems":1000}',
    '{"anyOf":[…,{"type":"null"}]}',
    '{"allOf":[…,{"type":"object"}]}',
    '{"type":"string","pattern":"(…){30}"}',
    '{"type":"string","maxLength":100000}',
    '{"enum":["a","b"]}',
    '{"$ref":"#"}',
    '{"type":"number","multipleOf":0.0001}',
)
JINJA = (
    "{% for a in range(99999) %}…{% endfor %}",
    "{% for m in messages %}…{% endfor %}",
    "{% set a = a ~ a %}",
    "{% macro f(x) %}…{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ '…' * 9999 }}",
    "{{ 2.0 ** 100000 }}",
    "{{ 1/0 }}",
    "{{ messages|tojson }}",
    "{% if true %}…{% endif %}",
    "{{ range(999999)|list|length }}",
)
MARKDOWN = (
    "_…_", "*…*", "[…](", "`…`", "~~…~~", "> …", "- …\n", "\n\n", "|…|", "```python\n…\n```", "\\(…\\)", "$…$", "<…>",
    "&amp;",    "\\frac{…}{…}", "{…}", "_a", "http://a.b/…", "f'{…", "/*…",
)  # fmt: skip


# Readers


def parser_reader(subject: Subject) -> Reader:
    """A parser of messages, in this process; what it may raise ends the input."""

    def spend(text: str) -> Spent:
        data = text.encode("latin-1")
        began = time.thread_time()
        _parsed(subject, data)
        took = time.thread_time() - began
        tracemalloc.start()
        _parsed(subject, data)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return Spent(took, held)

    def mutate(rng: random.Random, text: str) -> str:
        return subject.mutate(rng, text.encode("latin-1")).decode("latin-1")

    seeds = [seed.decode("latin-1") for seed in subject.seeds]
    return Reader(f"message: {subject.name}", seeds, mutate, spend, PARSER_S, PARSER_BYTES)


def _parsed(subject: Subject, data: bytes) -> None:
    with suppress(*subject.errors):
        subject.parse(data)


class Bill:
    """What grammars took, as the node's accounts hear of it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def grammar_took(self, owner: str, seconds: float) -> None:
        self.seconds += seconds

    def grammar_wait_s(self, owner: str) -> float:
        """0 s: the search is the only asker, and never pays for what it took."""
        return 0.0


def grammar_readers(loop: asyncio.AbstractEventLoop) -> Iterator[Reader]:
    """Grammars of each kind, compiled and followed for some tokens as a tail does."""
    bill = Bill()
    compiler = GrammarCompiler.of_folder(TARGET, bill)

    async def follow(grammar: Grammar) -> Spent:
        bill.seconds, is_ended, held = 0.0, False, 0
        try:
            found = await compiler.compile(grammar)
            picked: list[int] = []
            for _ in range(TOKENS):
                asked = {"session": 0, "ends": [0], "kept": len(picked[:-1]), "new": picked[-1:], "size": 256}
                _, masks = await found.masks(lambda asked=asked: {**asked, "paths": [[]]})  # type: ignore[misc]
                held = max(held, found.held_bytes)
                picked.append(next((place for place in range(8 * 256) if masks[place >> 3] >> (place & 7) & 1), 0))
            found.close()
        except RemoteProtocolError:
            is_ended = True
        except ConfigError:
            pass
        compiler._kept.clear()
        return Spent(bill.seconds, held, is_ended)

    def reader(kind: GrammarKind, name: str, seeds: Sequence[str], pieces: Sequence[str]) -> Reader:
        def spend(text: str) -> Spent:
            return asyncio.run_coroutine_threadsafe(follow(Grammar(kind, text)), loop).result()

        lease_s = COMPILING.cpu_s + TOKENS * MATCHING.cpu_s
        return Reader(f"grammar: {name}", seeds, mutate_text(pieces), spend, lease_s, GRAMMAR_BYTES)

    many = " & ".join(f"/.*{chr(97 + number % 26)}.{{{number}}}.*/" for number in range(12))
    yield reader("regex", "regex", ["a{30}", "(((((a{30}){30}){30}){30}){30})", "[a-z]*(b|c)"], REGEX)
    yield reader("lark", "Lark", ['start: "a"\n', f"start: X\nX: {many}\n", "start: x\nx: x x | /a/\n"], LARK)
    yield reader("json_schema", "JSON schema", ['{"type":"number"}', SCHEMA[0].replace("…", "{}"), "{}"], SCHEMA)


def template_reader() -> Reader:
    """A checkpoint's chat template, rendered for a short conversation."""
    renderer = TemplateRenderer()
    values = {"conversations": [[{"role": "user", "content": "hello"}]]}
    renderer.render("", values)

    def spend(text: str) -> Spent:
        began = time.perf_counter()
        is_ended = False
        try:
            renderer.render(text, values)
        except ConfigError as error:
            is_ended = "took more" in str(error)
        return Spent(time.perf_counter() - began, 0, is_ended)

    seeds = ["{% for m in messages %}{{ m.content }}{% endfor %}", "{{ messages }}", JINJA[0].replace("…", "a")]
    return Reader("template", seeds, mutate_text(JINJA), spend, RENDERING.wall_s, 1 << 30)


@contextmanager
def page_reader() -> Iterator[Reader]:
    handler = functools.partial(_Quiet, directory=str(PAGE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/favicon.svg")

        def spend(text: str) -> Spent:
            return Spent(page.evaluate(RENDER, text) / 1e3)

        seeds = ["_a" * 900, "**b**\n\n- c", "```python\nx\n```", "\\(a^2\\)"]
        yield Reader("Markdown", seeds, mutate_text(MARKDOWN), spend, PAGE_S, 1 << 30)
        browser.close()
        server.shutdown()


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own: Playwright has this one's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""


def main() -> None:
    """Search and report; the exit status says whether every reader kept its bound."""
    options = tyro.cli(Options)
    console = make_console(soft_wrap=True)
    searches: list[Search] = []
    with ExitStack() as stack:
        loop = stack.enter_context(running_loop())
        readers = [template_reader(), *grammar_readers(loop), *map(parser_reader, all_subjects())]
        if Path(CHROMIUM).exists():
            readers.insert(0, stack.enter_context(page_reader()))
        chosen = [one for one in readers if not options.only or one.name.startswith(options.only)]
        for reader in chosen:
            search = Search(reader)
            search.run(options.seconds, random.Random(options.seed))
            searches.append(search)
            console.print(" · ".join(search.row()), markup=False, highlight=False)
    columns = ("reader", "inputs", "most per byte", "longest", "bound", "most memory", "ended", "verdict")
    made = Sheet("costs", f"the dearest inputs that were found in {options.seconds:g} s for each reader", columns)
    made.rows = [search.row() for search in searches]
    made.show(console)
    if options.json is not None:
        options.json.write_text(json.dumps({one.reader.name: one.longest.best[0] for one in searches}, indent=1))
    broken = [search.reader.name for search in searches if not search.is_held]
    sys.exit(f"not held: {', '.join(broken)}" if broken else 0)
