"""Is a text still the same when machines die, hang, are cut off or send garbage?

Real processes on hosts of an emulated network with 25 ms and 100 Mbit/s per link: three replicas per span, one client.
Every fault has an undisturbed run of the same prompt and seed beside it. The plan is seeded and printed as it goes.

    sudo python -m benchmarks faults --record
    sudo python -m benchmarks faults --strikes 9 --only KILL
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import tyro
from rich.console import Console

from benchmarks.emulation.json_program import JsonProgram
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from benchmarks.emulation.swarm import SPANS
from benchmarks.recovery.fault_hosts import Host, Hosts, open_client, open_hosts
from benchmarks.recovery.fault_plan import (
    DEADLY,
    LONG_TOKENS,
    MBIT_PER_S,
    NEW_TOKENS,
    ONE_WAY_MS,
    OTHERS,
    POSITIONS,
    SWEEPS,
    Fault,
    FaultOutcome,
    FaultText,
    ObservedText,
    Phase,
    PlannedFault,
    cell,
    plan,
    read_outcomes,
    summary,
)
from benchmarks.sheet import Recording, Sheet
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console

TREE = 8
CHUNK, LONG_CHUNK = 64, 256
ATTEMPTS = 3
QUIET, QUIET_LIMIT_S = 0.35, 20.0
"""A text begins when less of the machine is used than that: who has just started still joins the directory."""
MOST_STOLEN = 0.1
"""A virtual machine whose host takes more than that of its time is disturbed; those texts are counted all the same."""
PREFILL_SWEEP = 2
"""A fault in the prompt comes after this sweep of it was sent."""
LINK = LinkShape(delay_ms=ONE_WAY_MS, mbit=MBIT_PER_S)
LINKS = "25 ms and 100 Mbit/s links"
NOTES = (
    "Cells: texts equal to the undisturbed run, token for token / faults · median (worst) recovery in seconds.",
    "Recovery: the longest pause between two replies that brought tokens, of which the second came after the fault, "
    "the disturbed sweep's own time included; in the prompt, how much later the first token came than undisturbed. "
    "Of it is subtracted what the nodes computed for replays, as they count it, and the prompt's rows at the links' "
    "rate once per snapshot that a hop after the first one took.",
    "replay: another hop is killed first, and the fault comes while that is repaired. drain: the hop is told to "
    "leave (SIGTERM), and the fault comes while its sessions move. A hung machine is stopped (SIGSTOP) with all its "
    "processes.",
)


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Let faults happen to hops in every phase, and compare texts and pauses."""

    strikes: int = 108
    """How many deadly ones at least; 54 combinations of position, phase and fault, each equally often."""
    seed: int = 0
    """Of all that is random."""
    only: tuple[Fault, ...] = ()
    """Only these faults."""
    kind: NetworkKind | None = None
    """tun needs root; left out: the best that this machine allows."""
    logs: Path | None = None
    """Keep the programs' logs in this folder."""
    again: Path | None = None
    """Inject no fault: make the table of measurements that were written before."""


