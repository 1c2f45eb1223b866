"""The parent's end of a relay's process: starts it, signs for it, hears its load, ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swarm.discovery.address_proof import who_answer
from swarm.discovery.identity import Identity
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.relay.child import MAX_LINE_BYTES, RelaySettings
from swarm.relay.server import FindNode, RelayLoad
from swarm.runtime.plain_text import plain_line
from swarm.runtime.tasks import TaskScope

START_S = 20.0
LEAVE_S = 4.0
_COMMAND = (sys.executable, "-P", "-m", "swarm.relay.child")

logger = logging.getLogger(__name__)


class RelayProcess:
    """A relay that runs in a process of its own."""

    def __init__(self, process: Process, identity: Identity, ports: tuple[int, int | None], find: FindNode) -> None:
        self.port, self.tls_port = ports
        self.load: RelayLoad | None = None
        self._process = process
        self._identity = identity
        self._find = find

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ended(self) -> None:
        await self._process.wait()

    async def listen(self) -> None:
        """Answer what it asks, until it ends."""
        assert self._process.stdout is not None
        async with TaskScope() as scope:
            while line := await self._process.stdout.readline():
                message: dict[str, Any] = json.loads(line)
                if "load" in message:
                    self.load = RelayLoad(**message["load"])
                if "sign" in message:
                    signed = who_answer(self._identity, bytes.fromhex(message["sign"]))
                    await self._say(signed=signed.decode())
                if "find" in message:
                    scope.spawn(self._tell_where(PeerId(message["find"])))

    async def _tell_where(self, peer: PeerId) -> None:
        await self._say(found=peer, at=await self._find(peer))

    async def lend(self, mbit_per_s: float) -> None:
        await self._say(mbit_per_s=float(mbit_per_s))

    async def _say(self, **message: object) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()


@asynccontextmanager
async def relay_process(
    identity: Identity, settings: RelaySettings, find: FindNode | None = None
) -> AsyncIterator[RelayProcess]:
    """Run a relay; leaving ends it, and with it every circuit.

    Args:
        identity: signs for it.
        settings: what it is told.
        find: finds listed nodes for whoever comes by its TLS port; it never raises. None: there are none.

    Raises:
        SwarmError: it does not start; the message says why.
    """
    process = await _start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with TaskScope() as scope:
            scope.spawn(_log_lines(process))
            process.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
            relay = RelayProcess(process, identity, await _ports(process), find or _no_node)
            scope.spawn(relay.listen())
            yield relay
    finally:
        await _end(process)


async def _start() -> Process:
    root = str(Path(__file__).parents[2])  # found also where the package is not installed, whatever the folder
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    try:
        return await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        raise SwarmError(f"the relay's process cannot be started: {error.strerror or error}") from error


async def _no_node(_peer: PeerId) -> str:
    return ""


async def _ports(process: Process) -> tuple[int, int | None]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
    except TimeoutError:
        raise SwarmError(f"the relay did not start within {START_S:.0f} s") from None
    said: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
    if "error" in said:
        raise SwarmError(f"the relay did not start: {said['error']}")
    return said["port"], said["tls_port"]


async def _log_lines(process: Process) -> None:
    assert process.stderr is not None
    with suppress(ValueError):  # a line beyond all bounds: no more are read
        while line := await process.stderr.readline():
            logger.info("relay: %s", plain_line(line.decode(errors="replace").rstrip()))


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(LEAVE_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
