"""Keeps a running node's file for `node status`: what it does now, and what it has given so far.

Whatever the disk does, the node serves on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import IO, Any, Final

from node.life.autostart.state_file import MAX_TEXT, Given, LocalStatus, Stage, StateFile, forget_oldest
from swarm.base.errors import SwarmError
from swarm.base.logs import CountedLog, describe
from swarm.base.plain_text import plain_line
from swarm.base.version import VERSION

LOOK_S: Final = 2.0
WRITE_S: Final = 10.0
"""Between two writes while only amounts change."""
ALIVE_S: Final = 60.0
"""Between two writes while nothing changes."""
STOPPED: Final = "it was told to stop"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself at a moment; amounts are of this run."""

    stage: Stage
    peer: str = ""
    model: str = ""
    layers: str = ""
    num_layers: int = 0
    address: str = ""
    reach: str = ""
    path: str = ""
    sessions: int = 0
    paused_for: str = ""
    given: Given = field(default_factory=Given)
    others: str = ""
    """What it serves of further models, in words."""


@dataclass(frozen=True, slots=True)
class RecorderClocks:
    """The times that a recorder goes by."""

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
    today: Callable[[], date] = date.today


class LastTrouble(logging.Handler):
    """Remembers the last warning of the log.

    Attributes:
        text: it; empty before the first.
        at: Unix seconds.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self.at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's first line, without what a terminal would obey."""
        self.text, self.at = plain_line(record.getMessage())[:MAX_TEXT], record.created


class NodeRecorder:
    """`with recorder.recording(): …`, and `keep` as a task inside."""

    def __init__(
        self,
        identity: Path,
        look: Callable[[], NodeFacts],
        max_mbit: float | None = None,
        clocks: RecorderClocks | None = None,
    ) -> None:
        self.trouble = LastTrouble()
        self._file = StateFile.of(identity)
        self._look = look
        self._clocks = clocks or RecorderClocks()
        self._troubles = CountedLog(logger)
        self._lock: IO[bytes] | None = None
        self._writing = threading.Lock()  # at the end a write of `keep` may still be under way
        now, self._looked_s = self._clocks.wall(), self._clocks.steady()
        self._status = LocalStatus(
            str(identity), os.getpid(), VERSION, Stage.STARTING, started_at=now, seen_at=now, max_mbit=max_mbit
        )
        self._serving_s = self._paused_s = 0.0
        self._pauses = 0
        self._written: LocalStatus | None = None
        self._written_s = 0.0
        self._sent: tuple[float, float] = (self._looked_s, 0.0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the file for as long as the block lasts, and say at its end why it ended.

        Warnings that the program logs meanwhile are its troubles.
        """
        logging.getLogger().addHandler(self.trouble)
        self._begin()
        try:
            yield
        except asyncio.CancelledError:
            self._end(STOPPED)
            raise
        except SwarmError as error:
            self._end(str(error))
            raise
        except BaseException as error:
            self._end(f"it failed: {type(error).__name__}: {error}")
            raise
        else:
            self._end(STOPPED)
        finally:
            logging.getLogger().removeHandler(self.trouble)

    async def keep(self) -> None:
        """Write what changes, for ever."""
        while True:
            try:
                self.look()
                if self._is_due():
                    await asyncio.to_thread(self._write, self._status)
            except Exception as error:  # noqa: BLE001 - a node serves on without this
                self._troubles.say("look", f"what this node gives is not kept: {describe(error)}")
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Take in how the node is now."""
        facts, now, steady = self._look(), self._clocks.wall(), self._clocks.steady()
        before, passed_s = self._status, max(steady - self._looked_s, 0.0)
        self._looked_s = steady
        self._serving_s += passed_s if before.stage is Stage.SERVING else 0.0
        self._paused_s += passed_s if before.stage is Stage.PAUSED else 0.0
        begins = before.stage is not facts.stage
        self._pauses += begins and facts.stage is Stage.PAUSED
        given = replace(facts.given, serving_s=self._serving_s, paused_s=self._paused_s, pauses=self._pauses)
        said = ((one.name, getattr(facts, one.name)) for one in fields(facts) if one.name != "given")
        shared: dict[str, Any] = {name: value[:MAX_TEXT] if type(value) is str else value for name, value in said}
        self._status = replace(
            before.with_run(given, self._clocks.today()),
            **shared,
            seen_at=now,
            serving_since=now if begins and facts.stage is Stage.SERVING else before.serving_since,
            uplink_mbit_per_s=self._rate(given.sent_bytes, steady),
            paused_since=now if begins and facts.stage is Stage.PAUSED else before.paused_since,
            trouble=self.trouble.text,
            trouble_at=self.trouble.at,
        )

    def _rate(self, sent_bytes: float, steady: float) -> float:
        """Mbit/s over the last stretch of `WRITE_S` or more; that of the stretch before until then."""
        since_s, sent_before = self._sent
        if steady - since_s < WRITE_S:
            return self._status.uplink_mbit_per_s
        self._sent = (steady, sent_bytes)
        return round((sent_bytes - sent_before) * 8e-6 / (steady - since_s), 3)

    def _is_due(self) -> bool:
        written, passed_s = self._written, self._clocks.steady() - self._written_s
        if written is None or passed_s >= ALIVE_S:
            return True
        now, new = self._status, self._status.run.since(written.run)
        if (now.stage, now.sessions, now.layers, now.address, now.trouble_at) != (
            *(written.stage, written.sessions, written.layers, written.address, written.trouble_at),
        ):
            return passed_s >= LOOK_S
        return passed_s >= WRITE_S and (new.sweeps > 0 or new.sent_bytes > 0)

    def _begin(self) -> None:
        """Lock the file and go on counting where the last run ended."""
        try:
            self._lock = self._file.lock()
            if self._lock is None:
                return  # the identity is in use, and this node will not start
            before = self._last_run()
            if before is not None:
                self._status = replace(self._status, ever=before.ever, days=before.days)
            forget_oldest(self._file)
        except OSError as error:
            self._unlock()  # nothing is written over what cannot be read
            self._troubles.say("state", f"what this node gives is not kept: {describe(error)}")
        self._write(self._status)

    def _last_run(self) -> LocalStatus | None:
        try:
            return self._file.read()
        except ValueError:
            aside = self._file.set_aside()
            logger.warning("%s was damaged; it is kept as %s, and what was given is counted anew",
                           self._file.path, aside.name)  # fmt: skip
            return None

    def _end(self, why: str) -> None:
        self.look()
        why = plain_line(why)[:MAX_TEXT]
        self._write(replace(self._status, stage=Stage.ENDED, why=why, sessions=0))
        self._unlock()

    def _unlock(self) -> None:
        with self._writing:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _write(self, status: LocalStatus) -> None:
        with self._writing:
            if self._lock is None:
                return
            self._written, self._written_s = status, self._clocks.steady()
            try:
                self._file.write(status)
            except OSError as error:
                self._troubles.say("state", f"what this node gives is not kept: {describe(error)}")
