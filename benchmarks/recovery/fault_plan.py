"""Which fault hits which hop in which phase of which text: a seeded plan, and what the outcomes amount to. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

POSITIONS = ("first", "middle", "tail")
NEW_TOKENS = 32
PROMPT_TOKENS, LONG_TOKENS = 200, 900
PROMPTS, SEED = 2, 7
LONG_EVERY = 4
"""One in so many texts has the long prompt."""
SWEEPS = (2, 5)
"""A fault while decoding comes in one of these decode sweeps."""
ONE_WAY_MS = 25.0
MBIT_PER_S, ROW_BYTES = 100.0, 768
"""Of the links, and of the demo target's hidden rows in fp32."""


class Fault(StrEnum):
    """What happens to a machine."""

    KILL = "kill -9"
    HANG = "hang"
    CUT = "cut"
    ONE_WAY = "one-way cut"
    SLOW = "slow link"
    CORRUPT = "corrupted frame"


class Phase(StrEnum):
    """What the session is doing when the fault comes."""

    PREFILL = "prefill"
    DRAFTING = "drafting"
    SWEEP = "sweep in flight"
    COMMIT = "commit"
    REPLAY = "replay"
    DRAIN = "drain"


DEADLY = (Fault.KILL, Fault.HANG, Fault.CUT)
OTHERS = (Fault.ONE_WAY, Fault.SLOW, Fault.CORRUPT)
OTHER_PHASES = (Phase.PREFILL, Phase.SWEEP)


@dataclass(frozen=True, slots=True)
class FaultText:
    """What is generated. Two faults with the same text share its undisturbed run."""

    number: int
    prompt_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault, at a known phase of a text.

    Attributes:
        sweep: The decode sweep that triggers it, or what comes before it.
        delay_ms: From the trigger to the fault.
        before: In `REPLAY`: the position that is killed first. In `DRAIN` the hop itself is told to leave first.
        again_ms: In `REPLAY`: from the first new route to the fault.
    """

    fault: Fault
    phase: Phase
    position: int
    text: FaultText
    sweep: int
    delay_ms: float
    before: int
    again_ms: float

    @property
    def name(self) -> str:
        text = f"{self.text.prompt_tokens} tokens, T {self.text.temperature:g}"
        return f"{self.fault} · {POSITIONS[self.position]} · {self.phase} · {text}"


def plan(strikes: int, seed: int, only: Sequence[Fault] = ()) -> list[PlannedFault]:
    """At least `strikes` deadly ones, each combination equally often, and each other fault a few times; shuffled."""
    rng = random.Random(seed)
    deadly = [fault for fault in DEADLY if not only or fault in only]
    combinations = list(itertools.product(deadly, Phase, range(len(POSITIONS))))
    rounds = -(-strikes // len(combinations)) if combinations else 0
    wanted = [(one, number) for number in range(rounds) for one in combinations]
    others = [fault for fault in OTHERS if not only or fault in only]
    wanted += [(one, 0) for one in itertools.product(others, OTHER_PHASES, range(len(POSITIONS)))]
    rng.shuffle(wanted)
    return [_planned(one, place, number, rng) for place, (one, number) in enumerate(wanted)]


def _planned(one: tuple[Fault, Phase, int], place: int, number: int, rng: random.Random) -> PlannedFault:
    fault, phase, position = one
    greedy = (number + position + list(Phase).index(phase) + list(Fault).index(fault)) % 2 == 0
    tokens = LONG_TOKENS if place % LONG_EVERY == 0 else PROMPT_TOKENS
    text = FaultText(rng.randrange(PROMPTS), tokens, 0.0 if greedy else 1.0, SEED)
    arrival_ms = ONE_WAY_MS * (position + 1)
    window_ms = {
        Phase.DRAFTING: (0.0, 10.0),
        Phase.COMMIT: (arrival_ms, arrival_ms + 15),
        Phase.REPLAY: (0.0, 60.0),
    }.get(phase, (0.0, 100.0))
    sweep, delay_ms = rng.randint(*SWEEPS), rng.uniform(*window_ms)
    return PlannedFault(fault, phase, position, text, sweep, delay_ms, rng.randrange(3), rng.uniform(0, 80))


@dataclass(frozen=True, slots=True)
class ObservedText:
    """One generation as the client saw it. Times are seconds of one clock.

    Attributes:
        arrivals: (when, how many tokens) of each reply that brought some.
        repairs: What the client reports of its repairs.
        paths: Recovery counters that grew, by node.
    """

    began: float
    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    repairs: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    paths: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        """From the start to the first token."""
        return self.arrivals[0][0] - self.began


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """One fault, the undisturbed text and the disturbed one.

    Attributes:
        struck_at: When the fault happened; None if the text ended before.
        stolen: Share of the CPU time that a virtual machine's host took meanwhile.
    """

    planned: PlannedFault
    plain: ObservedText
    disturbed: ObservedText
    struck_at: float | None
    stolen: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether the texts are the same, token for token."""
        return self.disturbed.error is None and self.disturbed.tokens == self.plain.tokens

    @property
    def replay_s(self) -> float:
        """Compute of replays, of all nodes together: in a chain one waits for the other."""
        return sum(paths.get("replay_us", 0) for paths in self.disturbed.paths.values()) / 1e6

    @property
    def transfer_s(self) -> float:
        """The prompt's hidden rows at the links' rate, once per snapshot that a hop after the first one took."""
        restores = sum(
            paths.get("restores", 0) for name, paths in self.disturbed.paths.items() if not name.startswith("0-")
        )
        return restores * self.planned.text.prompt_tokens * ROW_BYTES * 8 / (MBIT_PER_S * 1e6)

    @property
    def recovery_s(self) -> float | None:
        """The pause, without the compute and the transfer of what was replayed."""
        pause_s = self.pause_s
        return None if pause_s is None else max(pause_s - self.replay_s - self.transfer_s, 0.0)

    @property
    def pause_s(self) -> float | None:
        """The longest pause between tokens that ended after the fault; in a prompt, how much later the first came."""
        if self.struck_at is None or self.disturbed.error is not None:
            return None
        if self.planned.phase is Phase.PREFILL:
            return max(self.disturbed.first_s - self.plain.first_s, 0.0)
        times = [when for when, _ in self.disturbed.arrivals]
        pauses = [late - early for early, late in itertools.pairwise(times) if late > self.struck_at]
        return max(pauses, default=None)


