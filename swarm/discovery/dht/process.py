"""The process that owns the DHT node and its p2p daemon; `swarm.discovery.dht.child` starts it.

Requests arrive as msgpack `[number, method, arguments]` on standard input, answers leave as `[number, error, value]` on
standard output; error is nil or `[kind, message]`. The process ends when its standard input closes: its owner is gone.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue

from swarm.discovery.dht.dialback import DEADLINE_S, HANDLER, DialBack, pack_request
from swarm.discovery.dht.hivemind_node import (
    Daemon,
    DHTNode,
    Listen,
    P2PContext,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    ValidationError,
    fetch,
    start_daemon,
    start_node,
    store,
)
from swarm.ids import PeerId

MAX_MESSAGE_BYTES = 16 * 2**20
AT_ONCE = 32
JOIN_S = 18.0
CALL_S = 15.0
_LEAVE_S = 4
_ASKED = 3  # peers asked to dial back: one alone could veto


Request = tuple[int, str, dict[str, Any]]


class OwnerGone(Exception):
    """Standard input has closed."""


class RequestRefused(Exception):
    """What is told to the owner instead of a value."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(slots=True)
class DhtPeer:
    """One running DHT node and its daemon."""

    daemon: Daemon
    node: DHTNode

    @classmethod
    async def join(cls, listen: Listen, identity_path: str) -> DhtPeer:
        """Start both; raises `RequestRefused` where nobody answers."""
        try:
            async with asyncio.timeout(JOIN_S):
                daemon = await start_daemon(listen, identity_path)
                peer = cls(daemon, await start_node(daemon, listen))
                if not listen.client:
                    service = DialBack()

                    async def dial_back(request: BytesValue, context: P2PContext) -> BytesValue:
                        asker = PeerId(context.remote_id.to_base58())
                        return BytesValue(value=await service.answer(asker, request.value))

                    await daemon.add_protobuf_handler(HANDLER, dial_back, BytesValue)
                return peer
        except TimeoutError as error:
            raise RequestRefused(f"no peer answers at {_listed(listen)} (waited {JOIN_S:.0f} s)") from error
        except (P2PDaemonError, ValidationError, RuntimeError, OSError) as error:
            raise RequestRefused(_explain(str(error), listen)) from error

    async def describe(self) -> dict[str, Any]:
        """Who this is, and the multiaddresses under which it listens."""
        listens = not self.node.protocol.client_mode
        addresses = [str(address) for address in await self.daemon.get_visible_maddrs(latest=True)] if listens else []
        return {"peer_id": self.daemon.peer_id.to_base58(), "addresses": addresses}

    async def dial_back(self, address: str, nonce: bytes) -> bool | None:
        """Ask up to three peers; one that got through is enough."""
        known: list[PeerID] = list(self.node.protocol.routing_table.uid_to_peer_id.values())
        verdict: bool | None = None
        for peer in random.sample(known, min(_ASKED, len(known))):
            try:
                async with asyncio.timeout(DEADLINE_S + 1):
                    request = BytesValue(value=pack_request(address, nonce))
                    answer = await self.daemon.call_protobuf_handler(peer, HANDLER, request, BytesValue)
                    said = msgpack.unpackb(answer.value)
            except (TimeoutError, P2PHandlerError, P2PDaemonError, ValueError, msgpack.UnpackException):
                continue
            if said is True:
                return True
            verdict = False if said is False else verdict
        return verdict

    async def answer(self, method: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401  (whatever the method gives)
        """Carry out one request of the owner."""
        match method:
            case "describe":
                return await self.describe()
            case "store":
                return await store(self.node, **arguments)
            case "fetch":
                return await fetch(self.node, **arguments)
            case "dial_back":
                return await self.dial_back(**arguments)
            case _:
                raise RequestRefused(f"no method {method}")

    async def leave(self) -> None:
        """Say goodbye to the daemon."""
        await self.node.shutdown()
        await self.daemon.shutdown()


def _listed(listen: Listen) -> str:
    return ", ".join(listen.join) or "no address"


def _explain(reason: str, listen: Listen) -> str:
    text = " ".join(reason.split())
    if "local time must be within" in text:
        return f"this machine's clock differs by more than 3 s from the swarm's: set it (NTP) and try again ({text})"
    if "can't access this node" in text:
        return f"the swarm's peers cannot reach this machine: open its DHT port or set --announce-address ({text})"
    if listen.join and ("bootstrap" in text or "start in" in text):
        return f"no peer answers at {_listed(listen)}"
    return f"the p2p daemon did not start: {text[:300]}"


class ParentPipe:
    """The other end of the pipes."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output

    async def requests(self, source: BinaryIO) -> AsyncIterator[Request]:
        """Requests until the pipe closes."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: _Pipe(reader), source)
        unpacker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES)
        while data := await reader.read(2**16):
            unpacker.feed(data)
            for number, method, arguments in unpacker:
                yield number, method, arguments

    def reply(self, number: int, error: str | None, value: Any = None) -> None:  # noqa: ANN401
        """Answer one request. The owner always reads, and has few requests open, so this does not block for long."""
        with suppress(BrokenPipeError):
            self._output.write(msgpack.packb([number, error, value]))
            self._output.flush()


