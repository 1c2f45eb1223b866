"""The process that a relay runs in, so that the bytes of others never wait for a model, nor a model for them.

`swarm.relay.process` starts it. Lines of JSON: the parent's first one says what to lend (`RelaySettings`), each later
one answers a question or changes the rate. This process says `{"port": N}` once, `{"load": {...}}` every second where
it has changed, and asks `{"sign": NONCE}`: it holds no key. It ends when its standard input closes, for then its parent
has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

from swarm.ids import PeerId
from swarm.relay.server import RelayLoad, RelayServer
from swarm.runtime.file_limit import raise_file_limit
from swarm.runtime.logs import OneLineFormatter, set_up_logging
from swarm.runtime.tasks import TaskScope

MAX_LINE_BYTES = 65_536
MAX_UNSIGNED = 64
"""Questions that wait for the parent, at most."""
LOAD_S = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """What a relay is told.

    Attributes:
        peer: whose it is.
        mbit_per_s: what it carries at most, both ways counted.
        host: IP address to listen on.
        port: TCP port; 0 takes a free one.
        takes_any_port: whether another port will do where that one is taken.
    """

    peer: str
    mbit_per_s: float
    host: str = "0.0.0.0"
    port: int = 0
    takes_any_port: bool = False


class ParentLines:
    """What is said to the parent, and what it answers."""

    def __init__(self) -> None:
        self._unsigned: deque[asyncio.Future[bytes]] = deque()

    def say(self, **message: object) -> None:
        """Write one line. The parent always reads."""
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    async def sign(self, nonce: bytes) -> bytes:
        """Let the parent sign. It answers in order.

        Raises:
            OSError: too many questions wait for it.
        """
        if len(self._unsigned) >= MAX_UNSIGNED:
            raise ConnectionAbortedError("too many wait for a signature")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unsigned.append(answer)
        self.say(sign=nonce.hex())
        return await answer

    async def listen(self, reader: asyncio.StreamReader, relay: RelayServer) -> None:
        """Take what the parent says until it closes the pipe."""
        while line := await reader.readline():
            match json.loads(line):
                case {"signed": str(signed)}:
                    answer = self._unsigned.popleft()
                    if not answer.done():
                        answer.set_result(signed.encode())
                case {"mbit_per_s": float(mbit)}:
                    relay.lend(mbit)


async def serve() -> None:
    """Relay until standard input closes."""
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    pipe = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: pipe, sys.stdin.buffer)
    line = await reader.readline()
    if not line:
        return
    settings = RelaySettings(**json.loads(line))
    parent = ParentLines()
    relay = RelayServer(PeerId(settings.peer), parent.sign, settings.mbit_per_s)
    async with AsyncExitStack() as stack:
        try:
            port = await stack.enter_async_context(relay.listening(settings.host, settings.port))
        except OSError as error:
            if not settings.takes_any_port:
                parent.say(error=f"port {settings.port} cannot be had: {error.strerror or error}")
                return
            port = await stack.enter_async_context(relay.listening(settings.host, 0))
        parent.say(port=port)
        scope = await stack.enter_async_context(TaskScope())
        scope.spawn(_tell_load(relay, parent))
        await parent.listen(reader, relay)


async def _tell_load(relay: RelayServer, parent: ParentLines) -> None:
    told: RelayLoad | None = None
    while True:
        load = relay.load
        if load != told:
            parent.say(load=asdict(load))
            told = load
        await asyncio.sleep(LOAD_S)


def main() -> None:
    """Run until the parent ends. Ctrl-C and SIGTERM are left to the parent."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also where this process hangs
        if os.getppid() == 1:
            return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging("WARNING", OneLineFormatter("%(message)s"))
    raise_file_limit()
    asyncio.run(serve())


if __name__ == "__main__":
    main()
