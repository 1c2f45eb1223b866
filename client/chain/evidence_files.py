"""Evidence of a lie, once an audit named a machine: a file of the user's alone, and a word to who can recompute it.

Decision: docs/decisions/0096-evidence-travels.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Final

import grpc.aio

from swarm.base.files import replace_file, state_folder
from swarm.link.dial import Connection
from swarm.protocol import wire
from swarm.protocol.limits import MAX_REPORT_BYTES

FILES_KEPT: Final = 16
BYTES_KEPT: Final = 256 << 20
"""Of all files: the newest ones."""
REPORT_S: Final = 60.0
"""How long evidence may take to another machine."""
PART_BYTES: Final = 256 << 10

logger = logging.getLogger(__name__)


def keep_evidence(data: bytes, folder: Path | None = None) -> Path | None:
    """Write evidence to a file named after its digest, and forget the oldest ones.

    Args:
        folder: where to (default: the user's state folder).

    Returns:
        the file; None where it cannot be written, or is larger than all may be.
    """
    folder = folder or state_folder() / "evidence"
    if len(data) > BYTES_KEPT:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / hashlib.sha256(data).hexdigest()[:16]
        replace_file(path, data)
        left, files = BYTES_KEPT, [one for one in folder.iterdir() if one.is_file()]
        newest = sorted(files, key=lambda one: (one == path, one.stat().st_mtime), reverse=True)
        for place, file in enumerate(newest):
            left -= file.stat().st_size
            if place >= FILES_KEPT or left < 0:
                file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("evidence is not kept: %s", error)
        return None
    return path


async def report(connection: Connection, data: bytes) -> bool:
    """Send evidence to a machine that may have the layers; whether it takes it, is its own affair.

    Returns:
        whether it said that it would recompute it.
    """
    if len(data) > MAX_REPORT_BYTES:
        return False

    channel: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = connection.channel.stream_stream(wire.REPORT)
    try:
        async with asyncio.timeout(REPORT_S):
            call = channel()
            for at in range(0, len(data), PART_BYTES):
                await call.write(data[at : at + PART_BYTES])
            await call.done_writing()
            return await call.read() == b""
    except TimeoutError:
        why: str | None = "it took too long"
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        why = error.details() if isinstance(error, grpc.aio.AioRpcError) else "it ended the stream"
    logger.info("node %s takes no evidence: %s", connection.endpoint.peer, why)
    return False
