"""What an operator should know, with hysteresis: what is found must hold for a while, and be gone for a while. Pure.

A finding is named by its id. It becomes an alert once it has been found for `raise_s`, and ends once it has not been
found for `clear_s`; what begins again soon after it ended must be gone for longer each time, so whatever flaps stays
one alert. While nothing can be said of its subject (the service has just started, the model is unknown) it is held.

watched ──raise_s──▶ BEGAN ──▶ WORSE (each time its severity rises) ──clear_s──▶ ENDED
                       └────────── nothing can be said of it for HELD_S ───────▶ FORGOTTEN
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

MAX_ALERTS = 600
"""More than all models of the page can have at once, so none is turned away."""
MAX_CHANGES = 200
"""What began and ended, the newest."""
HELD_S = 600.0
"""How long an alert is held while nothing can be said of its subject."""
FLAP_S = 900.0
"""What begins again within this time flaps."""
MAX_FLAP = 16.0
"""By how much its `clear_s` grows at most."""


class Severity(enum.StrEnum):
    """How bad it is."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Higher is worse."""
        return list(Severity).index(self)


class AlertKind(enum.StrEnum):
    """What it is about."""

    GAP = "gap"
    LAST_HOLDER = "last-holder"
    PROBE = "probe"
    VERSION = "version"
    CLOCK = "clock"
    STALE = "stale"
    BROKER = "broker"
    DHT = "dht"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for which something must be found, or not be found any more, before that counts."""

    raise_s: float
    clear_s: float


PATIENCE: Mapping[AlertKind, Patience] = {
    AlertKind.GAP: Patience(3.0, 20.0),
    AlertKind.LAST_HOLDER: Patience(30.0, 60.0),
    AlertKind.PROBE: Patience(0.0, 330.0),  # longer than between two probes: one that passes is not yet the end
    AlertKind.VERSION: Patience(120.0, 120.0),
    AlertKind.CLOCK: Patience(0.0, 300.0),
    AlertKind.STALE: Patience(15.0, 30.0),
    AlertKind.BROKER: Patience(5.0, 10.0),
    AlertKind.DHT: Patience(15.0, 10.0),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is so now. fingerprint: of the model that it is about, None for the whole swarm; model: its name.

    fix: the command that mends it, where there is one.
    """

    kind: AlertKind
    severity: Severity
    fingerprint: str | None
    text: str
    about: str = ""
    model: str | None = None
    fix: str | None = None

    @property
    def id(self) -> str:
        """The same for the same trouble, whatever its text says of numbers."""
        return "/".join(part for part in (self.kind.value, self.fingerprint, self.about) if part)


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding that lasts. since: Unix seconds of when it was first found. quiet_since: it is not found since then."""

    finding: Finding
    since: float
    quiet_since: float | None = None

    @property
    def occurrence(self) -> str:
        """Names this time that the trouble is there; another time has another name."""
        return f"{self.finding.id}@{self.since:.3f}"


class AlertTransition(enum.StrEnum):
    """What may happen to an alert."""

    BEGAN = "began"
    WORSE = "worse"
    ENDED = "ended"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class Change:
    """An alert began, became worse or ended. at: Unix seconds. worst: the highest severity that it has had."""

    alert: Alert
    step: AlertTransition
    at: float
    worst: Severity

    @property
    def began(self) -> bool:
        """Whether it is the first of its alert."""
        return self.step is AlertTransition.BEGAN

    @property
    def is_over(self) -> bool:
        """Whether it is the last of its alert."""
        return self.step in (AlertTransition.ENDED, AlertTransition.FORGOTTEN)

    @property
    def id(self) -> str:
        """Names it for ever: whoever is told twice can know it."""
        return f"{self.alert.occurrence}/{self.step}" + (f"/{self.worst}" if self.step is AlertTransition.WORSE else "")


@dataclass(slots=True)
class _AlertState:
    """worst: the highest severity that was told; None as long as it is no alert. flap: multiplies `clear_s`."""

    finding: Finding
    since: float
    flap: float = 1.0
    worst: Severity | None = None
    missing_since: float | None = None
    blind_since: float | None = None

    def alert(self) -> Alert:
        return Alert(self.finding, self.since, self.missing_since)


@dataclass(slots=True)
class AlertBook:
    """All alerts that are open, and what began and ended lately, the oldest first."""

    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=MAX_CHANGES))
    _watched: dict[str, _AlertState] = field(default_factory=dict)
    _flaps: dict[str, tuple[float, float]] = field(default_factory=dict)

    def update(
        self, findings: Iterable[Finding], now: float, is_blind: Callable[[Finding], bool] = lambda _: False
    ) -> list[Change]:
        """Take in everything that is found now; what began and ended by it.

        Args:
            findings: all of them.
            now: Unix seconds.
            is_blind: whether nothing can be said now of what was once found.
        """
        found = {finding.id: finding for finding in findings}
        for name, finding in found.items():
            watched = self._watched.get(name)
            if watched is not None:
                watched.finding, watched.missing_since, watched.blind_since = finding, None, None
            elif len(self._watched) < MAX_ALERTS:
                self._watched[name] = _AlertState(finding, now, self._flap(name, now))
        changes = [
            change
            for name, watched in list(self._watched.items())
            if (change := _found(watched, now) if name in found else self._missed(name, now, is_blind)) is not None
        ]
        self.changes.extend(changes)
        return changes

    def open(self) -> list[Alert]:
        """The alerts that hold, the worst first, then the newest."""
        raised = [one.alert() for one in self._watched.values() if one.worst is not None]
        return sorted(raised, key=lambda alert: (-alert.finding.severity.rank, -alert.since, alert.finding.id))

    def resume(self, alerts: Iterable[tuple[Alert, Severity]], changes: Iterable[Change]) -> None:
        """Go on after a restart: these are open, at their worst of that severity, and nobody need be told again."""
        for alert, worst in alerts:
            if len(self._watched) < MAX_ALERTS:
                self._watched[alert.finding.id] = _AlertState(alert.finding, alert.since, worst=worst)
        self.changes.extend(changes)

    def worst(self, alert: Alert) -> Severity:
        """The highest severity that an open alert has had."""
        return self._watched[alert.finding.id].worst or alert.finding.severity

    def _flap(self, name: str, now: float) -> float:
        ended_at, flap = self._flaps.get(name, (-FLAP_S, 1.0))
        return min(2 * flap, MAX_FLAP) if now - ended_at < FLAP_S else 1.0

    def _missed(self, name: str, now: float, is_blind: Callable[[Finding], bool]) -> Change | None:
        watched = self._watched[name]
        if watched.worst is None:
            del self._watched[name]
            return None
        if is_blind(watched.finding):
            watched.missing_since = None
            watched.blind_since = now if watched.blind_since is None else watched.blind_since
            is_over, step = now - watched.blind_since >= HELD_S, AlertTransition.FORGOTTEN
        else:
            watched.blind_since = None
            watched.missing_since = now if watched.missing_since is None else watched.missing_since
            clear_s = PATIENCE[watched.finding.kind].clear_s * watched.flap
            is_over, step = now - watched.missing_since >= clear_s, AlertTransition.ENDED
        if not is_over:
            return None
        del self._watched[name]
        self._flaps = {one: flap for one, flap in self._flaps.items() if now - flap[0] < FLAP_S}
        self._flaps[name] = now, watched.flap
        return Change(watched.alert(), step, now, watched.worst)


def _found(watched: _AlertState, now: float) -> Change | None:
    severity = watched.finding.severity
    if watched.worst is None:
        if now - watched.since < PATIENCE[watched.finding.kind].raise_s:
            return None
        watched.worst = severity
        return Change(watched.alert(), AlertTransition.BEGAN, now, severity)
    if severity.rank > watched.worst.rank:
        watched.worst = severity
        return Change(watched.alert(), AlertTransition.WORSE, now, severity)
    return None
