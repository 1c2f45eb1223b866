"""Keeps receipts that wait to be published over a restart: one file per identity and model in the state folder."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgpack

from node.session.receipts import MAX_WAITING, ReceiptBook
from swarm.base.files import replace_file, state_folder
from swarm.base.ids import PeerId
from swarm.base.logs import CountedLog, describe
from swarm.protocol.limits import MAX_RECEIPT_BYTES
from swarm.trust.receipt import FRESH_S

SAVE_S: Final = 10.0
MAX_FILE_BYTES: Final = MAX_WAITING * (MAX_RECEIPT_BYTES + 8)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReceiptFile:
    """The receipts of one book, as they were written last."""

    path: Path
    written: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, peer: PeerId, fingerprint: str, folder: Path | None = None) -> Self:
        """The file of an identity and a model; files whose receipts are too old to count are deleted."""
        folder = folder or state_folder() / "receipts"
        for old in folder.glob("*.receipts"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > FRESH_S:
                    old.unlink()
        return cls(folder / f"{hashlib.sha256(f'{peer} {fingerprint}'.encode()).hexdigest()[:16]}.receipts")

    def load(self, book: ReceiptBook) -> None:
        """Let what it holds wait again; a file that cannot be read holds nothing."""
        with suppress(OSError, ValueError, msgpack.UnpackException), self.path.open("rb") as file:
            book.load(msgpack.unpackb(file.read(MAX_FILE_BYTES)))

    def save(self, waiting: tuple[bytes, ...]) -> None:
        """Write what waits, where that is news.

        Raises:
            OSError: it cannot be written.
        """
        if waiting == self.written:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(self.path, msgpack.packb(list(waiting)))
        self.written = waiting

    async def keep(self, book: ReceiptBook) -> None:
        """Write what changes, for ever, and at the end; a disk that fails costs what waits, and nothing else."""
        troubles = CountedLog(logger)
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                try:
                    await asyncio.to_thread(self.save, tuple(book.waiting.values()))
                except OSError as error:
                    troubles.say("receipts", f"receipts that wait are not kept: {describe(error)}")
        finally:
            with suppress(OSError):
                self.save(tuple(book.waiting.values()))
