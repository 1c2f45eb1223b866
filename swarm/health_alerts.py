"""What an operator should know, with hysteresis: what is found must hold for a while, and be gone for a while. Pure.

A finding is named by its id. It becomes an alert once it has been found for `raise_s`, and ends once it has not been
found for `clear_s`; whatever flaps stays one alert.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_ALERTS = 200


class Severity(enum.StrEnum):
    """How bad it is."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Kind(enum.StrEnum):
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


PATIENCE: Mapping[Kind, Patience] = {
    Kind.GAP: Patience(3.0, 20.0),
    Kind.LAST_HOLDER: Patience(30.0, 60.0),
    Kind.PROBE: Patience(0.0, 0.0),
    Kind.VERSION: Patience(120.0, 120.0),
    Kind.CLOCK: Patience(0.0, 300.0),
    Kind.STALE: Patience(15.0, 30.0),
    Kind.BROKER: Patience(5.0, 10.0),
    Kind.DHT: Patience(15.0, 10.0),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is so now. fingerprint: of the model that it is about, None for the whole swarm."""

    kind: Kind
    severity: Severity
    fingerprint: str | None
    text: str
    about: str = ""

    @property
    def id(self) -> str:
        """The same for the same trouble, whatever its text says of numbers."""
        return "/".join(part for part in (self.kind.value, self.fingerprint, self.about) if part)


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding that lasts. since: Unix seconds of when it was first found."""

    finding: Finding
    since: float


@dataclass(frozen=True, slots=True)
class Change:
    """An alert began or ended."""

    alert: Alert
    began: bool


@dataclass(slots=True)
class _Watched:
    finding: Finding
    since: float
    seen_at: float
    missing_since: float | None = None
    is_raised: bool = False


@dataclass(slots=True)
class AlertBook:
    """All alerts that are open."""

    _watched: dict[str, _Watched] = field(default_factory=dict)

    def update(self, findings: Iterable[Finding], now: float) -> list[Change]:
        """Take in everything that is found now; what began and ended by it."""
        found = {finding.id: finding for finding in findings}
        for name, finding in found.items():
            watched = self._watched.get(name)
            if watched is not None:
                watched.finding, watched.seen_at, watched.missing_since = finding, now, None
            elif len(self._watched) < MAX_ALERTS:
                self._watched[name] = _Watched(finding, now, now)
        return [change for name in list(self._watched) if (change := self._step(name, name in found, now)) is not None]

    def open(self) -> list[Alert]:
        """The alerts that hold, the worst first, then the newest."""
        raised = [Alert(one.finding, one.since) for one in self._watched.values() if one.is_raised]
        ranks = list(Severity)
        return sorted(raised, key=lambda alert: (-ranks.index(alert.finding.severity), -alert.since, alert.finding.id))

    def _step(self, name: str, is_found: bool, now: float) -> Change | None:
        watched = self._watched[name]
        patience = PATIENCE[watched.finding.kind]
        alert = Alert(watched.finding, watched.since)
        if is_found:
            if not watched.is_raised and now - watched.since >= patience.raise_s:
                watched.is_raised = True
                return Change(alert, began=True)
            return None
        if not watched.is_raised:
            del self._watched[name]
            return None
        watched.missing_since = now if watched.missing_since is None else watched.missing_since
        if now - watched.missing_since >= patience.clear_s:
            del self._watched[name]
            return Change(alert, began=False)
        return None
