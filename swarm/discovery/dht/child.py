"""The parent's end of the DHT process: starts it, exchanges msgpack messages with it, ends it and its daemon."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgpack

from swarm.errors import RegistryError

_log = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 16 * 2**20
_MAX_LINE_BYTES = 8_192
_MAX_RUNNING = 32  # requests that are unanswered at a time
_MAX_URGENT = 4  # those beside them, for which other requests never wait
_MAX_WAITING = 256  # requests that wait for their turn
REFUSED = "refused a stranger"
"""How a line of the DHT process begins that its user wants to know of."""
NO_ANSWER = "the DHT process did not answer"
_LEAVE_S = 6.0  # for the process to end by itself


class DhtPipe(asyncio.SubprocessProtocol):
    """Requests to the DHT process and its answers. All callbacks run in the event loop; there is no task."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._slots = asyncio.Semaphore(_MAX_RUNNING)
        self._urgent_slots = asyncio.Semaphore(_MAX_URGENT)
        self._turns = 0
        self._ended = asyncio.Event()
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MAX_MESSAGE_BYTES)
        self._line = b""
        self._last_line = ""
        self._number = 0
        self._transport: asyncio.SubprocessTransport

    async def call(self, method: str, arguments: dict[str, Any], deadline_s: float, *, is_urgent: bool = False) -> Any:  # noqa: ANN401  (the answer)
        """Send the DHT process a request and return its answer.

        Args:
            method: what to do.
            arguments: by name.
            deadline_s: seconds to wait.
            is_urgent: whether it has places of its own, so that it waits for no look-up; announcements have.

        Raises:
            RegistryError: it refused, died, or did not answer in time, or too many wait already.
        """
        slots = self._urgent_slots if is_urgent else self._slots
        if self._turns >= _MAX_WAITING + _MAX_RUNNING and not is_urgent:
            raise RegistryError("too many questions to the DHT wait for their turn")
        self._turns += not is_urgent
        try:
            async with asyncio.timeout(deadline_s), slots:
                if self._ended.is_set():
                    raise self._gone()
                self._number += 1
                number = self._number
                answer = self._waiting[number] = asyncio.get_running_loop().create_future()
                try:
                    self._input.write(msgpack.packb([number, method, arguments]))
                    return await answer
                finally:
                    del self._waiting[number]
        except TimeoutError as error:
            raise RegistryError(f"{NO_ANSWER} within {deadline_s:.0f} s ({method})") from error
        finally:
            self._turns -= not is_urgent

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def aclose(self) -> None:
        """End the process and everything that it started."""
        self._input.close()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._ended.wait()
        except TimeoutError:
            _log.info("the DHT process did not leave by itself")
        finally:
            self._kill_group()
            self._transport.close()
        await self._ended.wait()

    @property
    def _input(self) -> asyncio.WriteTransport:
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def _kill_group(self) -> None:
        if self._ended.is_set():
            return  # its process id may belong to another process by now
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by asyncio: answers arrive on 1, log lines on 2."""
        if fd == 2:
            self._log_stderr(data)
            return
        try:
            self._unpacker.feed(data)
            for number, error, value in self._unpacker:
                self._resolve(number, error, value)
        except (ValueError, TypeError, msgpack.UnpackException):
            _log.exception("the DHT process does not speak its protocol")
            self._kill_group()

    def _resolve(self, number: int, error: str | None, value: Any) -> None:  # noqa: ANN401  (the answer)
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(RegistryError(error))

    def _log_stderr(self, data: bytes) -> None:
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._last_line = line[:_MAX_LINE_BYTES].decode(errors="replace").strip() or self._last_line
            _log.log(logging.WARNING if REFUSED in self._last_line else logging.INFO, "dht: %s", self._last_line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Called by asyncio: a process that has closed its output cannot answer any more."""
        if fd == 1:
            self._kill_group()

    def process_exited(self) -> None:
        """Called by asyncio when the process has ended: its daemon must end too."""
        self._kill_group()
        self._ended.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._gone())

    def _gone(self) -> RegistryError:
        return RegistryError(f"the DHT process has ended: {self._last_line or 'it was killed'}")


DHT_PROCESS = (sys.executable, "-P", "-m", "swarm.discovery.dht.process")


async def start_pipe(command: Sequence[str] = DHT_PROCESS) -> DhtPipe:
    """Start the DHT process in a session of its own, so that Ctrl-C in the terminal reaches only its parent."""
    root = str(Path(__file__).parents[3])  # found also where the package is not installed, whatever the folder
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    loop = asyncio.get_running_loop()
    _, pipe = await loop.subprocess_exec(DhtPipe, *command, start_new_session=True, env=environment)
    return pipe
