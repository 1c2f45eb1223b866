"""The one place that opens gRPC connections to other machines, with every limit and deadline of the transport.

Every connection is encrypted, and only the machine whose record was read can answer: its certificate is the one that is
trusted, and its name the one that is expected. There is no falling back to plain text. In a private swarm the dialler
shows a member's certificate too, and who shows none is not heard.
Channels are kept per endpoint, so that links stay warm. Knows no session and sends nothing itself.
"""

from __future__ import annotations

import re
import ssl
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, finalize

import grpc
import grpc.aio
from grpc import ChannelConnectivity

from swarm.base.errors import SwarmError
from swarm.link.certificate import ServerCertificate, server_name
from swarm.link.endpoint import Door, Endpoint, LinkPath, Ways
from swarm.link.network_key import RENEW_S, NetworkKey

ChannelOptions = list[tuple[str, int | str]]

_ONLY_UNCOMPRESSED = 1
"""A bit set of algorithms: a kilobyte on the wire is a kilobyte, never a megabyte of zeros."""

_BOTH_SIDES: ChannelOptions = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.compression_enabled_algorithms_bitset", _ONLY_UNCOMPRESSED),
]

CHANNEL_OPTIONS: ChannelOptions = [
    *_BOTH_SIDES,
    # A proxy of the environment is for browsers; it would learn who talks to whom, or carry nothing.
    ("grpc.enable_http_proxy", 0),
    # A link must reconnect at once or fail at once: repair is the client's decision, not the channel's.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Also how long one attempt may take, by default 20 s: a damaged first frame would cost all of that.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A new channel is a new connection, though another one has the same address.
    ("grpc.use_local_subchannel_pool", 1),
]

# To connect takes sixteen one-way delays of both legs together, and a better way gets a head start.
_PATIENT: ChannelOptions = [("grpc.min_reconnect_backoff_ms", 5_000)]
_RELAYED: ChannelOptions = [("grpc.enable_http_proxy", 1), *_PATIENT]

SERVER_OPTIONS: ChannelOptions = [
    *_BOTH_SIDES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # Who connects and says nothing, or nothing more, holds a file descriptor of ours: not for long.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # Of one connection; a client has two streams per session.
    ("grpc.max_concurrent_streams", 1_100),
]


IDLE_S = 60.0
"""How long a channel is kept after its last use."""
WARM_S = 30.0
"""How long what TCP learned of a connection is trusted."""
ABANDONED_KEPT, MAX_ABANDONED = 8, 64
"""Channels that were given up and stay open, since they may carry streams yet: after `tidy`, and until it runs."""
MAX_CHANNELS = 256
"""Channels that are kept for the next use. One beyond them stays open for as long as somebody uses it."""


def open_channel(
    endpoint: Endpoint,
    options: ChannelOptions,
    *,
    insecure: bool = False,
    door: Door | None = None,
    network: NetworkKey | None = None,
) -> grpc.aio.Channel:
    """A new channel, on which only the machine with the endpoint's certificate can answer.

    Args:
        insecure: whether a machine without a certificate is dialled in plain text, if it is on this machine.
        door: leads to the machine; without one gRPC dials it, or asks its relay.
        network: the private swarm's key, if it is one: the dialler shows that it is a member.

    Raises:
        SwarmError: it announces no certificate.
    """
    if not endpoint.certificate:
        _check_plain(endpoint, insecure)
        return grpc.aio.insecure_channel(endpoint.address, options=options)
    credentials, pinned = pin(endpoint.certificate, server_name(endpoint.peer), network)
    if door is not None:
        return grpc.aio.secure_channel(door.address, credentials, options=[*_with(options, _PATIENT), *pinned])
    if endpoint.relay is None:
        return grpc.aio.secure_channel(endpoint.address, credentials, options=[*options, *pinned])
    through: ChannelOptions = [("grpc.http_proxy", f"http://{endpoint.relay}"), *pinned]
    # gRPC says `CONNECT PEER:1` to the relay, which knows its machines by name; nobody looks a name up here.
    return grpc.aio.secure_channel(f"{endpoint.peer}:1", credentials, options=[*_with(options, _RELAYED), *through])


def _with(options: ChannelOptions, others: ChannelOptions) -> ChannelOptions:
    """Options, of which some are replaced."""
    replaced = {name for name, _ in others}
    return [*(option for option in options if option[0] not in replaced), *others]


