"""Supervises the embedded broker's process: starts it, restarts it when it ends or hangs, and ends it at exit.

Whether it works is checked as a node would see it: a connection must be answered, again and again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from swarm.base.errors import ConfigError
from swarm.link.broker_address import BrokerAddress

logger = logging.getLogger(__name__)

START_S = 30.0
STOP_S = 5.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
STEADY_S = 60.0
"""A broker that ran for so long is restarted after the shortest pause."""
_CONNECT_PACKET = b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x0a\x00\x03up?"
"""MQTT 3.1.1 CONNECT of a client `up?` without a user: a working broker answers, whether it accepts it or not."""
_CONNACK = 0x20
_DISCONNECT_PACKET = b"\xe0\x00"
OWN_USER = "swarm-health"


@dataclass(frozen=True, slots=True)
class LivenessChecks:
    """How a broker that hangs is found.

    Attributes:
        every_s: time between checks.
        answer_s: longest wait for an answer.
        max_misses: checks in a row without an answer, after which it is ended.
    """

    every_s: float = 3.0
    answer_s: float = 4.0
    max_misses: int = 2


class EmbeddedBroker:
    """`async with EmbeddedBroker(…) as broker`, and `supervise` in a task. A flood can end its process only."""

    def __init__(
        self, host: str, port: int, prefix: str, passwords: Path | None, checks: LivenessChecks | None = None
    ) -> None:
        if passwords is not None and not passwords.is_file():
            raise ConfigError(f"--broker-passwords {passwords}: no such file")
        self._host, self._port, self._prefix, self._passwords = host, port, prefix, passwords
        self._secret = secrets.token_urlsafe(24)
        self._checks = checks or LivenessChecks()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> BrokerAddress:
        return BrokerAddress(self._host, self._port)

    def own_address(self) -> BrokerAddress:
        """Where the health service listens to it: only this user may subscribe."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return BrokerAddress(anywhere.get(self._host, self._host), self._port, None, OWN_USER, self._secret)

    async def __aenter__(self) -> Self:
        """Start the process.

        Raises:
            ConfigError: it cannot listen there.
        """
        _check_free(self._host, self._port)
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None, "started with pipes"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def supervise(self) -> None:
        """Restart it whenever it ends, and end it when it hangs; never returns."""
        pause_s = FIRST_PAUSE_S
        while True:
            if self._process is not None:
                started = time.monotonic()
                status = await self._wait_ended(self._process)
                logger.warning("the embedded broker ended (status %s); starting it again", status)
                pause_s = FIRST_PAUSE_S if time.monotonic() - started > STEADY_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            try:
                await self._start()
            except (ConfigError, OSError) as error:
                logger.warning("%s", error)

    async def _wait_ended(self, process: asyncio.subprocess.Process) -> int:
        """Wait until it has ended, by itself or because it stopped answering; its exit status."""
        missed = 0
        while missed < self._checks.max_misses:
            try:
                async with asyncio.timeout(self._checks.every_s):
                    return await process.wait()
            except TimeoutError:
                missed = 0 if await self._answers() else missed + 1
        if process.returncode is None:
            logger.warning("the embedded broker does not answer; ending it")
            process.kill()
        return await process.wait()

    async def _answers(self) -> bool:
        own = self.own_address()
        try:
            async with asyncio.timeout(self._checks.answer_s):
                reader, writer = await asyncio.open_connection(own.host, own.port)
                try:
                    writer.write(_CONNECT_PACKET)
                    answer = await reader.readexactly(1)
                    writer.write(_DISCONNECT_PACKET)
                finally:
                    writer.transport.abort()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            return False
        return answer[0] == _CONNACK

    async def _start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarm.health.broker.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the service alone, which ends its broker in order
        )
        self._process = process
        assert process.stdin is not None and process.stdout is not None, "started with pipes"  # noqa: PT018
        settings = {
            "host": self._host,
            "port": self._port,
            "prefix": self._prefix,
            "passwords": None if self._passwords is None else str(self._passwords),
            "own_user": OWN_USER,
            "own_secret": self._secret,
        }
        try:
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
            answer = json.loads(line) if line else {"error": "it ended at once"}
        except (TimeoutError, ConnectionError, ValueError) as error:
            answer = {"error": f"it did not start ({error})"}
        if "port" not in answer:
            if process.returncode is None:
                process.kill()
            await process.wait()
            where = BrokerAddress(self._host, self._port)
            raise ConfigError(f"the embedded broker cannot run at {where}: {answer.get('error')}")
        self._port = int(answer["port"])


def _check_free(host: str, port: int) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--broker-port: cannot listen on {host} port {port}: {error}; choose another") from error
