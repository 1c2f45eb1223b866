"""The process that a relay runs in, so that the bytes of others never wait for a model, nor a model for them.

`swarm.reach.relay.lending` starts it. Lines of JSON: the parent's first one says what to lend (`RelaySettings`), each
later one answers a question or changes the rate. This process says `{"port": N}` once, `{"load": {...}}` every second
where it has changed, and asks `{"sign": NONCE}`, for it holds no key, and `{"find": PEER}`, for it reads no directory.
It ends when its standard input closes, for then its parent has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

from swarm.base.ids import PeerId
from swarm.base.logs import OneLineFormatter, set_up_logging
from swarm.base.process_limits import raise_file_limit
from swarm.base.tasks import TaskScope
from swarm.reach.relay.server import RelayLoad, RelayServer
from swarm.reach.relay.tls_port import TlsEntry

MAX_LINE_BYTES = 65_536
MAX_UNSIGNED = 64
"""Questions that wait for the parent, at most."""
MAX_UNFOUND = 16
"""Nodes that the parent looks for at a time."""
LOAD_S = 1.0
LOW_PORT = "give it the right (AmbientCapabilities=CAP_NET_BIND_SERVICE in systemd), or forward 443 to a higher port"
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
        members: hex digits of the secret that a private swarm's members sign along; empty where all are carried.
        tls_port: TCP port that offers everything in TLS; None: there is none, and 0 takes a free one.
        directory: `host:port` of the DHT peer of this machine, for the TLS port.
    """

    peer: str
    mbit_per_s: float
    host: str = "0.0.0.0"
    port: int = 0
    takes_any_port: bool = False
    members: str = field(default="", repr=False)
    tls_port: int | None = None
    directory: str = ""


class ParentLines:
    """What is said to the parent, and what it answers."""

    def __init__(self) -> None:
        self._unsigned: deque[asyncio.Future[bytes]] = deque()
        self._unfound: dict[str, asyncio.Future[str]] = {}

    def say(self, **message: object) -> None:
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

    async def find(self, peer: PeerId) -> str:
        """Let the parent find a listed node; questions for the same one wait together.

        Raises:
            OSError: too many questions wait for it.
        """
        answer = self._unfound.get(peer)
        if answer is None:
            if len(self._unfound) >= MAX_UNFOUND:
                raise ConnectionAbortedError("too many nodes are looked for")
            answer = self._unfound[peer] = asyncio.get_running_loop().create_future()
            self.say(find=peer)
        return await asyncio.shield(answer)

    async def listen(self, reader: asyncio.StreamReader, relay: RelayServer) -> None:
        """Take what the parent says until it closes the pipe."""
        while line := await reader.readline():
            match json.loads(line):
                case {"signed": str(signed)}:
                    answer = self._unsigned.popleft()
                    if not answer.done():
                        answer.set_result(signed.encode())
                case {"found": str(peer), "at": str(address)}:
                    self._unfound.pop(peer).set_result(address)
                case {"mbit_per_s": float(mbit)}:
                    relay.lend(mbit)


async def serve() -> None:
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    pipe = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: pipe, sys.stdin.buffer)
    line = await reader.readline()
    if not line:
        return
    settings = RelaySettings(**json.loads(line))
    parent = ParentLines()
    relay = RelayServer(PeerId(settings.peer), parent.sign, settings.mbit_per_s)
    relay.keep_to(bytes.fromhex(settings.members))
    relay.lead_beyond(parent.find)
    async with AsyncExitStack() as stack:
        try:
            tls_port = await _open_tls(stack, relay, settings)
            port = await _open(stack, relay, settings)
        except OSError as error:
            parent.say(error=error.strerror or str(error))
            return
        parent.say(port=port, tls_port=tls_port)
        scope = await stack.enter_async_context(TaskScope())
        scope.spawn(_tell_load(relay, parent))
        await parent.listen(reader, relay)


async def _open(stack: AsyncExitStack, relay: RelayServer, settings: RelaySettings) -> int:
    try:
        return await stack.enter_async_context(relay.listening(settings.host, settings.port))
    except OSError as error:
        if not settings.takes_any_port:
            raise OSError(f"port {settings.port} cannot be had: {error.strerror or error}") from error
        return await stack.enter_async_context(relay.listening(settings.host, 0))


async def _open_tls(stack: AsyncExitStack, relay: RelayServer, settings: RelaySettings) -> int | None:
    if settings.tls_port is None:
        return None
    entry = TlsEntry(PeerId(settings.peer), settings.directory)
    try:
        return await stack.enter_async_context(relay.listening(settings.host, settings.tls_port, entry))
    except PermissionError as error:
        raise OSError(f"the system lets this user not listen on port {settings.tls_port}: {LOW_PORT}") from error
    except OSError as error:
        raise OSError(f"TLS port {settings.tls_port} cannot be had: {error.strerror or error}") from error


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
