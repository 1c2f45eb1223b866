"""Which models the page has room for, so that invented models do not crowd out real ones. Pure.

    PROVED   a probe generated text with it, in the last 30 days; kept over restarts
    LISTED   a peer has a signed record of it in the DHT
    REPORTED telemetry alone names it

When all slots are taken, a newcomer takes that of a model of lower standing. Else it takes that of an equal which has
had its slot for `TRIAL_S` without being proved, so they take turns; a proved model never gives way.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.base.ids import ModelIdentity

MAX_MODELS: Final = 64
TRIAL_S: Final = 3_600.0
PROVED_S: Final = 30 * 86_400.0
MAX_PROVED: Final = 256
MAX_TIME_S: Final = 1e11
NEW_PER_LOOK: Final = 8
"""Unknown models that are looked up although all slots are taken: they may deserve one."""


class SlotStanding(enum.IntEnum):
    """The evidence that a model exists."""

    REPORTED = 0
    LISTED = 1
    PROVED = 2


@dataclass(slots=True)
class ModelSlots:
    """The models that have a slot, with their standing and since when they have it.

    Attributes:
        proved: when a probe last generated text with a model, by fingerprint, in Unix seconds; the oldest first.
    """

    proved: dict[str, float] = field(default_factory=dict)
    _taken: dict[str, tuple[SlotStanding, float]] = field(default_factory=dict)

    def standing(self, fingerprint: str) -> SlotStanding:
        """The standing of a model that has a slot; the lowest if it has none."""
        return self._taken.get(fingerprint, (SlotStanding.REPORTED, 0.0))[0]

    def enter(self, fingerprint: str, is_listed: bool, now: float) -> tuple[bool, str | None]:
        """Take a slot for a model, or keep the one that it has.

        Returns:
            Whether it has one now, and the model that lost its slot to it.
        """
        standing = SlotStanding.LISTED if is_listed else SlotStanding.REPORTED
        if now - self.proved.get(fingerprint, -PROVED_S) < PROVED_S:
            standing = SlotStanding.PROVED
        if fingerprint in self._taken:
            before, since = self._taken[fingerprint]
            self._taken[fingerprint] = max(before, standing), since
            return True, None
        evicted = None
        if len(self._taken) >= MAX_MODELS:
            evicted = min(self._taken, key=lambda one: self._taken[one])
            if not self._gives_way(evicted, standing, now):
                return False, None
            del self._taken[evicted]
        self._taken[fingerprint] = standing, now
        return True, evicted

    def prove(self, fingerprint: str, now: float) -> None:
        """Note that a probe generated text with it."""
        self.proved.pop(fingerprint, None)
        self.proved[fingerprint] = now
        while len(self.proved) > MAX_PROVED:
            del self.proved[next(iter(self.proved))]
        if fingerprint in self._taken:
            self._taken[fingerprint] = SlotStanding.PROVED, self._taken[fingerprint][1]

    def set_back(self, now: float) -> None:
        """The clock was set back: no slot was taken, and no model proved, later than now."""
        self._taken = {name: (standing, min(since, now)) for name, (standing, since) in self._taken.items()}
        self.proved = {name: min(at, now) for name, at in self.proved.items()}

    def leave(self, fingerprint: str) -> None:
        """Free the slot of a model of which nothing is known any more."""
        self._taken.pop(fingerprint, None)

    def choose(self, models: Sequence[ModelIdentity], turn: int) -> list[ModelIdentity]:
        """The models to look up, of all in the DHT: proved ones, those with a slot, and some of the others in turn."""
        known: list[ModelIdentity] = []
        others: list[ModelIdentity] = []
        for one in models:
            is_known = one.fingerprint in self._taken or one.fingerprint in self.proved
            (known if is_known else others).append(one)
        known.sort(key=lambda one: (one.fingerprint not in self.proved, one.fingerprint not in self._taken))
        others.sort(key=lambda one: one.fingerprint)
        start = turn % len(others) if others else 0
        others = [*others[start:], *others[:start]]
        new = max(MAX_MODELS - len(known), NEW_PER_LOOK)
        return [*known[:MAX_MODELS], *others[:new]]

    def dump(self) -> dict[str, float]:
        return dict(self.proved)

    def load(self, kept: object) -> None:
        """Take up what `dump` gave; what has another form is left out."""
        if isinstance(kept, dict):
            times = [(at, name) for name, at in kept.items() if isinstance(name, str) and type(at) in (int, float)]
            valid = [(at, name) for at, name in times if 0 <= at <= MAX_TIME_S]
            self.proved = {name: float(at) for at, name in sorted(valid)[-MAX_PROVED:]}

    def _gives_way(self, evicted: str, to: SlotStanding, now: float) -> bool:
        standing, since = self._taken[evicted]
        if standing is SlotStanding.PROVED:
            return False
        return standing < to or (standing == to and now - since >= TRIAL_S)
