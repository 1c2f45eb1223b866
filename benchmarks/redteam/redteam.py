"""What do honest users feel while strangers attack their swarm?

Starts a live swarm on loopback, with two honest users who generate texts that are known, and runs every attack against
it, one after another. Each is measured in pairs: undisturbed, then attacked, then the seconds after it. The attacker is
a process of its own with the lowest priority and a bounded rate. What honest users must not feel: a wrong or lost text,
less than 0.8 of their speed while it lasts, or less than all of it ten seconds later. A row that is not held after its
pairs is measured three times as long. No program may end, and memory and open files are bounded. Ends with status 1
when an attack broke something that is not named as a limit.

    python -m benchmarks redteam --list
    python -m benchmarks redteam --only session-hijack reply-theft
    python -m benchmarks redteam --kind HOPS --record      # these rows of the table, and no other
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks.redteam.attack import Attack, Kind
from benchmarks.redteam.honest import HonestText
from benchmarks.redteam.listing import all_attacks, find_attack
from benchmarks.redteam.range import Range, ground_as_json, open_range
from benchmarks.redteam.table import merged, recorded, table
from benchmarks.redteam.verdict import BACK_RATIO, HELD_RATIO, Felt, Pair, Verdict, Window
from benchmarks.sheet import Recording, Sheet
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.cli import make_console
from swarm.base.tasks import TaskScope

AFTER_S = 10.0
"""When it must be as before."""
SETTLE_S = 3.0
"""Of that time, what the first texts may still feel."""
READY_S = 90.0
AGAIN = 3
"""Where a row is not held after its pairs, so many times as many are made; all of them count."""
OVER_S = 45.0
"""A text that was begun under an attack is waited for so long."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Attack a live swarm."""

    only: tuple[str, ...] = ()
    """Names of attacks (default: all)."""
    kind: Kind | None = None
    """Only attacks of this kind."""
    list: bool = False
    """Name the attacks and end."""
    pairs: int = 3
    """Pairs of undisturbed and attacked times for each."""
    seconds: float = 6.0
    """Length of each time."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it, after each attack; rows of attacks that do
    not run stay."""


@dataclass(slots=True)
class Cost:
    """What an attack took, over all its pairs."""

    seconds: float = 0.0
    sent_bytes: int = 0
    connections: int = 0
    identities: int = 0
    acts: int = 0
    refused: int = 0
    processor_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, news: dict[str, Any], seconds: float) -> None:
        tally = news["over"]
        self.seconds += seconds
        self.processor_s += news["processor_s"]
        self.sent_bytes += tally["sent_bytes"]
        self.connections = max(self.connections, tally["connections"])
        self.identities = max(self.identities, tally["identities"])
        self.acts += tally["acts"]
        self.refused += tally["refused"]
        self.notes += [note for note in tally["notes"] if note not in self.notes]

    def __str__(self) -> str:
        second = max(self.seconds, 1e-9)
        parts = [f"{_amount(self.sent_bytes / second)}B/s", f"{self.processor_s / second:.2f} cores"]
        parts += [f"{self.connections} connections"] if self.connections else []
        parts += [f"{self.identities} identities"] if self.identities else []
        return ", ".join(parts)


@dataclass(slots=True)
class Outcome:
    attack: Attack
    felt: Felt
    cost: Cost

    @property
    def verdict(self) -> Verdict:
        """How it ended; a control has no other word for it, as long as nothing broke."""
        found = self.felt.verdict(self.attack.limit, self.attack.slows)
        return Verdict.CONTROL if self.attack.is_control and found in {Verdict.HELD, Verdict.SLOWED} else found

    def row(self) -> tuple[str, ...]:
        felt = self.felt
        touched = felt.touched
        grown = max(felt.growth_mb.values(), default=0.0)
        return (
            self.attack.name,
            str(self.cost),
            f"{felt.ratio:.2f}",
            f"{felt.slow_ratio:.2f}",
            f"{felt.after_ratio:.2f}",
            f"{sum(text.right for text in touched)}/{len(touched)}",
            f"{grown:+.0f}",
            str(max((files for files, _ in felt.files.values()), default=0)),
            f"{self.verdict}{', burns' if self.attack.burns else ''}",
        )

    def why(self) -> list[str]:
        felt, is_held = self.felt, self.verdict in {Verdict.HELD, Verdict.CONTROL}
        lines = [] if is_held else [*felt.troubles, *felt.broken]
        if not is_held and felt.ratio < HELD_RATIO:
            lines.append(
                f"who keeps its connection has {felt.first_ratio:.2f} of its speed, in {len(felt.pairs)} pairs"
            )
        if self.verdict is Verdict.NAMED:
            lines.insert(0, self.attack.limit or self.attack.slows)
        return [f"{self.attack.name}: {line}" for line in lines]

    def measured(self, options: Options) -> dict[str, Any]:
        """Everything about it, for JSON and for the table."""
        felt = self.felt
        return {
            "about": self.attack.about,
            "kind": self.attack.kind,
            "verdict": self.verdict,
            "pairs": len(self.felt.pairs),
            "seconds": options.seconds,
            "cells": list(self.row()),
            "why": self.why(),
            "cost": asdict(self.cost),
            "felt": {
                "ratio": felt.ratio,
                "first_ratio": felt.first_ratio,
                "newcomers_s": felt.newcomers_s,
                "slow_ratio": felt.slow_ratio,
                "after_ratio": felt.after_ratio,
                "pairs": [[pair.ratio, pair.slow_ratio] for pair in felt.pairs],
                "broken": felt.broken,
                "growth_mb": felt.growth_mb,
                "files": felt.files,
                "log_kb_per_s": felt.log_kb_per_s,
                "page": felt.page,
            },
        }