class _Pipe(asyncio.StreamReaderProtocol):
    def connection_lost(self, exc: Exception | None) -> None:
        signal.alarm(_LEAVE_S)  # whatever hangs from here on is cut short; the daemon dies with us
        super().connection_lost(exc)


async def serve(owner: ParentPipe, source: BinaryIO) -> None:
    """Join on the first request, then answer until the owner closes the pipe or the daemon dies."""
    requests = owner.requests(source)
    number, _, arguments = await anext(requests)
    folder = str(arguments["folder"])
    try:
        Daemon.keep_sockets_in(folder)
        peer = await _open(owner, number, arguments)
        if peer is not None:
            await _answer_all(peer, owner, requests)
            await peer.leave()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _answer_all(peer: DhtPeer, owner: ParentPipe, requests: AsyncIterator[Request]) -> None:
    slots = asyncio.Semaphore(AT_ONCE)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_end_with_daemon(peer.daemon))
            async for request in requests:
                await slots.acquire()
                tasks.create_task(_answer(peer, owner, request, slots))
            raise OwnerGone
    except* OwnerGone:
        pass


async def _open(owner: ParentPipe, number: int, arguments: dict[str, Any]) -> DhtPeer | None:
    try:
        peer = await DhtPeer.join(Listen(**arguments["listen"]), arguments["identity_path"])
    except RequestRefused as error:
        owner.reply(number, error.message)
        return None
    owner.reply(number, None, await peer.describe())
    return peer


async def _answer(peer: DhtPeer, owner: ParentPipe, request: Request, slots: asyncio.Semaphore) -> None:
    number, method, arguments = request
    try:
        async with asyncio.timeout(CALL_S):
            owner.reply(number, None, await peer.answer(method, arguments))
    except TimeoutError:
        owner.reply(number, f"the DHT did not answer within {CALL_S:.0f} s")
    except Exception as error:  # noqa: BLE001  (hivemind raises anything; the owner is told, this process lives on)
        owner.reply(number, f"{method} failed: {error!r:.300}")
    finally:
        slots.release()


async def _end_with_daemon(daemon: Daemon) -> None:
    await daemon.wait_ended()
    sys.exit("the p2p daemon died")


def main() -> None:
    """Run until standard input closes. Ctrl-C and SIGTERM are the owner's to act on."""
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)  # unlike SIG_IGN, not inherited by the daemon
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints does not disturb the protocol
    asyncio.run(serve(ParentPipe(output), sys.stdin.buffer))


if __name__ == "__main__":
    main()
