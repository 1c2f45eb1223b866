"""For tests of the doctor: answers that are ready, and the one thing that a check finds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm.doctor.diagnosis import Diagnosis, DoctorCheck, Level

T = TypeVar("T")


def ready(value: T) -> Callable[..., Awaitable[T]]:
    """A probe that gives this, whatever it is asked."""

    async def give(*_: object) -> T:
        return value

    return give


async def found_by(check: DoctorCheck) -> Diagnosis:
    """The one diagnosis of a check. What is in the way, or a hint, names a mend."""
    (found,) = await check.look()
    assert bool(found.mend) == (found.level is not Level.OK), found
    assert "\n" not in found.text + found.mend
    return found


async def assert_trouble(check: DoctorCheck, kind: str, text: str, mend: str) -> None:
    """The check finds this trouble, says so, and names this mend."""
    found = await found_by(check)
    assert (found.level, found.kind) == (Level.TROUBLE, kind), found
    assert text in found.text
    assert mend in found.mend


async def assert_hint(check: DoctorCheck, kind: str, text: str, mend: str) -> None:
    """The same for a hint."""
    found = await found_by(check)
    assert (found.level, found.kind) == (Level.HINT, kind), found
    assert text in found.text
    assert mend in found.mend


async def assert_ok(check: DoctorCheck, kind: str) -> None:
    """The check finds that all is well."""
    found = await found_by(check)
    assert (found.level, found.kind) == (Level.OK, kind), found