def read_outcomes(measured: dict[str, Any]) -> list[FaultOutcome]:
    """Outcomes from the JSON that a run wrote; where a text was the same, the undisturbed text's tokens are its own."""
    found = []
    for words in measured["outcomes"]:
        planned = words["strike"]
        named = {
            "fault": Fault(planned["fault"]),
            "phase": Phase(planned["phase"]),
            "text": FaultText(**planned["text"]),
        }
        disturbed, plain = words["told"], _arrivals(words["plain_arrivals"])
        arrivals = _arrivals(disturbed["arrivals"])
        ours = ObservedText(
            disturbed["began"],
            tuple(disturbed["tokens"]),
            arrivals,
            disturbed["repairs"],
            disturbed["error"],
            disturbed["paths"],
        )
        undisturbed_first_s = ours.first_s - (words["pause_s"] or 0.0) if arrivals else 0.0
        undisturbed = ObservedText(plain[0][0] - undisturbed_first_s, ours.tokens if words["same"] else (), plain)
        struck_at = None if words["struck_at_s"] is None else words["struck_at_s"] + ours.began
        found.append(FaultOutcome(PlannedFault(**(planned | named)), undisturbed, ours, struck_at, words["stolen"]))
    return found


def _arrivals(words: Sequence[Sequence[Any]]) -> tuple[tuple[float, int], ...]:
    return tuple((when, count) for when, count in words)


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def cell(outcomes: Sequence[FaultOutcome]) -> str:
    """Same texts of all that had their fault, and the median and worst pause."""
    outcomes = [one for one in outcomes if one.struck_at is not None]
    if not outcomes:
        return ""
    same = sum(one.is_same for one in outcomes)
    pauses = [one.recovery_s for one in outcomes if one.recovery_s is not None]
    shown = f" · {median(pauses):.2f} ({max(pauses):.2f})" if pauses else ""
    return f"{same}/{len(outcomes)}{shown}"


def summary(outcomes: Sequence[FaultOutcome]) -> str:
    """Same texts of all that had their fault, and the median and 95th percentile of the pauses."""
    outcomes = [one for one in outcomes if one.struck_at is not None]
    pauses = [one.recovery_s for one in outcomes if one.recovery_s is not None]
    same = sum(one.is_same for one in outcomes)
    if not pauses:
        return f"{same}/{len(outcomes)}"
    return f"{same}/{len(outcomes)} · {median(pauses):.2f}, p95 {percentile(pauses, 0.95):.2f}"
