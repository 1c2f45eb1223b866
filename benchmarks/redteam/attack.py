"""What an attack is: a name, a kind, and a coroutine that acts on a live swarm until it is cancelled.

Owns the list that modules of `benchmarks.redteam.attacks` enter their attacks in. Opens nothing.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.redteam.ground import Ground
    from benchmarks.redteam.kit import Kit


class Kind(enum.StrEnum):
    """What an attack works on."""

    CONTROLS = "controls"
    """Nothing."""
    CONNECTIONS = "connections"
    FRAMES = "frames"
    SESSIONS = "sessions"
    GRAMMARS = "grammars"
    HOPS = "hops"
    TAILS = "tails"
    RECORDS = "records"
    DIRECTORY = "directory"
    HEALTH = "health"
    TERMINAL = "terminal"
    RELAYS = "relays"
    FILES = "files"
    CLOCKS = "clocks"
    API = "api"
    TEMPLATES = "templates"
    LAN = "lan"
    INVITES = "invites"


MET_ONCE: Final = "whoever connects anew knows nobody and meets it once; whoever stays goes around it"


class Fight:
    """One run of an attack.

    Attributes:
        tally: What it costs, and what it finds.
    """

    def __init__(self, ground: Ground, kit: Kit, sealed: tuple[bytes, ...], ready: Callable[[], None]) -> None:
        self.ground = ground
        self.kit = kit
        self.tally = kit.tally
        self.sealed = sealed
        self.started = asyncio.Event()
        self._ready = ready
        self._is_ready = False

    async def go(self) -> None:
        """The preparations are over: wait for the word."""
        self.be_ready()
        await self.started.wait()

    def be_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._ready()

    async def stay(self) -> None:
        """Keep everything open until the attack is stopped."""
        await asyncio.Event().wait()

    async def pace(self, per_s: float, count: int | None = None) -> AsyncIterator[int]:
        """Numbers, at most so many a second; `count` of them, or for ever.

        A flood must have a rate, or it measures the attacker's machine instead of the swarm.
        """
        started, number = time.monotonic(), 0
        while count is None or number < count:
            await asyncio.sleep(max(started + number / per_s - time.monotonic(), 0))
            yield number
            number += 1

    def breach(self, found: str) -> None:
        if found not in self.tally.breaches and len(self.tally.breaches) < 16:
            self.tally.breaches.append(found)

    def note(self, line: str) -> None:
        if line not in self.tally.notes and len(self.tally.notes) < 16:
            self.tally.notes.append(line)


Act = Callable[[Fight], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: Of a few words with hyphens.
        act: Prepares, awaits `Fight.go`, and acts until it is cancelled or has nothing more to do.
        stains: Whether what it leaves in the directory outlives it, so that the next attack needs another swarm.
        limit: What is known to fail under it, and its price: such a row is named, not held. Empty for most.
        slows: Why it is known to slow users who connect anew, while texts stay right and those who keep their
            connection feel nothing: such a row is named too. Hops and tails that misbehave are all met once.
        lasts_s: How long it must last to be felt, where that is longer than the others last.
        burns: Whether all that it takes is the machine's processors or its line, and no bound can give these back.
    """

    name: str
    kind: Kind
    act: Act
    stains: bool = False
    limit: str = ""
    slows: str = ""
    burns: bool = False
    lasts_s: float = 0.0

    @property
    def is_control(self) -> bool:
        """Whether it attacks nothing, and shows what a program of its cost takes from the machine."""
        return self.kind is Kind.CONTROLS

    @property
    def about(self) -> str:
        return (self.act.__doc__ or "").partition("\n")[0].rstrip(".")


ATTACKS: Final[dict[str, Attack]] = {}
"""All attacks of the modules that were imported, by name."""


def attack(name: str, kind: Kind, **marks: Any) -> Callable[[Act], Act]:  # noqa: ANN401 (further fields of `Attack`)
    """Enter a coroutine as an attack; its docstring says what it does."""

    if kind in {Kind.HOPS, Kind.TAILS}:
        marks.setdefault("slows", MET_ONCE)

    def enter(act: Act) -> Act:
        assert name not in ATTACKS, f"two attacks are called {name}"
        ATTACKS[name] = Attack(name, kind, act, **marks)
        return act

    return enter
