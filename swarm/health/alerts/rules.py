"""Alerts with hysteresis: a finding must hold for a while to begin, and be gone for a while to end. Pure.

A finding is named by its id. It becomes an alert once it has been found for `raise_s`, and ends once it has not been
found for `clear_s`; what begins again soon after it ended must be gone for longer each time, so a flapping finding
stays one alert. While its subject cannot be observed (the service has just started, the model is unknown) it is held.

watched ──raise_s──▶ BEGAN ──▶ WORSE (each time its severity rises) ──clear_s──▶ ENDED
                       └────────── not observable for HELD_S ──────────────────▶ FORGOTTEN
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

MAX_ALERTS = 600
"""More than all models of the page can have at once, so none is left out."""
MAX_CHANGES = 200
"""Beginnings and ends that are kept, the newest."""
HELD_S = 600.0
"""How long an alert is held while its subject cannot be observed."""
FLAP_S = 900.0
"""An alert that begins again within this time flaps."""
MAX_FLAP = 16.0
"""Largest factor by which flapping multiplies `clear_s`."""


class Severity(enum.StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Higher is worse."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class AlertDelays:
    """The hysteresis of one kind.

    Attributes:
        raise_s: for how long a finding must hold before it is an alert.
        clear_s: for how long it must be gone before the alert ends.
    """

    raise_s: float
    clear_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that deserves attention, and is so now.

    Attributes:
        kind: what it is about.
        severity: how bad it is.
        fingerprint: of the model; None for the whole swarm.
        text: one line for people.
        about: tells findings of one kind and model apart.
        model: the model's name.
        fix: the command that mends it, where there is one.
    """

    kind: str
    severity: Severity
    fingerprint: str | None
    text: str
    about: str = ""
    model: str | None = None
    fix: str | None = None

    @property
    def id(self) -> str:
        """The same for the same trouble, whatever its text says of numbers."""
        return "/".join(part for part in (self.kind, self.fingerprint, self.about) if part)


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding that lasts.

    Attributes:
        finding: as it was last found.
        since: when it was first found, in Unix seconds.
        quiet_since: since when it is not found; None while it is.
    """

    finding: Finding
    since: float
    quiet_since: float | None = None

    @property
    def occurrence(self) -> str:
        """Id of this occurrence: the same trouble at another time has another one."""
        return f"{self.finding.id}@{self.since:.3f}"


class AlertTransition(enum.StrEnum):
    """What may happen to an alert."""

    BEGAN = "began"
    WORSE = "worse"
    ENDED = "ended"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class Change:
    """An alert began, became worse or ended."""

    alert: Alert
    step: AlertTransition
    at: float
    worst: Severity

    @property
    def began(self) -> bool:
        return self.step is AlertTransition.BEGAN

    @property
    def is_over(self) -> bool:
        return self.step in (AlertTransition.ENDED, AlertTransition.FORGOTTEN)

    @property
    def id(self) -> str:
        """The same in every delivery of this change, so that receivers can drop duplicates."""
        return f"{self.alert.occurrence}/{self.step}" + (f"/{self.worst}" if self.step is AlertTransition.WORSE else "")


@dataclass(slots=True)
class _AlertState:
    """A finding that is watched.

    Attributes:
        flap: multiplies `clear_s`.
        worst: the highest severity that was reported; None while it is no alert yet.
        quiet_since: since when it is not found.
        unobservable_since: since when its subject cannot be observed.
    """

    finding: Finding
    since: float
    flap: float = 1.0
    worst: Severity | None = None
    quiet_since: float | None = None
    unobservable_since: float | None = None

    def alert(self) -> Alert:
        return Alert(self.finding, self.since, self.quiet_since)

    def set_back(self, now: float) -> None:
        if self.worst is None:
            self.since = min(self.since, now)  # that of a reported alert is part of its name
        self.quiet_since = None if self.quiet_since is None else min(self.quiet_since, now)
        self.unobservable_since = None if self.unobservable_since is None else min(self.unobservable_since, now)


@dataclass(slots=True)
class AlertBook:
    """All alerts that are open.

    Attributes:
        delays: by kind of alert.
        changes: what began, became worse and ended lately, the oldest first.
    """

    delays: Mapping[str, AlertDelays]
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=MAX_CHANGES))
    _watched: dict[str, _AlertState] = field(default_factory=dict)
    _flaps: dict[str, tuple[float, float]] = field(default_factory=dict)

    def update(
        self, findings: Iterable[Finding], now: float, is_unobservable: Callable[[Finding], bool] = lambda _: False
    ) -> list[Change]:
        """Take in everything that is found now."""
        found = {finding.id: finding for finding in findings}
        for name, finding in found.items():
            watched = self._watched.get(name)
            if watched is not None:
                watched.finding, watched.quiet_since, watched.unobservable_since = finding, None, None
            elif len(self._watched) < MAX_ALERTS:
                self._watched[name] = _AlertState(finding, now, self._flap_factor(name, now))
        changes = []
        for name, watched in list(self._watched.items()):
            is_there = name in found
            change = self._raise_or_worsen(watched, now) if is_there else self._missed(name, now, is_unobservable)
            changes += [] if change is None else [change]
        self.changes.extend(changes)
        return changes

    def set_back(self, now: float) -> None:
        """The clock was set back: nothing waits for a time that it had called now."""
        for watched in self._watched.values():
            watched.set_back(now)
        self._flaps = {name: (min(ended_at, now), flap) for name, (ended_at, flap) in self._flaps.items()}

    def open(self) -> list[Alert]:
        """The alerts that hold, the worst first, then the newest."""
        raised = [one.alert() for one in self._watched.values() if one.worst is not None]
        return sorted(raised, key=lambda alert: (-alert.finding.severity.rank, -alert.since, alert.finding.id))

    def resume(self, alerts: Iterable[tuple[Alert, Severity]], changes: Iterable[Change]) -> None:
        """Go on after a restart: these alerts are open, with their worst severities, and were reported already."""
        for alert, worst in alerts:
            if len(self._watched) < MAX_ALERTS:
                self._watched[alert.finding.id] = _AlertState(alert.finding, alert.since, worst=worst)
        self.changes.extend(changes)

    def worst(self, alert: Alert) -> Severity:
        """The highest severity that an open alert has had."""
        return self._watched[alert.finding.id].worst or alert.finding.severity

    def _flap_factor(self, name: str, now: float) -> float:
        ended_at, flap = self._flaps.get(name, (-FLAP_S, 1.0))
        return min(2 * flap, MAX_FLAP) if now - ended_at < FLAP_S else 1.0

    def _missed(self, name: str, now: float, is_unobservable: Callable[[Finding], bool]) -> Change | None:
        watched = self._watched[name]
        if watched.worst is None:
            del self._watched[name]
            return None
        if is_unobservable(watched.finding):
            watched.quiet_since = None
            watched.unobservable_since = now if watched.unobservable_since is None else watched.unobservable_since
            is_over, step = now - watched.unobservable_since >= HELD_S, AlertTransition.FORGOTTEN
        else:
            watched.unobservable_since = None
            watched.quiet_since = now if watched.quiet_since is None else watched.quiet_since
            clear_s = self.delays[watched.finding.kind].clear_s * watched.flap
            is_over, step = now - watched.quiet_since >= clear_s, AlertTransition.ENDED
        if not is_over:
            return None
        del self._watched[name]
        self._flaps = {one: flap for one, flap in self._flaps.items() if now - flap[0] < FLAP_S}
        self._flaps[name] = now, watched.flap
        return Change(watched.alert(), step, now, watched.worst)

    def _raise_or_worsen(self, watched: _AlertState, now: float) -> Change | None:
        severity = watched.finding.severity
        if watched.worst is None:
            if now - watched.since < self.delays[watched.finding.kind].raise_s:
                return None
            watched.worst = severity
            return Change(watched.alert(), AlertTransition.BEGAN, now, severity)
        if severity.rank > watched.worst.rank:
            watched.worst = severity
            return Change(watched.alert(), AlertTransition.WORSE, now, severity)
        return None


T = TypeVar("T")

MAX_TIME_S: Final = 1e11
_VERSION: Final = 1


def alert_shown(alert: Alert) -> dict[str, Any]:
    """An open alert; `id` names the trouble, `occurrence` this time that it is there."""
    finding = alert.finding
    return {
        "id": finding.id,
        "occurrence": alert.occurrence,
        "severity": finding.severity.value,
        "kind": finding.kind,
        "about": finding.about,
        "model": finding.fingerprint,
        "model_name": finding.model,
        "text": finding.text,
        "fix": finding.fix,
        "since": round(alert.since, 3),
        "quiet_since": None if alert.quiet_since is None else round(alert.quiet_since, 3),
    }


def change_shown(change: Change) -> dict[str, Any]:
    """What happened to an alert, and when."""
    return {
        "id": change.id,
        "step": change.step.value,
        "at": round(change.at, 3),
        "worst": change.worst.value,
        "alert": alert_shown(change.alert),
    }


def alerts_shown(book: AlertBook, now: float) -> dict[str, Any]:
    """The open alerts, and those that ended lately, the newest first."""
    ended = [
        {
            **alert_shown(change.alert),
            "worst": change.worst.value,
            "ended_at": round(change.at, 3),
            "forgotten": change.step is AlertTransition.FORGOTTEN,
        }
        for change in reversed(book.changes)
        if change.is_over
    ]
    return {"v": 1, "at": round(now, 3), "open": [alert_shown(alert) for alert in book.open()], "ended": ended}


def dump_book(book: AlertBook) -> dict[str, Any]:
    """What must survive a restart."""
    return {
        "v": _VERSION,
        "open": [{**alert_shown(alert), "worst": book.worst(alert).value} for alert in book.open()],
        "changes": [change_shown(change) for change in book.changes],
    }


def load_book(book: AlertBook, kept: object) -> None:
    """Load what `dump_book` gave; entries of another form are left out."""
    if not isinstance(kept, dict) or kept.get("v") != _VERSION:
        return
    alerts = _read(kept.get("open"), lambda row: (_alert(row), Severity(row["worst"])))
    changes = (change for change in _read(kept.get("changes"), _change) if change.alert.finding.kind in book.delays)
    book.resume(
        ((alert, worst) for alert, worst in alerts if alert.finding.kind in book.delays),
        sorted(changes, key=lambda change: change.at),
    )


def _read(rows: object, read: Callable[[Any], T]) -> Iterator[T]:
    for row in rows if isinstance(rows, list) else ():
        try:
            yield read(row)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue


def _alert(row: dict[str, Any]) -> Alert:
    def text(name: str) -> str | None:
        return None if row[name] is None else str(row[name])

    finding = Finding(
        str(row["kind"]),
        Severity(row["severity"]),
        text("model"),
        str(row["text"]),
        str(row["about"]),
        text("model_name"),
        text("fix"),
    )
    quiet = row["quiet_since"]
    return Alert(finding, _time(row["since"]), None if quiet is None else _time(quiet))


def _change(row: dict[str, Any]) -> Change:
    return Change(_alert(row["alert"]), AlertTransition(row["step"]), _time(row["at"]), Severity(row["worst"]))


def _time(value: Any) -> float:  # noqa: ANN401 - whatever stands there
    seconds = float(value)
    if not 0 <= seconds <= MAX_TIME_S:
        raise ValueError("no Unix time")
    return seconds
