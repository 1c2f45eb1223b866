"""`node status`: what the nodes of this user on this machine do, and what they have given. Asks no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Final

from node.life.autostart.state_file import MAX_FILES, Given, LocalStatus, Stage, StateFile, state_files, status_folder
from swarm.base.layers import Span
from swarm.base.plain_text import plain_line

UNSAID: Final = "without saying why: it was killed, or the machine stopped"
_SHOWN_DAMAGED: Final = 3


@dataclass(frozen=True, slots=True)
class ShowNodeStatus:
    """Print what this user's nodes on this machine do, and what they have given."""

    json: bool = False
    """Print all of it as JSON, ended nodes too."""


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A node's file, and whether the node runs."""

    status: LocalStatus
    is_running: bool


def show(order: ShowNodeStatus, now: float, say: Callable[[str], None], folder: Path | None = None) -> int:
    """Print it; 0 where a node runs, 1 where none does."""
    seen, damaged = read_all(folder)
    running = [node for node in seen if node.is_running]
    if order.json:
        say(json.dumps([{**node.status.as_json(), "is_running": node.is_running} for node in seen], indent=2))
        return 0 if running else 1
    for file in damaged[:_SHOWN_DAMAGED]:
        say(f"{file.path} is damaged; the next start sets it aside")
    for node in running:
        for line in describe_running(node.status, now, is_one_of_many=len(running) > 1):
            say(plain_line(line))
    if not running:
        say(plain_line(_none(seen)))
    return 0 if running else 1


def read_all(folder: Path | None = None) -> tuple[list[SeenNode], list[StateFile]]:
    """The nodes, the latest seen first, and the files that cannot be read."""
    seen, damaged = [], []
    for file in state_files(folder or status_folder())[:MAX_FILES]:
        is_running = file.is_in_use  # before it is read: an end that is written in between is seen
        try:
            status = file.read()
        except (OSError, ValueError):
            damaged.append(file)
            continue
        if status is not None:
            seen.append(SeenNode(status, is_running and status.stage is not Stage.ENDED))
    return seen, damaged


def describe_running(status: LocalStatus, now: float, *, is_one_of_many: bool = False) -> Iterator[str]:
    """One node's lines."""
    if is_one_of_many:
        yield f"{status.peer or 'a node'} ({status.identity})"
    yield _headline(status, now)
    if status.path:
        yield f"  path: {status.path}"
    if status.address:
        yield f"  reached: {status.reach or 'not announced yet'}, at {status.address}"
        limit = "" if status.max_mbit is None else f" of {status.max_mbit:g}"
        yield f"  now: {_count(status.sessions, 'session')}, sends {status.uplink_mbit_per_s:.1f}{limit} Mbit/s"
    yield from _table(status, datetime.fromtimestamp(now).date())
    if status.trouble:
        yield f"  last trouble{_at(status.trouble_at)}: {status.trouble}"


def _headline(status: LocalStatus, now: float) -> str:
    what = f"{_layers(status)} of {status.model}{status.others}" if status.model else "a node"
    match status.stage:
        case Stage.SERVING:
            since = status.serving_since or status.started_at
            return f"serves {what} since {_time(since)}, {duration(now - since)} ago"
        case Stage.PAUSED:
            since = status.paused_since or status.started_at
            return f"paused for {duration(now - since)}: {status.paused_for}; it goes on by itself ({what})"
        case Stage.LEAVING:
            return f"leaves: its sessions move to other machines ({what})"
        case _:
            return f"starts for {duration(now - status.started_at)} ({what})"


def _table(status: LocalStatus, today: date) -> Iterator[str]:
    columns = (status.days.get(today.isoformat(), Given()), status.run, status.ever)
    yield f"  {'given':<14}{'today':>17}{'this run':>17}{'ever':>17}"
    rows: tuple[tuple[str, Callable[[Given], str]], ...] = (
        ("tokens", lambda given: f"{given.tokens:,.0f}"),
        ("signed for", lambda given: f"{given.signed:,.0f}"),
        ("sweeps", lambda given: f"{given.sweeps:,.0f}"),
        ("sent", lambda given: _bytes(given.sent_bytes)),
        ("time serving", lambda given: duration(given.serving_s)),
        ("time paused", lambda given: f"{duration(given.paused_s)}{f' ({given.pauses:.0f}×)' if given.pauses else ''}"),
    )
    for name, cell in rows:
        yield f"  {name:<14}" + "".join(f"{cell(given):>17}" for given in columns)


def _none(seen: list[SeenNode]) -> str:
    if not seen:
        return "no node runs here, and none has run: `node serve` starts one, `node install` at every boot"
    last = max((node.status for node in seen), key=lambda status: status.seen_at)
    what = f" ({_layers(last)} of {last.model})" if last.model else ""
    why = f"because {last.why}" if last.stage is Stage.ENDED and last.why else UNSAID
    given = f"; it gave {last.ever.tokens:,.0f} tokens in all" if last.ever.tokens else ""
    return f"no node runs here; the last one{what} ended{_at(last.seen_at)}, {why}{given}"


def _layers(status: LocalStatus) -> str:
    with suppress(Exception):
        return Span.parse(status.layers).describe(status.num_layers)
    return f"layers {status.layers}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def _at(at: float | None) -> str:
    return "" if at is None else f" at {_time(at)}"


def _count(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """In two units at most: `3 d 4 h`, `1 h 2 min`, `5 min`, `40 s`."""
    whole = max(int(seconds), 0)
    parts = [(whole // 86_400, "d"), (whole // 3_600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    kept = parts[first : first + 2] if first < 2 else parts[first : first + 1]
    return " ".join(f"{count} {unit}" for count, unit in kept if count) or "0 s"