def pin(der: bytes, name: str, network: NetworkKey | None = None) -> tuple[grpc.ChannelCredentials, ChannelOptions]:
    """What a channel needs so that only this certificate is accepted, and only under this name."""
    root = ssl.DER_cert_to_PEM_cert(der).encode()
    options: ChannelOptions = [("grpc.ssl_target_name_override", name)]
    if network is None:
        return grpc.ssl_channel_credentials(root_certificates=root), options
    own = network.member()
    return grpc.ssl_channel_credentials(root, own.key_pem, own.pem), options


def bind_port(
    server: grpc.aio.Server, address: str, certificate: ServerCertificate | None, network: NetworkKey | None = None
) -> int:
    """Let a server listen at `host:port` and answer with a certificate; in plain text where there is none.

    Args:
        network: of a private swarm: whoever shows no certificate of its members gets no further than the handshake.

    Returns:
        The TCP port.

    Raises:
        RuntimeError: it cannot be had.
    """
    if certificate is None:
        return server.add_insecure_port(address)
    own = [(certificate.key_pem, certificate.pem)]
    if network is None:
        return server.add_secure_port(address, grpc.ssl_server_credentials(own))
    members_only = grpc.ssl_server_credentials(own, network.authority_pem, require_client_auth=True)
    return server.add_secure_port(address, members_only)


def plain_reason(error: grpc.aio.AioRpcError, *, is_member: bool = False) -> str:
    """What a failed call says, in plain words where the connection could not be made secure."""
    details = error.details() or error.code().name.lower()
    if _CLOSED_AT_ONCE.search(details):
        whom = "has another network key or a wrong clock" if is_member else "has not its network key"
        return f"it hung up at once (Socket closed), as a private swarm does to whoever {whom}"
    return next((plain for sign, plain in _REASONS.items() if sign in details), details)


_CLOSED_AT_ONCE: Final = re.compile(r"failed to connect to all addresses.*Socket closed")
"""TLS 1.3 tells a client only so that its certificate was refused: it counts the handshake as done before."""


_REASONS: Final = {
    "CERTIFICATE_VERIFY_FAILED": "another machine answers there: its certificate is not the one in the record",
    "Hostname Verification Check failed": "another machine answers there: its certificate bears another name",
    "WRONG_VERSION_NUMBER": "what answers there speaks no TLS",
}
"""Plain words by what BoringSSL says."""


def _check_plain(endpoint: Endpoint, insecure: bool) -> None:
    if not insecure:
        raise SwarmError(
            f"{endpoint.address} announces no certificate; links are encrypted, and plain text is only for "
            "a swarm on one machine whose programs all have --insecure"
        )
    if not endpoint.is_loopback:
        raise SwarmError(f"{endpoint.address} announces no certificate; --insecure is for this machine's own addresses")


@dataclass(frozen=True, slots=True)
class Connection:
    """A way to a machine.

    Attributes:
        channel: connects when first used.
        endpoint: whom it leads to: signatures made for this machine name its certificate.
        is_cold: it has carried nothing large for a while.
        is_member: whoever dials shows that it is a member of a private swarm.
    """

    channel: grpc.aio.Channel
    endpoint: Endpoint
    is_cold: bool = False
    is_member: bool = False


@dataclass(slots=True)
class _Kept:
    """A channel for the next use.

    Attributes:
        opened: monotonic seconds; in a private swarm an older channel would reconnect with a certificate that has run
            out.
        warm_until: monotonic seconds; None before its connection was warmed up.
    """

    channel: grpc.aio.Channel
    last_use: float
    opened: float
    warm_until: float | None = None


