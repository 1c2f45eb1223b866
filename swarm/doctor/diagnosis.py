"""What the doctor finds, what a check is, and how all of them are run: at once, each and all of them bounded in time.

Owns no probe: a check gets what it looks at by its parameters.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from swarm.runtime.plain_text import plain_line

T = TypeVar("T")

LIMIT_S: Final = 13.5
"""Seconds for all checks. To leave the directory takes up to six more, so the whole takes less than 20."""
MAX_TEXT: Final = 300
"""Characters of one text: a stranger's error message may be longer."""


class Level(enum.Enum):
    """How bad something is."""

    OK = "ok"
    HINT = "hint"
    """Worth to know: slower, less, or not known."""
    TROUBLE = "trouble"
    """It keeps this machine from serving, or from using the swarm."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding.

    Attributes:
        level: how bad it is.
        kind: a stable word for what it is, for programs.
        text: what was found, on one line.
        mend: the command, option or action that mends it; empty where nothing is wrong.
        check: the name of the check that found it; `examine` fills it in.
    """

    level: Level
    kind: str
    text: str
    mend: str = ""
    check: str = ""


def ok(kind: str, text: str) -> Diagnosis:
    """All is well."""
    return Diagnosis(Level.OK, kind, text)


def hint(kind: str, text: str, mend: str = "") -> Diagnosis:
    """Worth to know."""
    return Diagnosis(Level.HINT, kind, text, mend)


def trouble(kind: str, text: str, mend: str) -> Diagnosis:
    """In the way."""
    return Diagnosis(Level.TROUBLE, kind, text, mend)


class DoctorCheck(Protocol):
    """Something that is looked at."""

    name: ClassVar[str]

    async def look(self) -> Sequence[Diagnosis]:
        """What is found, the most important first; at least one."""
        ...


class Shared(Generic[T]):
    """An answer that several checks wait for and that is asked for once, whoever of them gives up."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        """Ask nothing yet.

        Args:
            ask: is awaited once, by `run`.
        """
        self._ask = ask
        self._done = asyncio.Event()
        self._answers: list[T] = []
        self._error: Exception | None = None

    async def run(self) -> None:
        """Ask; its error is for those who wait."""
        try:
            self._answers.append(await self._ask())
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        finally:
            self._done.set()

    async def get(self) -> T:
        """The answer, or its error."""
        await self._done.wait()
        if self._answers:
            return self._answers[0]
        raise self._error or TimeoutError


async def examine(
    checks: Sequence[DoctorCheck],
    shared: Sequence[Shared[Any]] = (),
    limit_s: float = LIMIT_S,
    on_progress: Callable[[int], None] | None = None,
) -> list[Diagnosis]:
    """Run all checks at once.

    Args:
        checks: what to look at.
        shared: answers that they wait for.
        limit_s: seconds, after which whatever is not done yet counts as not known.
        on_progress: called with the number of checks that are done.

    Returns:
        What they found, in the order of the checks.
    """
    done: list[str] = []

    async def look(check: DoctorCheck) -> list[Diagnosis]:
        found = await _look(check, limit_s)
        done.append(check.name)
        if on_progress is not None:
            on_progress(len(done))
        return found

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(one.run()) for one in shared]
        looking = [group.create_task(look(check)) for check in checks]
        await asyncio.wait(looking)
        for task in asking:
            task.cancel()
    return [one for task in looking for one in task.result()]


async def _look(check: DoctorCheck, limit_s: float) -> list[Diagnosis]:
    try:
        async with asyncio.timeout(limit_s):
            found = await check.look()
    except TimeoutError:
        found = [hint("not-known", f"not known: it took longer than {limit_s:.0f} s", "swarm doctor once more")]
    except Exception as error:  # noqa: BLE001 - a doctor that falls ill helps nobody: the other checks go on
        found = [hint("not-known", f"not known: {type(error).__name__}: {error}", "report this, with its output")]
    return [replace(one, check=check.name, text=_line(one.text), mend=_line(one.mend)) for one in found]


def _line(text: str) -> str:
    line = plain_line(" ".join(text.split()))
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
