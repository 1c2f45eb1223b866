"""The one place that opens gRPC connections to other machines, with every limit and deadline of the transport.

Channels are kept per address, so that links stay warm. Knows no session and sends nothing itself.
"""

from __future__ import annotations

import time
from collections import deque

import grpc.aio
from grpc import ChannelConnectivity

_BOTH_SIDES: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    # Only the identity: a few compressed bytes may not stand for megabytes that the other side has to look through.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_SIDES,
    # A link must reconnect at once or fail at once: repair is the client's decision, not the channel's.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Also how long one attempt may take, by default 20 s: a damaged first frame would cost all of that.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A new channel is a new connection, though another one has the same address.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_SIDES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # A connection must become one soon, is closed where nothing travels, and carries at most all sessions.
    ("grpc.server_handshake_timeout_ms", 3_000),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_concurrent_streams", 1_100),
]


IDLE_S = 60.0
"""How long a channel is kept after its last use."""
WARM_S = 30.0
"""How long what TCP learned of a connection is trusted."""
ABANDONED_KEPT, MAX_ABANDONED = 8, 64
"""Channels that were given up and stay open, since they may carry streams yet: after `tidy`, and until it runs."""


class Dialer:
    """Keeps one channel per address; `async with` closes them all."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._last_use: dict[str, float] = {}
        self._warm_until: dict[str, float] = {}
        self._abandoned: deque[grpc.aio.Channel] = deque()

    def channel(self, address: str, stuck: grpc.aio.Channel | None = None) -> grpc.aio.Channel:
        """The channel to a machine; it connects when first used.

        Args:
            address: `host:port`.
            stuck: a channel on which nothing comes through. If it is this one, there is another from now on: TCP that
                lost a few packets in a row may sleep for seconds before it tries again; a new connection does not.
        """
        self._last_use[address] = time.monotonic()
        if stuck is not None and self._channels.get(address) is stuck and len(self._abandoned) < MAX_ABANDONED:
            self._abandoned.append(self._channels.pop(address))
            self._warm_until.pop(address, None)
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    def was_cold(self, address: str) -> bool:
        """Whether the connection needs warming up. The caller does that now, and it counts as warm for a while."""
        now = time.monotonic()
        was_cold = now >= self._warm_until.get(address, now)
        self._warm_until[address] = now + WARM_S
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
        for address in [address for address, used in self._last_use.items() if used < until]:
            if self._channels[address].get_state() in (ChannelConnectivity.READY, ChannelConnectivity.CONNECTING):
                continue
            channel = self._channels.pop(address)
            self._last_use.pop(address)
            self._warm_until.pop(address, None)
            await channel.close(grace=None)

    async def __aenter__(self) -> Dialer:
        """Nothing is dialled yet."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close every channel."""
        for channel in (*self._channels.values(), *self._abandoned):
            await channel.close(grace=None)
        self._channels.clear()
        self._abandoned.clear()
        self._last_use.clear()
