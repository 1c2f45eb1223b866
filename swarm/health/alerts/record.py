"""Alerts as JSON values: for the API, for webhooks, and for the history's file, over restarts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from swarm.health.alerts.rules import Alert, AlertBook, AlertTransition, Change, Finding, Severity

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