class FaultBench:
    def __init__(self, hosts: Hosts, client: JsonProgram) -> None:
        self._hosts = hosts
        self._client = client
        self._plain: dict[FaultText, ObservedText] = {}
        self._hops: list[Host] = []

    async def outcome(self, planned: PlannedFault) -> FaultOutcome:
        """One fault, after the undisturbed text if there is none yet."""
        await self._make_whole(3 if planned.phase is Phase.REPLAY else 2)
        if planned.text not in self._plain:
            self._plain[planned.text], _ = await self._generate(planned.text, None)
        for _ in range(ATTEMPTS):
            await _quiet()
            before = psutil.cpu_times()
            disturbed, struck_at = await self._generate(planned.text, planned)
            stolen = _stolen(before, psutil.cpu_times())
            await self._hosts.restore()
            if struck_at is not None:
                break
            planned = replace(planned, sweep=SWEEPS[0])  # the text ended first: earlier, then
            await self._make_whole(3 if planned.phase is Phase.REPLAY else 2)
        return FaultOutcome(planned, self._plain[planned.text], disturbed, struck_at, stolen)

    async def _make_whole(self, replicas: int) -> None:
        """Every span has so many living replicas."""
        if any(self._hosts.replicas(span) < replicas for span in SPANS):
            await self._hosts.revive()

    async def _generate(self, text: FaultText, planned: PlannedFault | None) -> tuple[ObservedText, float | None]:
        await self._client.send(
            {
                "prompt": text.number,
                "prompt_tokens": text.prompt_tokens,
                "new_tokens": NEW_TOKENS,
                "temperature": text.temperature,
                "seed": text.seed,
                "tree": TREE,
                "chunk": LONG_CHUNK if text.prompt_tokens == LONG_TOKENS else CHUNK,
                "nodes": self._hosts.addresses,
                "absent": self._hosts.dead,
            }
        )
        script = FaultTrigger(planned, self._hosts, self._prefills(text)) if planned is not None else None
        while (event := await self._client.next())["event"] != "told":
            if script is not None:
                await script.hear(event)
        arrivals = tuple((when, count) for when, count in event["arrivals"])
        disturbed = ObservedText(
            event["began"], tuple(event["tokens"]), arrivals, tuple(event["repairs"]), event["error"], event["paths"]
        )
        return disturbed, script.struck_at if script is not None else None

    @staticmethod
    def _prefills(text: FaultText) -> int:
        chunk = LONG_CHUNK if text.prompt_tokens == LONG_TOKENS else CHUNK
        return -(-(text.prompt_tokens - 1) // chunk)


class FaultTrigger:
    """Injects a fault when the client reports what the fault waits for."""

    def __init__(self, planned: PlannedFault, hosts: Hosts, prefills: int) -> None:
        self.struck_at: float | None = None
        self._planned = planned
        self._hosts = hosts
        self._prefills = prefills
        self._hops: list[Host] = []
        self._drafts = 0
        self._has_begun = False

    async def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "begin":
            self._hops = [self._hosts.of(peer) for peer in event["hops"]]
        self._drafts += event["event"] == "draft"
        if self.struck_at is not None or not self._hops:
            return
        planned = self._planned
        if self._has_begun:
            if event["event"] == "reroute":
                await _until(event["at"] + planned.again_ms / 1e3)
                await self._hit([self._hosts.of(peer) for peer in event["hops"]])
        elif self._is_cue(event):
            await _until(event["at"] + planned.delay_ms / 1e3)
            match planned.phase:
                case Phase.REPLAY:
                    self._has_begun = True
                    await self._hosts.inject(Fault.KILL, self._hops[planned.before], 0)
                case Phase.DRAIN:
                    self._has_begun = True
                    await self._hosts.leave(self._hops[planned.position])
                case _:
                    await self._hit(self._hops)

    def _is_cue(self, event: dict[str, Any]) -> bool:
        phase, sweep = self._planned.phase, self._planned.sweep
        if phase is Phase.DRAFTING:
            return event["event"] == "draft" and self._drafts >= sweep
        if event["event"] != "send":
            return False
        number, commits = int(event["sequence"]), bool(event["commits"])
        if phase is Phase.PREFILL:
            return number == PREFILL_SWEEP
        return number >= self._prefills + sweep and (commits or phase is not Phase.COMMIT)

    async def _hit(self, hops: Sequence[Host]) -> None:
        """Inject the fault: into the old route's hop if it drains, else into the newest route's."""
        planned = self._planned
        route = self._hops if planned.phase is Phase.DRAIN else hops
        victim = route[planned.position]
        before = route[planned.position - 1].number if planned.position else self._hosts.client
        self.struck_at = time.monotonic()
        await self._hosts.inject(planned.fault, victim, before)


async def _quiet() -> None:
    """Wait until little of the machine is used, but not for ever."""
    psutil.cpu_percent()
    for _ in range(int(QUIET_LIMIT_S)):
        await asyncio.sleep(1.0)
        if psutil.cpu_percent() < 100 * QUIET:
            return


def _stolen(before: Any, after: Any) -> float:  # noqa: ANN401 - psutil names no public type
    """Which part of the machine's time its host took."""
    passed = sum(after) - sum(before)
    return (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / passed if passed > 0 else 0.0


async def _until(when: float) -> None:
    await asyncio.sleep(max(when - time.monotonic(), 0.0))


def sheet(outcomes: Sequence[FaultOutcome], options: Options, network: str) -> Sheet:
    made = Sheet(
        "faults",
        f"Faults in a chain of 3 hops, {network}, fp32, tree of {TREE}, {NEW_TOKENS} tokens after 200 or 900",
        ("phase, hop", *DEADLY),
        notes=[*NOTES, f"Seed {options.seed}; greedy and temperature 1 alternate."],
        measured={"seed": options.seed, "outcomes": [_plain(one) for one in outcomes]},
    )

    def of(wanted: Callable[[PlannedFault], bool]) -> list[FaultOutcome]:
        return [one for one in outcomes if wanted(one.planned)]

    for phase in Phase:
        for position, name in enumerate(POSITIONS):
            cells = [
                cell(of(lambda s, f=fault, p=phase, n=position: (s.fault, s.phase, s.position) == (f, p, n)))  # type: ignore[misc]
                for fault in DEADLY
            ]
            made.rows.append((f"{phase}, {name}", *cells))
    made.rows.append(("**all**: median, p95", *(summary(of(lambda s, f=fault: s.fault is f)) for fault in DEADLY)))  # type: ignore[misc]
    for fault in OTHERS:
        some = of(lambda s, f=fault: s.fault is f)  # type: ignore[misc]
        if some:
            made.notes.append(f"{fault}: {summary(some)}.")
    return made


def _plain(outcome: FaultOutcome) -> dict[str, Any]:
    planned = outcome.planned
    return {
        "strike": asdict(planned),
        "same": outcome.is_same,
        "recovery_s": outcome.recovery_s,
        "pause_s": outcome.pause_s,
        "stolen": outcome.stolen,
        "struck_at_s": outcome.struck_at - outcome.disturbed.began if outcome.struck_at is not None else None,
        "told": asdict(outcome.disturbed),
        "plain_arrivals": outcome.plain.arrivals,
    }


async def run(options: Options, console: Console) -> Sheet:
    strikes = plan(options.strikes, options.seed, options.only)
    outcomes: list[FaultOutcome] = []
    with tempfile.TemporaryDirectory(prefix="canopy-faults-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(exist_ok=True)
        async with open_network(NetworkPlan(len(SPANS) * 3 + 2, LINK), options.kind) as net:
            console.print(f"{net.kind} network ({net.reason}), {len(strikes)} faults, seed {options.seed}")
            async with open_hosts(net, folder) as hosts, open_client(hosts, net, folder) as client:
                bench = FaultBench(hosts, client)
                for number, planned in enumerate(strikes, 1):
                    outcomes.append(await bench.outcome(planned))
                    console.print(f"{number:3} {_line_of(outcomes[-1])}", soft_wrap=True, markup=False, highlight=False)
            network = LINKS if net.kind is NetworkKind.TUN else f"loopback ({net.reason})"
    made = table(outcomes, options, network)
    if hosts.failed_starts:
        made.notes.append(f"{hosts.failed_starts} restarts of nodes failed and were tried again.")
    return made


def table(outcomes: list[FaultOutcome], options: Options, network: str) -> Sheet:
    """The table and what is to be said of the machine that it was made on."""
    made = sheet(outcomes, options, network)
    calm = [one for one in outcomes if one.stolen <= MOST_STOLEN]
    if len(calm) < len(outcomes):
        parts = (f"{fault} {summary([one for one in calm if one.planned.fault is fault])}" for fault in DEADLY)
        made.notes.append(
            f"During {len(outcomes) - len(calm)} of the {len(outcomes)} texts the virtual machine's host took more "
            f"than {MOST_STOLEN:.0%} of the CPU time; without them: {'; '.join(parts)}."
        )
    missed = sum(one.struck_at is None for one in outcomes)
    if missed:
        made.notes.append(f"{missed} texts ended before their fault, {ATTEMPTS} times each: they do not count.")
    return made


def _line_of(outcome: FaultOutcome) -> str:
    times = (outcome.recovery_s, outcome.replay_s)
    recovery = "{:.2f} s beside {:.2f} s of replay".format(*times) if times[0] is not None else "-"
    same = "same" if outcome.is_same else outcome.disturbed.error or "ANOTHER TEXT"
    generations = [repair["generation"] for repair in outcome.disturbed.repairs]
    missed = "" if outcome.struck_at is not None else ", without its fault"
    recovery += f" ({outcome.stolen:.0%} stolen)"
    return f"{outcome.planned.name}: {same}{missed}, {recovery}, generations {generations}, {outcome.disturbed.paths}"


def main() -> None:
    """Inject, print, and fail if a text differs."""
    options = tyro.cli(Options)
    console = make_console()
    if options.again is not None:
        made = table(read_outcomes(json.loads(options.again.read_text())), options, LINKS)
    else:
        made = asyncio.run(run(options, console))
    made.finish(console, options)
    wrong = [one for one in made.measured["outcomes"] if not one["same"]]
    if wrong:
        sys.exit(f"faults: {len(wrong)} texts differ from the undisturbed ones or ended early")
