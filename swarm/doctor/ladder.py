"""The doctor's ladder: rungs in causal order, each asked only where those that it stands on hold.

    finding    ok · hint (worth to know) · not known (no verdict in time) · not asked (one below failed) · trouble
    verdict    the first trouble in the order of the rungs; beside the ladder stand the machine's own

A time-out is no verdict: whatever has no answer is not known, which is never a trouble and stops no rung above.
Owns no probe.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from swarm.base.plain_text import plain_line

T = TypeVar("T")
Seen = TypeVar("Seen")

LIMIT_S: Final = 13.5
"""Seconds for all rungs. To leave the directory takes up to six more, so the whole takes less than 20."""
MAX_TEXT: Final = 300
"""Characters of one text: a stranger's error message may be longer."""
AGAIN: Final = "swarm doctor once more"


class Level(enum.Enum):
    OK = "ok"
    HINT = "hint"
    """Worth to know: slower, or less."""
    NOT_KNOWN = "not-known"
    NOT_ASKED = "not-asked"
    TROUBLE = "trouble"
    """It keeps this machine from serving, or from using the swarm."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a rung found.

    Attributes:
        level: how bad it is.
        kind: a stable word for what it is, for programs.
        text: what was found, on one line.
        mend: the command, option or action that mends it; empty where nothing is wrong.
        rung: the name of the rung; `climb` fills it in.
    """

    level: Level
    kind: str
    text: str
    mend: str = ""
    rung: str = ""


Diagnoses = Diagnosis | Sequence[Diagnosis]
"""What looking at one rung gives: at least one, the most important first."""


def ok(kind: str, text: str) -> Diagnosis:
    return Diagnosis(Level.OK, kind, text)


def hint(kind: str, text: str, mend: str = "") -> Diagnosis:
    return Diagnosis(Level.HINT, kind, text, mend)


def trouble(kind: str, text: str, mend: str) -> Diagnosis:
    return Diagnosis(Level.TROUBLE, kind, text, mend)


def unknown(text: str, mend: str = AGAIN) -> Diagnosis:
    """The check gave no answer in time, or its tool is missing: it is no trouble."""
    return Diagnosis(Level.NOT_KNOWN, "not-known", f"not known: {text}", mend)


@dataclass(frozen=True, slots=True)
class Rung(Generic[Seen]):
    """One question.

    Attributes:
        name: of the rung.
        asks: what is looked at, for the reference.
        finds: the kinds of what it finds.
        look: finds it out, given what all rungs share.
        after: rungs that stand before this one in the order, and without which asking is idle.
        is_beside: whether it is the machine's own, and no part of the way to the swarm.
    """

    name: str
    asks: str
    finds: tuple[str, ...]
    look: Callable[[Seen], Awaitable[Diagnoses]]
    after: tuple[str, ...] = ()
    is_beside: bool = False


class Once(Generic[T]):
    """An answer that several rungs wait for: asked for when the first of them wants it."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._outcome: list[T | Exception] = []

    async def __call__(self) -> T:
        async with self._lock:
            if not self._outcome:
                try:
                    self._outcome.append(await self._ask())
                except Exception as error:  # noqa: BLE001 - raised again below, for everybody
                    self._outcome.append(error)
        outcome = self._outcome[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def climb(
    rungs: Sequence[Rung[Seen]],
    seen: Seen,
    limit_s: float = LIMIT_S,
    on_progress: Callable[[int], None] | None = None,
) -> list[Diagnosis]:
    """Ask all rungs, each as soon as those that it stands on were asked."""
    until = time.monotonic() + limit_s
    tasks: dict[str, asyncio.Task[list[Diagnosis]]] = {}
    done: list[str] = []

    async def ask(rung: Rung[Seen]) -> list[Diagnosis]:
        below = [one for name in rung.after for one in await tasks[name]]
        cause = next((one for one in below if one.level in {Level.TROUBLE, Level.NOT_ASKED}), None)
        if cause is not None:
            root = cause.text if cause.level is Level.NOT_ASKED else f"because of {cause.rung}"
            found = [Diagnosis(Level.NOT_ASKED, "not-asked", root)]
        else:
            found = await _look(rung, seen, until)
        done.append(rung.name)
        if on_progress is not None:
            on_progress(len(done))
        return [replace(one, rung=rung.name, text=_line(one.text), mend=_line(one.mend)) for one in found]

    async with asyncio.TaskGroup() as group:
        for rung in rungs:
            tasks[rung.name] = group.create_task(ask(rung))
    return [one for task in tasks.values() for one in task.result()]


def first_cause(found: Sequence[Diagnosis]) -> Diagnosis | None:
    """The trouble from which others may follow: the first one in the order of the rungs."""
    return next((one for one in found if one.level is Level.TROUBLE), None)


async def _look(rung: Rung[Seen], seen: Seen, until: float) -> list[Diagnosis]:
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            found = await rung.look(seen)
    except TimeoutError:
        return [unknown("it had no answer in time")]
    except Exception as error:  # noqa: BLE001 - a doctor that falls ill helps nobody: the other rungs go on
        return [unknown(f"{type(error).__name__}: {error}", "report this, with its output")]
    return [found] if isinstance(found, Diagnosis) else list(found)


def _line(text: str) -> str:
    line = plain_line(" ".join(text.split()))
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
