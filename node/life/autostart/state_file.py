"""What `node status` reads: one small JSON file per identity in the user's state folder, written by the running node.

A file and no socket: it outlives the node, so it can say when and why the last one ended, and a killed node needs no
cleaning up. Whether the writer still runs tells a lock that the kernel gives back when the process ends; neither a
clock that was set nor a process number that was used again can mislead it.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import IO, Any, Final, Self

from swarm.base.files import replace_file, state_folder, strict_json

DAYS_KEPT: Final = 7
_MOST: Final = 1e18


@dataclass(frozen=True, slots=True)
class Given:
    """Amounts that only grow."""

    tokens: float = 0
    """Tokens of texts that went through this node's layers and stayed."""
    layer_tokens: float = 0
    """Those times the layers that computed them."""
    sweeps: float = 0
    """Sweeps that were run."""
    received_bytes: float = 0
    """Of sessions."""
    sent_bytes: float = 0
    """Of sessions."""
    serving_s: float = 0
    """Time in which it took sessions."""
    paused_s: float = 0
    """Time in which it paused."""
    pauses: float = 0
    signed: float = 0
    """Layer-tokens that clients signed for."""

    def plus(self, other: Given) -> Given:
        """Both together."""
        return Given(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def since(self, before: Given) -> Given:
        """What came after `before`; nothing of an amount that is smaller now."""
        return Given(*(max(getattr(self, one.name) - getattr(before, one.name), 0) for one in fields(self)))

    def as_json(self) -> dict[str, float]:
        """Numbers by name."""
        return {one.name: round(getattr(self, one.name), 3) for one in fields(self)}

    @classmethod
    def of_json(cls, raw: object) -> Self:
        """Read what `as_json` wrote; what a later release adds is read past, what it lacks is 0.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(raw, dict):
            raise ValueError("amounts are an object")
        return cls(*(_amount(raw.get(one.name, 0)) for one in fields(cls)))


def read_days(raw: object) -> dict[str, Given]:
    """Amounts by day.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(raw, dict) or len(raw) > 10 * DAYS_KEPT:
        raise ValueError("days are an object of a few")
    return {date.fromisoformat(day).isoformat(): Given.of_json(amounts) for day, amounts in raw.items()}


def _amount(value: Any) -> float:  # noqa: ANN401 - whatever the file holds
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        raise ValueError("an amount is no number that can be")
    return value


MAX_STATE_BYTES: Final = 32_768
MAX_TEXT: Final = 300
"""Characters of one text in the file."""
MAX_FILES: Final = 64
"""Identities of which a file is kept; the ones unused for longest go."""
DAMAGED: Final = ".damaged"


class Stage(enum.StrEnum):
    """What a node does."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    """Also before it has loaded anything."""
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LocalStatus:
    """One node as its file shows it. Times are Unix seconds; a text that is not known yet is empty."""

    identity: str
    """The identity's file."""
    pid: int
    version: str
    stage: Stage
    started_at: float
    seen_at: float
    """When the file was written."""
    peer: str = ""
    model: str = ""
    layers: str = ""
    """Half-open, as 0-4."""
    num_layers: int = 0
    """Of the whole model."""
    address: str = ""
    reach: str = ""
    """How others come to it: direct, mapped or relayed."""
    path: str = ""
    """How its layers run on a GPU, and why no faster way; empty on a CPU."""
    sessions: int = 0
    serving_since: float | None = None
    uplink_mbit_per_s: float = 0.0
    """Sent lately, on average."""
    max_mbit: float | None = None
    paused_for: str = ""
    paused_since: float | None = None
    trouble: str = ""
    """The last one."""
    trouble_at: float | None = None
    why: str = ""
    """Why it ended."""
    run: Given = field(default_factory=Given)
    ever: Given = field(default_factory=Given)
    days: Mapping[str, Given] = field(default_factory=dict)
    others: str = ""
    """What it serves of further models, in words."""

    def as_json(self) -> dict[str, Any]:
        """Fields by name."""
        plain = {**asdict(self), "run": self.run.as_json(), "ever": self.ever.as_json()}
        return {**plain, "days": {day: given.as_json() for day, given in self.days.items()}}

    def with_run(self, run: Given, today: date) -> Self:
        """The run has given so much by now: what is new counts for today and for ever; the last days are kept."""
        new, day = run.since(self.run), today.isoformat()
        days = {**self.days, day: self.days.get(day, Given()).plus(new)}
        return replace(self, run=run, ever=self.ever.plus(new), days=dict(sorted(days.items())[-DAYS_KEPT:]))

    @classmethod
    def of_json(cls, raw: object) -> Self:
        """Read what `as_json` wrote; what a later release adds is read past.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(raw, dict):
            raise ValueError("a status is an object")
        amounts = {"run": Given.of_json(raw.get("run", {})), "ever": Given.of_json(raw.get("ever", {}))}
        found: dict[str, Any] = {**amounts, "days": read_days(raw.get("days", {}))}
        for one in fields(cls):
            if one.name in raw and one.name not in found:
                found[one.name] = _READ[str(one.type)](raw[one.name])
        try:
            return cls(**found)
        except TypeError:
            raise ValueError("a field is missing") from None


@dataclass(frozen=True, slots=True)
class StateFile:
    """The file of one identity."""

    path: Path

    @classmethod
    def of(cls, identity: Path, folder: Path | None = None) -> Self:
        """The file that belongs to an identity's file."""
        name = hashlib.sha256(os.fsencode(identity.expanduser().absolute())).hexdigest()[:16]
        return cls((folder or status_folder()) / f"{name}.json")

    def read(self) -> LocalStatus | None:
        """What it says; None where there is none.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_STATE_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(data) > MAX_STATE_BYTES:
            raise ValueError("it is too long")
        return LocalStatus.of_json(strict_json(data))

    def write(self, status: LocalStatus) -> None:
        """Replace it at once, so that no reader sees a half.

        Raises:
            OSError: it cannot be written.
        """
        # Durably, or a power cut leaves an empty file behind, and what was given is forgotten.
        replace_file(self.path, json.dumps(status.as_json(), indent=1).encode(), is_durable=True)

    def set_aside(self) -> Path:
        """Rename a damaged file, and return its new name; an older damaged one is replaced.

        Raises:
            OSError: it cannot be renamed.
        """
        return self.path.replace(self.path.with_name(self.path.name + DAMAGED))

    def lock(self) -> IO[bytes] | None:
        """Lock it for this process until what is returned is closed; None where another node has it.

        Raises:
            OSError: there can be no lock.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._lock_path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        return file

    @property
    def is_in_use(self) -> bool:
        """Whether the node that writes it still runs."""
        try:
            with self._lock_path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def _lock_path(self) -> Path:
        return self.path.with_suffix(".lock")

    def remove(self) -> None:
        """Forget this identity."""
        for path in (self.path, self._lock_path, self.path.with_name(self.path.name + DAMAGED)):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def status_folder() -> Path:
    """Where a user's nodes keep their status."""
    return state_folder() / "nodes"


def state_files(folder: Path | None = None) -> list[StateFile]:
    """All of a user, the latest written first."""
    found = []
    for path in (folder or status_folder()).glob("*.json"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [StateFile(path) for _, path in sorted(found, reverse=True)]


def forget_oldest(own: StateFile) -> None:
    """Keep `MAX_FILES` files, this one and those of running nodes among them."""
    others = [file for file in state_files(own.path.parent) if file.path != own.path]
    for file in others[MAX_FILES - 1 :]:
        if not file.is_in_use:
            file.remove()


def running_pids(folder: Path | None = None) -> set[int]:
    """The processes of all running nodes of this user."""
    found = set()
    for file in state_files(folder)[:MAX_FILES]:
        with suppress(OSError, ValueError):
            status = file.read() if file.is_in_use else None
            if status is not None:
                found.add(status.pid)
    return found


def _number(value: Any) -> float:  # noqa: ANN401 - whatever the file holds
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number is none")
    return value


def _whole(value: Any) -> int:  # noqa: ANN401
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number is none")
    return value


def _text(value: Any) -> str:  # noqa: ANN401
    if not isinstance(value, str):
        raise ValueError("a text is none")
    return value[:MAX_TEXT]


_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "float | None": lambda value: None if value is None else _number(value),
    "Stage": lambda value: Stage(_text(value)),
}
