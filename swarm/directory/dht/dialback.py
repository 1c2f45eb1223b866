"""Dial-back: one DHT peer calls another's gRPC address to see whether others can reach it (as AutoNAT does).

It calls a relay that the other one lends as well, and the other's own part of the directory. It must be of no use for
anything else: only the requester's own signature counts as an answer, the reply is one bit, each requester and the
whole service are rate-limited, and a public machine calls no private address.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

import msgpack

from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.directory.address_proof import (
    HELLO_METHOD,
    MAX_HELLO_BYTES,
    MAX_WHO_BYTES,
    NONCE_BYTES,
    check_hello,
    check_who,
    who_question,
)
from swarm.directory.dht.addresses import check_join_address, host_and_port
from swarm.directory.dht.relay_offers import parse_offer
from swarm.directory.dialable import DialPolicy
from swarm.directory.node_record import split_address
from swarm.directory.peer_proof import prove_peer
from swarm.directory.sealing import RecordError
from swarm.link.certificate import check_certificate
from swarm.link.endpoint import Endpoint, first_stop, parse_relayed
from swarm.link.network_key import NetworkKey

HANDLER = "canopy/v1/dial-back"
RELAY_HANDLER = "canopy/v1/dial-back-relay"
"""Of a name of its own: a peer that does not know it cannot be asked, and says nothing about the relay."""
PEER_HANDLER = "canopy/v1/dial-back-peer"
DEADLINE_S = 5.0
_WINDOW_S = 60.0
_MAX_PER_PEER = 6  # in the window
_MAX_REQUESTS = 60  # of all peers, in the window
_MAX_RUNNING = 4  # at a time

MAX_REQUEST_BYTES = 1_024

WhoCall = Callable[[str, bytes], Awaitable[bytes]]
HelloCall = Callable[[Endpoint, bytes], Awaitable[bytes]]


async def call_hello(
    endpoint: Endpoint, nonce: bytes, *, insecure: bool = False, network: NetworkKey | None = None
) -> bytes:
    """Send a Hello.

    Args:
        endpoint: whom; nobody with another certificate is heard.
        insecure: whether one without a certificate, on this machine, is called in plain text.

    Raises:
        grpc.aio.AioRpcError: nothing answers there.
        SwarmError: the endpoint has no certificate.
    """
    import grpc  # here, because most DHT processes never need it

    from swarm.link.dial import CHANNEL_OPTIONS, open_channel

    options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", MAX_HELLO_BYTES)]
    async with open_channel(endpoint, options, insecure=insecure, network=network) as channel:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            HELLO_METHOD, request_serializer=None, response_deserializer=None
        )
        answer: bytes = await method(nonce, timeout=DEADLINE_S)
        return answer


async def call_who(address: str, nonce: bytes) -> bytes:
    """Ask the relay at `host:port` whose it is; the line that it answers, at most `MAX_WHO_BYTES` and one.

    Raises:
        OSError: nothing answers there.
    """
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host.strip("[]"), port, limit=MAX_WHO_BYTES)
    try:
        writer.write(who_question(nonce))
        line = b""
        while not line.endswith(b"\n") and len(line) <= MAX_WHO_BYTES:
            piece = await reader.read(MAX_WHO_BYTES + 1 - len(line))
            if not piece:
                break
            line += piece
        return line
    finally:
        writer.transport.abort()


class DialBack:
    """Answers dial-back requests of other peers."""

    def __init__(
        self,
        policy: DialPolicy,
        call: HelloCall = call_hello,
        clock: Callable[[], float] = time.monotonic,
        call_relay: WhoCall = call_who,
    ) -> None:
        """Answer for one machine.

        Args:
            policy: which addresses this machine calls on a stranger's word.
            clock: a monotonic one, in seconds.
        """
        self._policy = policy
        self._call = call
        self._call_relay = call_relay
        self._clock = clock
        self._recent: deque[tuple[float, str]] = deque()
        self._running = 0

    async def answer(self, peer: PeerId, request: bytes) -> bytes:
        """Carry out one request.

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
        address, nonce, certificate = parsed
        relayed = parse_relayed(address)
        if relayed is not None and relayed.peer != peer:
            return False

        async def hello(dialled: str) -> bool:
            check_certificate(certificate, peer)
            endpoint = Endpoint(peer, dialled, certificate)
            return check_hello(peer, nonce, endpoint.digest, await self._call(endpoint, nonce))

        return await self._try(peer, address, hello)

    async def answer_relay(self, peer: PeerId, request: bytes) -> bytes:
        """The same for a relay that the peer lends, given as `host:port` in msgpack."""
        addresses = parse_offer(request)

        async def who(dialled: str) -> bool:
            nonce = secrets.token_bytes(NONCE_BYTES)
            return check_who(peer, nonce, await self._call_relay(dialled, nonce))

        verdict = await self._try(f"relay of {peer}", addresses[0], who) if len(addresses) == 1 else False
        packed: bytes = msgpack.packb(verdict)
        return packed

    async def answer_peer(self, peer: PeerId, request: bytes) -> bytes:
        """The same for the peer's own part of the directory, given as a multiaddress in msgpack."""
        place = _own_place(peer, request)

        async def prove(dialled: str) -> bool:
            host, port = split_address(dialled)
            ip = ip_address(host.strip("[]"))
            return await prove_peer(f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{peer}", DEADLINE_S) is True

        verdict = False if place is None else await self._try(f"peer {peer}", place, prove)
        packed: bytes = msgpack.packb(verdict)
        return packed

    async def _try(self, key: str, address: str, ask: Callable[[str], Awaitable[bool]]) -> bool | None:
        """Call an address on a stranger's word, if it may be called; None where too much was called lately."""
        if not self._admit(key):
            return None
        self._running += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                dialled = await self._policy.resolve(address)
                return dialled is not None and await ask(dialled)
        except Exception:  # noqa: BLE001  (whatever an unknown address makes gRPC raise means: not reachable)
            return False
        finally:
            self._running -= 1

    def _admit(self, key: str) -> bool:
        now = self._clock()
        while self._recent and self._recent[0][0] <= now - _WINDOW_S:
            self._recent.popleft()
        own = sum(1 for _, requester in self._recent if requester == key)
        if self._running >= _MAX_RUNNING or own >= _MAX_PER_PEER or len(self._recent) >= _MAX_REQUESTS:
            return False
        self._recent.append((now, key))
        return True


def _own_place(peer: PeerId, request: bytes) -> str | None:
    """The `host:port` of a peer's own multiaddress; None where it is none."""
    try:
        address = msgpack.unpackb(request) if len(request) <= MAX_REQUEST_BYTES else None
        if not isinstance(address, str) or not address.endswith(f"/p2p/{peer}"):
            return None
        check_join_address(address)
        return host_and_port(address)
    except (ValueError, ConfigError, msgpack.UnpackException):
        return None


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
            case [str(address), bytes(nonce), bytes(certificate), *_] if len(nonce) == NONCE_BYTES:  # later ones: more
                split_address(first_stop(address))
                return address, nonce, certificate
            case _:
                return None
    except (ValueError, RecordError, msgpack.UnpackException):
        return None
