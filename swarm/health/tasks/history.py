"""How models fared, stored in SQLite over restarts: 5 s for an hour, a minute for a day, 15 minutes for 30 days.

A sample is folded into its bucket of every resolution as it comes, so nothing has to be rolled up later. A bucket holds
the worst verdict and, for each verdict, the seconds for which it held; the page shows shares of those. Rows are per
model and not per node, and the number of models is bounded, so the file is too. A clock that has just jumped deletes
nothing, and a damaged file is put aside. Owns the file, judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from swarm.base.errors import ConfigError
from swarm.base.files import strict_json
from swarm.health.state.verdict import Grade

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_MODELS: Final = 128
PRUNE_S: Final = 60.0
"""Time between deletions of expired buckets."""
AHEAD_S: Final = 3_600.0
"""Buckets so far ahead of the clock were made by a clock that was wrong."""
JUMP_S: Final = 3_600.0
"""More than this between what the clock says and what it should say is a jump."""
DOUBT_S: Final = 86_400.0
"""How long a clock is doubted after a jump: time to set it right."""
LONGEST_S: Final = 7 * DOUBT_S
"""A clock that jumps again and again is believed after so long, or nothing would ever be deleted."""
_VERSION: Final = 2
_MAGIC: Final = b"SQLite format 3\0"
_CLOCK: Final = "clock"
"""Name under which the last time and the time since when the clock is doubted are stored."""


@dataclass(frozen=True, slots=True)
class Window:
    """A resolution of the history.

    Attributes:
        step_s: length of a bucket.
        kept_s: how far back buckets are stored.
    """

    step_s: int
    kept_s: int


WINDOWS: Final = {"1h": Window(5, 3_600), "24h": Window(60, 86_400), "30d": Window(900, 30 * 86_400)}
SAMPLE_S: Final = WINDOWS["1h"].step_s
"""Time between samples, and the time for which one counts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One model at one moment.

    Attributes:
        min_replicas: machines of the layer that the fewest hold.
        machines: machines that serve it.
        sweeps_per_s: sweeps through the whole model, where nodes report them.
        tokens_per_s: speed of a probe, where one was made since the last sample.
        ttft_ms: time to that probe's first token.
        seconds: time for which the sample counts, up to its moment.
    """

    fingerprint: str
    grade: Grade
    min_replicas: int
    machines: int
    sweeps_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_ms: float | None = None
    seconds: float = SAMPLE_S


_SCHEMA = """
CREATE TABLE IF NOT EXISTS points (
    model TEXT NOT NULL, step_s INTEGER NOT NULL, at INTEGER NOT NULL,
    samples INTEGER NOT NULL, worst INTEGER NOT NULL, min_replicas INTEGER NOT NULL, machines REAL NOT NULL,
    sweeps_per_s REAL NOT NULL, sweeps_samples INTEGER NOT NULL,
    tokens_per_s REAL NOT NULL, ttft_ms REAL NOT NULL, probes INTEGER NOT NULL,
    serving_s REAL NOT NULL, degraded_s REAL NOT NULL, broken_s REAL NOT NULL,
    PRIMARY KEY (model, step_s, at)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""

_FROM_VERSION_1 = f"""
BEGIN;
ALTER TABLE points ADD COLUMN serving_s REAL NOT NULL DEFAULT 0;
ALTER TABLE points ADD COLUMN degraded_s REAL NOT NULL DEFAULT 0;
ALTER TABLE points ADD COLUMN broken_s REAL NOT NULL DEFAULT 0;
UPDATE points SET
    serving_s = CASE worst WHEN 0 THEN min(step_s, samples * {SAMPLE_S}) ELSE 0 END,
    degraded_s = CASE worst WHEN 1 THEN min(step_s, samples * {SAMPLE_S}) ELSE 0 END,
    broken_s = CASE worst WHEN 2 THEN min(step_s, samples * {SAMPLE_S}) ELSE 0 END;
PRAGMA user_version = 2;
COMMIT;
"""
"""A bucket of version 1 has the worst of its verdicts only, which then counts for all of its time."""

_FOLD = """
INSERT INTO points VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (model, step_s, at) DO UPDATE SET
    samples = samples + 1,
    worst = max(worst, excluded.worst),
    min_replicas = min(min_replicas, excluded.min_replicas),
    machines = machines + excluded.machines,
    sweeps_per_s = sweeps_per_s + excluded.sweeps_per_s,
    sweeps_samples = sweeps_samples + excluded.sweeps_samples,
    tokens_per_s = tokens_per_s + excluded.tokens_per_s,
    ttft_ms = ttft_ms + excluded.ttft_ms,
    probes = probes + excluded.probes,
    serving_s = serving_s + excluded.serving_s,
    degraded_s = degraded_s + excluded.degraded_s,
    broken_s = broken_s + excluded.broken_s
"""

_READ = """
SELECT at, worst, serving_s, degraded_s, broken_s, min_replicas, machines / samples,
    CASE WHEN probes > 0 THEN tokens_per_s / probes END,
    CASE WHEN probes > 0 THEN ttft_ms / probes END,
    CASE WHEN sweeps_samples > 0 THEN sweeps_per_s / sweeps_samples END, probes
FROM points WHERE model = ? AND step_s = ? AND at BETWEEN ? AND ? ORDER BY at
"""


class History:
    """The file, used on a thread of its own: `async with History.open(path) as history`."""

    def __init__(self, path: Path, steady: Callable[[], float] = time.monotonic) -> None:
        self._path, self._steady = path, steady
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")
        self._database: sqlite3.Connection | None = None
        self._doubt = ClockDoubt(None, None)
        self._pruned_at = 0.0

    @classmethod
    def open(cls, path: Path, steady: Callable[[], float] = time.monotonic) -> History:
        """A history; `async with` opens the file. `steady` gives seconds that never jump."""
        return cls(path, steady)

    async def __aenter__(self) -> Self:
        """Open the file, or create it; a damaged one is put aside, with a warning.

        Raises:
            ConfigError: it cannot be used.
        """
        try:
            await self._run(self._open)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise ConfigError(f"--data {self._path}: no history can be kept there ({error}); choose another") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._run(self._close)
        finally:
            self._thread.shutdown()

    async def add(self, samples: Iterable[Sample], now: float) -> None:
        """Fold samples into their buckets.

        Raises:
            sqlite3.Error: the disk is full, the file is damaged …
        """
        await self._run(lambda: self._add(list(samples), now))

    async def points(self, fingerprint: str, window: str, now: float) -> dict[str, Any]:
        """A model's history as JSON values.

        Raises:
            KeyError: nothing is recorded of it.
            sqlite3.Error: the file cannot be read.
        """
        return await self._run(lambda: self._points(fingerprint, window, now))

    async def save(self, name: str, value: Any) -> None:  # noqa: ANN401  (JSON values)
        """Store a value under a name, in place of what was there.

        Raises:
            sqlite3.Error: the disk is full, the file is damaged …
        """
        await self._run(lambda: self._save(name, json.dumps(value)))

    async def load(self, name: str) -> Any:  # noqa: ANN401  (JSON values)
        """The value stored under a name; None if there is none, or none that can be read.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        return await self._run(lambda: self._load(name))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._database is not None, "enter the history first"
        return self._database

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = self._connect()
        except sqlite3.OperationalError:
            raise  # locked, no permission …: the file may be sound
        except sqlite3.DatabaseError as error:
            if not self._is_own():
                raise
            aside = self._put_aside()
            logger.warning(
                "the history %s is damaged (%s); it is now %s, and a new one begins", self._path, error, aside
            )
            self._database = self._connect()
        match self._load(_CLOCK):
            case [int() | float() as newest, int() | float() | None as since]:
                self._doubt = ClockDoubt(newest, since)
            case _:
                self._doubt = ClockDoubt(self._db.execute("SELECT max(at) FROM points").fetchone()[0], None)

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, 1, _VERSION):
                raise sqlite3.OperationalError(f"it was made by another version ({version})")
            found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            database.executescript(_FROM_VERSION_1 if version == 1 else _SCHEMA)
            database.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            database.close()
            raise
        return database

    def _is_own(self) -> bool:
        """Whether the file was a database once: another program's file is never moved."""
        with self._path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC

    def _put_aside(self) -> Path:
        """Rename the file, and what SQLite keeps beside it."""
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        for ending in ("", "-wal", "-shm"):
            part = Path(f"{self._path}{ending}")
            if part.exists():
                part.replace(f"{aside}{ending}")
        return aside

    def _close(self) -> None:
        self._db.close()

    def _add(self, samples: list[Sample], now: float) -> None:
        rows = [
            (one.fingerprint, window.step_s, int(now) // window.step_s * window.step_s, *_folded(one))
            for one in samples
            for window in WINDOWS.values()
        ]
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(_FOLD, rows)
            if not 0 <= now - self._pruned_at < PRUNE_S:
                self._pruned_at = now
                self._prune(now)

    def _prune(self, now: float) -> None:
        models = [name for (name,) in self._db.execute("SELECT DISTINCT model FROM points")]
        if self._doubt.is_believed(now, self._steady()):
            for window in WINDOWS.values():
                kept = [(name, window.step_s, now - window.kept_s, now + AHEAD_S) for name in models]
                self._db.executemany(
                    "DELETE FROM points WHERE model = ? AND step_s = ? AND at NOT BETWEEN ? AND ?", kept
                )
        self._save(_CLOCK, json.dumps([now, self._doubt.since]))
        if len(models) > MAX_MODELS:
            newest = "SELECT model FROM points WHERE step_s = 900 GROUP BY model ORDER BY max(at) DESC LIMIT ?"
            self._db.execute(f"DELETE FROM points WHERE model NOT IN ({newest})", (MAX_MODELS,))

    def _points(self, fingerprint: str, window: str, now: float) -> dict[str, Any]:
        selected = WINDOWS[window]
        known = self._db.execute("SELECT 1 FROM points WHERE model = ? LIMIT 1", (fingerprint,)).fetchone()
        if known is None:
            raise KeyError(fingerprint)
        rows = self._db.execute(_READ, (fingerprint, selected.step_s, int(now) - selected.kept_s, int(now) + AHEAD_S))
        grades = list(Grade)
        points = [
            {
                "at": at,
                "verdict": grades[worst].value,
                "seconds": {grade.value: round(held, 1) for grade, held in zip(grades, seconds, strict=True) if held},
                "min_replicas": min_replicas,
                "machines": round(machines, 1),
                "tokens_per_s": _rounded(tokens_per_s),
                "ttft_ms": _rounded(ttft_ms),
                "sweeps_per_s": _rounded(sweeps_per_s),
                "probes": probes,
            }
            for at, worst, *seconds, min_replicas, machines, tokens_per_s, ttft_ms, sweeps_per_s, probes in rows
        ]
        return {"v": 1, "model": fingerprint, "window": window, "step_s": selected.step_s, "points": points}

    def _save(self, name: str, text: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (name, text))

    def _load(self, name: str) -> Any:  # noqa: ANN401
        row = self._db.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        try:
            return None if row is None else strict_json(row[0])
        except (TypeError, ValueError):
            logger.warning("%s in the history %s cannot be read, and is forgotten", name, self._path)
            return None


def _folded(one: Sample) -> tuple[float, ...]:
    """A sample as the sums of a bucket that holds it alone."""
    has_probe = one.tokens_per_s is not None and one.ttft_ms is not None
    return (
        one.grade.rank,
        one.min_replicas,
        one.machines,
        one.sweeps_per_s or 0.0,
        int(one.sweeps_per_s is not None),
        one.tokens_per_s or 0.0 if has_probe else 0.0,
        one.ttft_ms or 0.0 if has_probe else 0.0,
        int(has_probe),
        *(one.seconds if one.grade is grade else 0.0 for grade in Grade),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def default_data_path(environment: dict[str, str]) -> Path:
    """Where the history lies without `--data`: `canopy/health.sqlite3` in the user's data folder."""
    base = environment.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "canopy" / "health.sqlite3"


class ClockDoubt:
    """Whether this machine's clock can be believed: one that has just jumped must not say what is old.

    It compares Unix time with the time that has passed since the last look, by a clock that never jumps.

    Attributes:
        since: the Unix time at which the doubt began, which must survive a restart; None where there is none.
    """

    def __init__(self, newest: float | None, since: float | None) -> None:
        """Start where an earlier run ended: its newest time, and its doubt."""
        self.since = since
        self._expected = newest
        self._looked_at: float | None = None
        self._doubted_at: float | None = None
        self._believed_at: float | None = None

    def is_believed(self, now: float, steady: float) -> bool:
        """Look at both clocks, in seconds; whether Unix time may be deleted by."""
        if self._looked_at is None:
            self._believed_at = steady
            if self.since is not None:
                self._doubted_at = steady - min(max(now - self.since, 0.0), DOUBT_S)
        passed_s = 0.0 if self._looked_at is None else steady - self._looked_at
        if self._expected is not None and abs(now - self._expected - passed_s) > JUMP_S:
            self.since, self._doubted_at = now, steady
        self._expected, self._looked_at = now, steady
        if self._doubted_at is not None and steady - self._doubted_at < DOUBT_S:
            assert self._believed_at is not None, "set by the first look"
            if steady - self._believed_at < LONGEST_S:
                return False
        self.since, self._doubted_at, self._believed_at = None, None, steady
        return True