class Dialer:
    """Keeps one channel per endpoint; `async with` closes them all."""

    def __init__(self, *, insecure: bool = False, ways: Ways | None = None, network: NetworkKey | None = None) -> None:
        """Dial nobody yet.

        Args:
            insecure: whether machines on this machine that announce no certificate are dialled in plain text.
            ways: lead past relays; without them relayed machines are dialled through their relays alone.
        """
        self._insecure = insecure
        self._network = network
        self._ways = ways
        self._doors: WeakKeyDictionary[grpc.aio.Channel, Door] = WeakKeyDictionary()
        self._outdone: WeakSet[grpc.aio.Channel] = WeakSet()  # there is a better way; open while somebody uses them
        self._kept: OrderedDict[Endpoint, _Kept] = OrderedDict()  # the least recently used one first
        self._dropped: WeakValueDictionary[Endpoint, grpc.aio.Channel] = WeakValueDictionary()
        self._abandoned: deque[grpc.aio.Channel] = deque()

    def channel(self, endpoint: Endpoint, stuck: grpc.aio.Channel | None = None) -> grpc.aio.Channel:
        """The channel to a machine; it connects when first used. Whoever has a stream on it keeps a reference to it.

        Args:
            endpoint: the machine, from its signed record.
            stuck: a channel on which nothing comes through. If it is this one, there is another from now on: TCP that
                lost a few packets in a row may sleep for seconds before it tries again; a new connection does not.

        Raises:
            SwarmError: it announces no certificate.
        """
        now = time.monotonic()
        kept = self._kept.pop(endpoint, None)
        if kept is not None and kept.channel is stuck and len(self._abandoned) < MAX_ABANDONED:
            self._abandoned.append(kept.channel)
            kept = None
        if kept is not None and (self._can_improve(kept.channel) or self._runs_out(kept, now)):
            self._outdone.add(kept.channel)
            kept = None
        if kept is None:
            used = None if self._network is not None else self._dropped.pop(endpoint, None)
            kept = _Kept(used if used is not None and used is not stuck else self._open(endpoint), now, now)
        kept.last_use = now
        self._kept[endpoint] = kept
        if len(self._kept) > MAX_CHANNELS:
            oldest, left = self._kept.popitem(last=False)
            self._dropped[oldest] = left.channel  # closes when nobody uses it
        return kept.channel

    def path(self, endpoint: Endpoint) -> LinkPath | None:
        """How the channel for the next use reaches a machine; None before it has connected, or without a channel."""
        kept = self._kept.get(endpoint)
        return None if kept is None else self.path_of(kept.channel, endpoint)

    def path_of(self, channel: grpc.aio.Channel, endpoint: Endpoint) -> LinkPath | None:
        """How a channel of this dialer reaches its machine; None before it has connected."""
        door = self._doors.get(channel)
        if door is not None:
            return door.path
        return LinkPath.DIRECT if endpoint.relay is None else LinkPath.RELAYED

    def was_cold(self, endpoint: Endpoint) -> bool:
        """Whether the connection needs warming up. The caller does that now, and it counts as warm for a while."""
        now = time.monotonic()
        kept = self._kept.get(endpoint)
        if kept is None:
            return True
        was_cold = kept.warm_until is None or now >= kept.warm_until
        kept.warm_until = now + WARM_S
        return was_cold

    async def tidy(self, idle_s: float = IDLE_S) -> None:
        """Close channels that were not asked for lately and are not connected: machines come and go.

        A connected one stays open: its streams may be in use for hours. So do the latest that were given up.

        Args:
            idle_s: how long ago the last use must be.
        """
        while len(self._abandoned) > ABANDONED_KEPT:
            await self._abandoned.popleft().close(grace=None)
        until = time.monotonic() - idle_s
        for endpoint in [endpoint for endpoint, kept in self._kept.items() if kept.last_use < until]:
            channel = self._kept[endpoint].channel
            if channel.get_state() in (ChannelConnectivity.READY, ChannelConnectivity.CONNECTING):
                continue
            del self._kept[endpoint]
            await channel.close(grace=None)

    def _open(self, endpoint: Endpoint) -> grpc.aio.Channel:
        door = None
        if self._ways is not None and endpoint.certificate:
            door = self._ways.open_door(endpoint)
        channel = open_channel(endpoint, CHANNEL_OPTIONS, insecure=self._insecure, door=door, network=self._network)
        if door is not None:
            self._doors[channel] = door
            finalize(channel, door.release).atexit = False
        return channel

    def _runs_out(self, kept: _Kept, now: float) -> bool:
        """Whether it would reconnect with a member's certificate that has run out."""
        return self._network is not None and now - kept.opened > RENEW_S

    def _can_improve(self, channel: grpc.aio.Channel) -> bool:
        door = self._doors.get(channel)
        return door is not None and door.can_improve

    @property
    def is_member(self) -> bool:
        """Whether it shows that it is a member of a private swarm."""
        return self._network is not None

    async def __aenter__(self) -> Dialer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        kept = [one.channel for one in self._kept.values()]
        for channel in (*kept, *self._dropped.values(), *self._abandoned, *self._outdone):
            await channel.close(grace=None)
        for door in self._doors.values():
            door.release()
        self._kept.clear()
        self._dropped.clear()
        self._abandoned.clear()
