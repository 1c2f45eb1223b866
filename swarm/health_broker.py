"""The owner's end of the embedded broker: starts its process, restarts it when it ends, ends it with itself."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from swarm.broker_address import BrokerAddress
from swarm.errors import ConfigError

logger = logging.getLogger(__name__)

START_S = 30.0
STOP_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 60.0
"""A broker that ran so long is started again at once."""
OWN_USER = "swarm-health"


class EmbeddedBroker:
    """`async with EmbeddedBroker(…) as broker`, and `keep` in a task. What floods it ends its process alone."""

    def __init__(self, host: str, port: int, prefix: str, passwords: Path | None) -> None:
        if passwords is not None and not passwords.is_file():
            raise ConfigError(f"--broker-passwords {passwords}: no such file")
        self._host, self._port, self._prefix, self._passwords = host, port, prefix, passwords
        self._secret = secrets.token_urlsafe(24)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> BrokerAddress:
        """Where nodes publish."""
        return BrokerAddress(self._host, self._port)

    def own_address(self) -> BrokerAddress:
        """Where the health service listens to it: only this user may subscribe."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return BrokerAddress(anywhere.get(self._host, self._host), self._port, None, OWN_USER, self._secret)

    async def __aenter__(self) -> Self:
        """Start it.

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

    async def keep(self) -> None:
        """Start it again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while True:
            if self._process is not None:
                started = time.monotonic()
                status = await self._process.wait()
                logger.warning("the embedded broker ended (status %s); starting it again", status)
                pause_s = FIRST_PAUSE_S if time.monotonic() - started > STEADY_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                await self._start()
            except ConfigError as error:
                logger.warning("%s", error)

    async def _start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarm.broker_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the service alone, which ends its broker in order
        )
        self._process = process
        assert process.stdin is not None and process.stdout is not None, "started with pipes"  # noqa: PT018
        told = {
            "host": self._host,
            "port": self._port,
            "prefix": self._prefix,
            "passwords": None if self._passwords is None else str(self._passwords),
            "own_user": OWN_USER,
            "own_secret": self._secret,
        }
        try:
            process.stdin.write(json.dumps(told).encode() + b"\n")
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
