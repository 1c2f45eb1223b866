"""When a node pauses, and when it goes on: causes that are looked at, each with its hysteresis. Pure.

A cause begins when it was seen for `begin_s` without a break, and is over when it was not seen for `end_s`. So neither
a menu that flickers over the screen nor a loose plug moves sessions about. What is on at the first look holds at once:
a node that starts on battery does not serve for a moment first.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import psutil

from swarm.base.quiet_hours import QuietHours

UNKNOWN_S: Final = 600.0
"""A cause that held and of which nothing is known for so long is over: its sensor is gone, and would hold for ever."""

Look = Callable[[], bool | None]
"""Whether a cause is there now; None: it is not known."""


@dataclass(frozen=True, slots=True)
class PauseCause:
    """One reason to pause."""

    reason: str
    """Completes "paused: "."""
    look: Look
    begin_s: float
    """How long it must be there before the node pauses."""
    end_s: float
    """How long it must be away before the node goes on."""


@dataclass(slots=True)
class _Watched:
    """A cause over time.

    Attributes:
        cause: it.
        holds: whether the node pauses for it.
        changing_since: when it was first seen otherwise than it holds, without a break since; None: it was not.
        is_first: it was not looked at yet.
    """

    cause: PauseCause
    holds: bool = False
    changing_since: float | None = None
    is_first: bool = True

    def look(self, now: float) -> bool:
        """Look once more; whether it holds."""
        seen = self.cause.look()
        is_known = seen is not None
        if self.is_first:
            self.is_first, self.holds = False, bool(seen)
        if bool(seen) == self.holds:
            self.changing_since = None
            return self.holds
        if self.changing_since is None:
            self.changing_since = now
        wait_s = self.cause.begin_s if seen else self.cause.end_s if is_known else UNKNOWN_S
        if now - self.changing_since >= wait_s:
            self.holds, self.changing_since = not self.holds, None
        return self.holds


class PauseJudge:
    """All causes of one node."""

    def __init__(self, causes: Sequence[PauseCause], clock: Callable[[], float]) -> None:
        self._watched = [_Watched(cause) for cause in causes]
        self._clock = clock

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._watched)

    def look(self) -> str | None:
        """Look at every cause; why the node should pause now, None if it should not."""
        now = self._clock()
        reasons = [watched.cause.reason for watched in self._watched if watched.look(now)]
        return " and ".join(reasons) or None


BUSY_GPU_PERCENT: Final = 20.0
"""A desktop takes a few, a film under ten; a game thirty and more."""
BUSY_CORES: Final = 0.5
"""Share of the machine's cores."""
SHORTEST_LOOK_S: Final = 1.0
"""Over a shorter time a load says nothing."""
ASK_S: Final = 10.0
"""For nvidia-smi: tens of milliseconds, but seconds where it must wake the driver."""

Ask = Callable[[Sequence[str]], str | None]
"""Runs a program; what it printed, None where it failed."""
Pids = Callable[[], Iterable[int]]
"""Processes whose work does not count."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the owner wants to pause for."""

    when_busy: bool = False
    on_battery: bool = False
    quiet_hours: QuietHours | None = None


def causes(wishes: Wishes, busy: Callable[[], bool | None], busy_reason: str) -> list[PauseCause]:
    """The causes that the owner asked for."""
    found = []
    hours = wishes.quiet_hours
    if hours is not None:
        found.append(PauseCause(f"quiet hours {hours}", lambda: hours.holds(datetime.now()), 0.0, 0.0))
    if wishes.on_battery:
        found.append(PauseCause("the machine runs on battery", on_battery, begin_s=5.0, end_s=30.0))
    if wishes.when_busy:
        found.append(PauseCause(busy_reason, busy, begin_s=10.0, end_s=60.0))
    return found


def on_battery() -> bool | None:
    """Whether the machine runs on its battery; False where it has none."""
    sensor = getattr(psutil, "sensors_battery", None)
    battery = None if sensor is None else sensor()
    if battery is None:
        return False
    return None if battery.power_plugged is None else not battery.power_plugged


