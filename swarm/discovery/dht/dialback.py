"""Dial-back: one DHT peer calls another's gRPC address to see whether others can reach it (as AutoNAT does).

It must be of no use for anything else: only the requester's own signature counts as an answer, the reply is one bit,
and each requester and the whole service are rate-limited.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack

from swarm.discovery.address_proof import HELLO_METHOD, MAX_HELLO_BYTES, NONCE_BYTES, check_hello
from swarm.discovery.node_record import RecordError, split_address
from swarm.ids import PeerId

HANDLER = "canopy/v1/dial-back"
DEADLINE_S = 5.0
_WINDOW_S = 60.0
_MAX_PER_PEER = 6  # in the window
_MAX_REQUESTS = 60  # of all peers, in the window
_MAX_RUNNING = 4  # at a time

HelloCall = Callable[[str, bytes], Awaitable[bytes]]


async def call_hello(address: str, nonce: bytes) -> bytes:
    """Send a Hello.

    Args:
        address: `host:port`
        nonce: what the answer must sign.

    Raises:
        grpc.aio.AioRpcError: nothing answers there.
    """
    import grpc  # here, because most DHT processes never need it

    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", MAX_HELLO_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            HELLO_METHOD, request_serializer=None, response_deserializer=None
        )
        answer: bytes = await method(nonce, timeout=DEADLINE_S)
        return answer


class DialBack:
    """Answers dial-back requests of other peers."""

    def __init__(self, call: HelloCall = call_hello, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._clock = clock
        self._recent: deque[tuple[float, PeerId]] = deque()
        self._running = 0

    async def answer(self, peer: PeerId, request: bytes) -> bytes:
        """Carry out one request.

        Args:
            peer: who asks; libp2p has authenticated it.
            request: see `pack_request`.

        Returns:
            msgpack of true (the peer answered with its signature), false (it did not), or nil (not tried: too busy).
        """
        verdict = await self._check(peer, request)
        packed: bytes = msgpack.packb(verdict)
        return packed

    async def _check(self, peer: PeerId, request: bytes) -> bool | None:
        parsed = parse_request(request)
        if parsed is None:
            return False
        if not self._admit(peer):
            return None
        address, nonce = parsed
        self._running += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                return check_hello(peer, nonce, await self._call(address, nonce))
        except Exception:  # noqa: BLE001  (whatever an unknown address makes gRPC raise means: not reachable)
            return False
        finally:
            self._running -= 1

    def _admit(self, peer: PeerId) -> bool:
        now = self._clock()
        while self._recent and self._recent[0][0] <= now - _WINDOW_S:
            self._recent.popleft()
        own = sum(1 for _, requester in self._recent if requester == peer)
        if self._running >= _MAX_RUNNING or own >= _MAX_PER_PEER or len(self._recent) >= _MAX_REQUESTS:
            return False
        self._recent.append((now, peer))
        return True


def pack_request(address: str, nonce: bytes) -> bytes:
    """A request to call `host:port` and expect this nonce signed."""
    packed: bytes = msgpack.packb([address, nonce])
    return packed


def parse_request(request: bytes) -> tuple[str, bytes] | None:
    """The address and the nonce of a request, or None where it is malformed."""
    if len(request) > 512:
        return None
    try:
        values: Any = msgpack.unpackb(request)
        match values:
            case [str(address), bytes(nonce)] if len(nonce) == NONCE_BYTES:
                split_address(address)
                return address, nonce
            case _:
                return None
    except (ValueError, RecordError, msgpack.UnpackException):
        return None
