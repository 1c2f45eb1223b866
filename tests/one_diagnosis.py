"""For tests of the doctor: answers that are ready, and the one thing that a look finds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

from swarm.doctor.ladder import Diagnoses, Diagnosis, Level
from swarm.doctor.probes import LookedUp

T = TypeVar("T")
Look = Diagnoses | Awaitable[Diagnoses] | Awaitable[Diagnosis]


def ready(value: T) -> Callable[..., Awaitable[T]]:
    """A probe that gives this, whatever it is asked."""

    async def give(*_: object, **__: object) -> T:
        return value

    return give


def named(*ips: str) -> Callable[[str], Awaitable[LookedUp]]:
    """Names that all have these addresses."""
    return ready(LookedUp(ips))


async def found_by(look: Look) -> Diagnosis:
    """The one finding of a look. What is in the way, or not known, or a hint, names a mend."""
    found = await look if isawaitable(look) else look
    if not isinstance(found, Diagnosis):
        (found,) = found
    assert bool(found.mend) == (found.level is not Level.OK), found
    assert "\n" not in found.text + found.mend
    return found


async def assert_trouble(look: Look, kind: str, text: str, mend: str) -> None:
    """The look finds this trouble, says so, and names this mend."""
    await _assert(look, Level.TROUBLE, kind, text, mend)


async def assert_hint(look: Look, kind: str, text: str, mend: str) -> None:
    """The same for a hint."""
    await _assert(look, Level.HINT, kind, text, mend)


async def assert_unknown(look: Look, text: str) -> None:
    """The look says that it does not know."""
    await _assert(look, Level.NOT_KNOWN, "not-known", text, "")


async def assert_ok(look: Look, kind: str) -> None:
    """The look finds that all is well."""
    await _assert(look, Level.OK, kind, "", "")


async def _assert(look: Look, level: Level, kind: str, text: str, mend: str) -> None:
    found = await found_by(look)
    assert (found.level, found.kind) == (level, kind), found
    assert text in found.text
    assert mend in found.mend