class Attacker:
    """The attacker's process, as the range sees it."""

    def __init__(self, program: RunningProgram) -> None:
        self._program = program
        self._read = 0

    def order(self, *words: str) -> None:
        assert self._program.process.stdin is not None
        self._program.process.stdin.write((" ".join(words) + "\n").encode())

    async def news(self, limit_s: float) -> dict[str, Any]:
        """Its next line; one that says so where none comes."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            lines = self._program.log.read_text(errors="replace").split("\n")[:-1]
            for line in lines[self._read :]:
                self._read += 1
                if line.startswith("{"):
                    told: dict[str, Any] = json.loads(line)
                    return told
            if self._program.process.returncode is not None:
                break
            await asyncio.sleep(0.02)  # a log file has no event to wait for
        last = "; ".join(self._program.log.read_text(errors="replace").strip().splitlines()[-3:])
        return {"trouble": f"the attacker said nothing: {last}"}


class Campaign:
    def __init__(self, here: Range, attack: Attack, options: Options, folder: Path) -> None:
        self._here = here
        self._attack = attack
        self._options = options
        self._folder = folder

    async def run(self) -> Outcome:
        """All its pairs, and the time after."""
        felt, cost = Felt(), Cost()
        breaches: list[str] = []
        troubles: list[str] = []
        windows: list[tuple[Window, Window]] = []
        arguments = ["benchmarks.redteam.attacker", self._attack.name, ground_as_json(self._here.ground)]
        before, logs = self._memory(time.time() - 2.0), self._logs()
        began = time.time()
        async with start_program(f"attacker {self._attack.name}", arguments, self._folder) as program:
            attacker = Attacker(program)
            seconds = max(self._options.seconds, self._attack.lasts_s)
            pairs = self._options.pairs if seconds == self._options.seconds else 1
            for number in range(AGAIN * pairs):
                if number >= pairs and self._pairs(windows).ratio >= HELD_RATIO:
                    break
                sealed = [record.sealed.hex() for record in await self._here.records()]
                attacker.order("prepare", *sealed)
                news = await attacker.news(READY_S)
                if "ready" not in news:
                    troubles.append(str(news.get("trouble")))
                    break
                quiet = await self._undisturbed()
                attacker.order("go")
                attacked = await self._pass(seconds)
                attacker.order("stop")
                windows.append((quiet, attacked))
                news = await attacker.news(READY_S)
                if "over" in news:
                    cost.add(news, attacked.ended - attacked.began)
                    breaches += [found for found in news["over"]["breaches"] if found not in breaches]
                if news.get("trouble"):
                    troubles.append(news["trouble"])
        lasted_s = time.time() - began
        felt.log_kb_per_s = {name: (size - logs[name]) / lasted_s / 1e3 for name, size in self._logs().items()}
        after = await self._pass(AFTER_S)
        await self._until_over(after.began)
        felt.pairs = self._pairs(windows).pairs
        felt.after = self._begun_in(Window(after.began + SETTLE_S, after.ended))
        if felt.after_ratio < BACK_RATIO:  # some seconds of few texts; from then on all must be as before
            later = await self._pass(AFTER_S)
            await self._until_over(later.ended)
            felt.after = self._begun_in(later)
        felt.breaches, felt.troubles, felt.ended = breaches, troubles, self._here.ended()
        self._measure(felt, before, began, [attacked for _, attacked in windows])
        return Outcome(self._attack, felt, cost)

    def _pairs(self, windows: Sequence[tuple[Window, Window]]) -> Felt:
        users = self._here.texts()
        pairs = []
        for quiet, attacked in windows:
            before_it = [[text for text in texts if quiet.holds(text)] for texts in users]
            pairs.append(Pair(before_it, [[text for text in texts if attacked.touches(text)] for texts in users]))
        return Felt(pairs)

    def _begun_in(self, window: Window) -> list[list[HonestText]]:
        return [[text for text in texts if window.began <= text.began < window.ended] for texts in self._here.texts()]

    async def _pass(self, seconds: float) -> Window:
        began = time.time()
        await asyncio.sleep(seconds)
        return Window(began, time.time())

    async def _undisturbed(self) -> Window:
        """Until each user had a whole text, on a slow machine: else there would be nothing to compare with."""
        window = await self._pass(self._options.seconds)
        until = time.monotonic() + OVER_S
        while time.monotonic() < until and not self._here.ended():
            window = Window(window.began, time.time())
            if all(any(window.holds(text) for text in some) for some in self._here.texts()):
                break
            await asyncio.sleep(0.2)
        return window

    async def _until_over(self, moment: float) -> None:
        """Wait until no text runs that was begun before a moment."""
        until = time.monotonic() + OVER_S
        while time.monotonic() < until and not self._here.ended():
            if all(some and some[-1].began >= moment for some in self._here.texts()):
                return
            await asyncio.sleep(0.2)

    def _logs(self) -> dict[str, int]:
        return {name: program.log.stat().st_size for name, program in self._here.programs.items()}

    def _memory(self, since: float) -> dict[str, float]:
        return {
            name: median([sample.resident_mb for sample in samples if sample.at >= since] or [0.0])
            for name, samples in self._here.samples.items()
        }

    def _measure(self, felt: Felt, before: dict[str, float], began: float, attacked: Sequence[Window]) -> None:
        last = self._memory(time.time() - 2.0)
        for name, samples in self._here.samples.items():
            felt.growth_mb[name] = last[name] - before.get(name, last[name])
            felt.files[name] = max((sample.files for sample in samples if sample.at >= began), default=(0, 1))
        looks = [read for read in self._here.reads if any(one.began <= read.at < one.ended for one in attacked)]
        felt.page = len(looks), sum(read.right for read in looks)


class RedTeam:
    """All the attacks that were asked for; a range that was broken or stained is replaced.

    Attributes:
        outcomes: so far, in the order in which they ran.
    """

    def __init__(self, options: Options, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._count = 0
        self.outcomes: list[Outcome] = []

    def table(self) -> Sheet:
        """All that was measured so far; with `--record` also what was recorded of other attacks."""
        rows = {one.attack.name: one.measured(self._options) for one in self.outcomes}
        return table(merged(recorded() if self._options.record else {}, rows, all_attacks()))

    async def run(self, attacks: Sequence[Attack]) -> None:
        left = list(attacks)
        console = make_console(soft_wrap=True)
        while left:
            async with self._range() as here:
                while left:
                    attack = left.pop(0)
                    outcome = await Campaign(here, attack, self._options, self._folder).run()
                    self.outcomes.append(outcome)
                    console.print(" · ".join(outcome.row()), markup=False, highlight=False)
                    for line in [*outcome.why(), *outcome.cost.notes]:
                        console.print(f"    {line}", markup=False, highlight=False)
                    if self._options.record:  # a run of an hour that is cut off has not been for nothing
                        self.table().record()
                    if attack.stains or outcome.verdict not in {Verdict.HELD, Verdict.SLOWED, Verdict.CONTROL}:
                        break

    @asynccontextmanager
    async def _range(self) -> AsyncIterator[Range]:
        self._count += 1
        folder = self._folder / f"range {self._count}"
        folder.mkdir()
        async with open_range(folder) as here, TaskScope() as scope:
            scope.spawn(here.watch())
            await asyncio.sleep(2.0)  # what is before the first attack is looked at too
            yield here


def _amount(value: float) -> str:
    """A number with a prefix: 1.2 M, 340 k, 12 ."""
    for scale, prefix in ((1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.0f} "


def main() -> None:
    """Run and report; the exit status says whether everything was held or named."""
    options = tyro.cli(Options)
    console = make_console(soft_wrap=True)
    attacks = [find_attack(name) for name in options.only] or list(all_attacks().values())
    attacks = [one for one in attacks if options.kind in {None, one.kind}]
    if options.list:
        for one in attacks:
            console.print(f"{one.kind:<12} {one.name:<28} {one.about}", markup=False, highlight=False)
        return
    with tempfile.TemporaryDirectory(prefix="canopy-redteam-") as name:
        team = RedTeam(options, Path(name))
        asyncio.run(team.run(attacks))
    team.table().finish(console, options)
    right = {Verdict.HELD, Verdict.NAMED, Verdict.CONTROL}
    wrong = [one.attack.name for one in team.outcomes if one.verdict not in right]
    sys.exit(f"not held: {', '.join(wrong)}" if wrong else 0)
