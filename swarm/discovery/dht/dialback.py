"""Dial-back: one DHT peer calls another's gRPC address to see whether others can reach it (as AutoNAT does).

It must be of no use for anything else: only the requester's own signature counts as an answer, the reply is one bit,
each requester and the whole service are rate-limited, and a public machine calls no private address.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack

from swarm.discovery.address_proof import HELLO_METHOD, MAX_HELLO_BYTES, NONCE_BYTES, check_hello
from swarm.discovery.dialable import DialPolicy
from swarm.discovery.node_record import split_address
from swarm.discovery.record_fields import RecordError
from swarm.ids import PeerId
from swarm.transport.certificate import check_certificate
from swarm.transport.endpoint import Endpoint
from swarm.transport.network_key import NetworkKey
from swarm.transport.relayed import first_stop, parse_relayed

HANDLER = "canopy/v1/dial-back"
DEADLINE_S = 5.0
_WINDOW_S = 60.0
_MAX_PER_PEER = 6  # in the window
_MAX_REQUESTS = 60  # of all peers, in the window
_MAX_RUNNING = 4  # at a time

MAX_REQUEST_BYTES = 1_024

HelloCall = Callable[[Endpoint, bytes], Awaitable[bytes]]


async def call_hello(
    endpoint: Endpoint, nonce: bytes, *, insecure: bool = False, network: NetworkKey | None = None
) -> bytes:
    """Send a Hello.

    Args:
        endpoint: whom; nobody with another certificate is heard.
        nonce: what the answer must sign.
        insecure: whether one without a certificate, on this machine, is called in plain text.
        network: the private swarm's key, if it is one.

    Raises:
        grpc.aio.AioRpcError: nothing answers there.
        SwarmError: the endpoint has no certificate.
    """
    import grpc  # here, because most DHT processes never need it

    from swarm.transport.dial import CHANNEL_OPTIONS, open_channel

    options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", MAX_HELLO_BYTES)]
    async with open_channel(endpoint, options, insecure=insecure, network=network) as channel:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            HELLO_METHOD, request_serializer=None, response_deserializer=None
        )
        answer: bytes = await method(nonce, timeout=DEADLINE_S)
        return answer


class DialBack:
    """Answers dial-back requests of other peers."""

    def __init__(
        self, policy: DialPolicy, call: HelloCall = call_hello, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Answer for one machine.

        Args:
            policy: which addresses this machine calls on a stranger's word.
            call: sends a Hello.
            clock: a monotonic one, in seconds.
        """
        self._policy = policy
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
            msgpack of true (the peer answered with its signature), false (it did not, or this machine calls no such
            address), or nil (not tried: too busy).
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
        address, nonce, certificate = parsed
        relayed = parse_relayed(address)
        if relayed is not None and relayed.peer != peer:
            return False
        self._running += 1
        try:
            check_certificate(certificate, peer)
            async with asyncio.timeout(DEADLINE_S):
                dialled = await self._policy.resolve(address)
                if dialled is None:
                    return False
                endpoint = Endpoint(peer, dialled, certificate)
                return check_hello(peer, nonce, endpoint.digest, await self._call(endpoint, nonce))
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


def pack_request(address: str, nonce: bytes, certificate: bytes) -> bytes:
    """A request to call `host:port`, accept only this certificate (DER), and expect this nonce signed."""
    packed: bytes = msgpack.packb([address, nonce, certificate])
    return packed


def parse_request(request: bytes) -> tuple[str, bytes, bytes] | None:
    """The address, the nonce and the certificate of a request, or None where it is malformed."""
    if len(request) > MAX_REQUEST_BYTES:
        return None
    try:
        values: Any = msgpack.unpackb(request)
        match values:
            case [str(address), bytes(nonce), bytes(certificate)] if len(nonce) == NONCE_BYTES:
                split_address(first_stop(address))
                return address, nonce, certificate
            case _:
                return None
    except (ValueError, RecordError, msgpack.UnpackException):
        return None