def run_quietly(command: Sequence[str]) -> str | None:
    """What a program prints; None where there is none, or it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class GpuShare:
    """Whether other programs use one NVIDIA GPU, by nvidia-smi, which names it `GPU-…`; other makers' are not known."""

    def __init__(self, uuid: str, own: Pids, worked_ms: Callable[[], float], ask: Ask = run_quietly) -> None:
        self._uuid = uuid
        self._own = own
        self._worked_ms = worked_ms
        self._ask = ask
        self._worked = worked_ms()

    def look(self) -> bool | None:
        """Whether others take `BUSY_GPU_PERCENT` of it."""
        before, self._worked = self._worked, self._worked_ms()
        was_idle = self._worked == before
        total = _number(self._ask(["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits",
                                   "-i", self._uuid]))  # fmt: skip
        if total is not None and total < BUSY_GPU_PERCENT:
            return False  # the cheap question is mostly enough
        shares = by_process(self._ask(["nvidia-smi", "pmon", "-c", "1", "-s", "u", "-i", self._uuid]) or "")
        own = set(self._own())
        if shares:
            others = {pid: percent for pid, percent in shares.items() if pid not in own}
            # In a container the numbers are another system's: this node's own work stands under one nobody knows here.
            strangers = {pid for pid in others if not psutil.pid_exists(pid)}
            certain = sum(percent for pid, percent in others.items() if pid not in strangers)
            if certain >= BUSY_GPU_PERCENT or not strangers:
                return certain >= BUSY_GPU_PERCENT
            return sum(others.values()) >= BUSY_GPU_PERCENT if was_idle else None
        return None if total is None or not was_idle else True


def by_process(table: str) -> dict[int, float]:
    """Per cent of the GPU by process, from what `nvidia-smi pmon` prints; its columns differ between drivers."""
    lines = [line.split() for line in table.splitlines() if line.strip()]
    names = next((line[1:] for line in lines if line[0] == "#" and "pid" in line and "sm" in line), None)
    if names is None:
        return {}
    shares: dict[int, float] = {}
    pid_at, share_at = names.index("pid"), names.index("sm")
    for line in lines:
        if line[0].startswith("#") or len(line) <= max(pid_at, share_at) or not line[pid_at].isdecimal():
            continue
        shares[int(line[pid_at])] = shares.get(int(line[pid_at]), 0.0) + (_number(line[share_at]) or 0.0)
    return shares


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of processor time that this machine's programs took so far, over all cores, at a time on some clock."""

    at: float
    spent: float


class CpuShare:
    """Whether other programs keep this machine's cores busy."""

    def __init__(self, everybody: Callable[[], CpuTime], own: Callable[[], float], cores: int) -> None:
        self._everybody = everybody
        self._read_own = own
        self._cores = cores
        self._last = everybody()
        self._own: float | None = None

    def look(self) -> bool | None:
        """Whether others took `BUSY_CORES` of them since the last look."""
        last, now = self._last, self._everybody()
        passed_s = now.at - last.at
        if passed_s < SHORTEST_LOOK_S:
            return None
        self._last = now
        cores_s = passed_s * self._cores
        if now.spent - last.spent < BUSY_CORES * cores_s:
            self._own = None
            return False
        before, self._own = self._own, self._read_own()
        if before is None:
            return None
        own = max(self._own - before, 0.0)  # a process of ours that ended takes its time along
        return now.spent - last.spent - own >= BUSY_CORES * cores_s


def everybodys_time(clock: Callable[[], float]) -> CpuTime:
    """The time of all programs; where this node is niced, niced ones are left out: they make way as it does."""
    total = psutil.cpu_times()
    busy = total.user + total.system + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)
    return CpuTime(clock(), busy + (0.0 if _is_niced() else getattr(total, "nice", 0.0)))


def time_of(pids: Iterable[int]) -> float:
    """The part of `everybodys_time` that these processes took."""
    spent, is_niced = 0.0, _is_niced()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times, makes_way = process.cpu_times(), is_niced and process.nice() > 0
        except psutil.Error:
            continue  # it has ended
        spent += times.system + (0.0 if makes_way else times.user)
    return spent


def family(pids: Iterable[int]) -> set[int]:
    """These processes and all that they started."""
    found = set()
    for pid in pids:
        try:
            found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        except psutil.Error:
            continue
    return found


def _is_niced() -> bool:
    nice = psutil.Process().nice()
    return isinstance(nice, int) and nice > 0


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").split()[0])
    except (ValueError, IndexError):
        return None
