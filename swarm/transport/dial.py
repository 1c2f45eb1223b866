"""The one place that opens gRPC connections to other machines, with every limit and deadline of the transport.

Channels are kept per address, so that links stay warm. Tunnelling for machines behind NAT would go here.
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
]


IDLE_S = 60.0
WARM_S = 30.0
"""How long what TCP learned of a connection is trusted."""
LEFT, MOST_LEFT = 8, 64
"""So many channels that were given up stay open, for they may carry streams yet; at most so many until `tidy` runs."""


class Dialer:
    """Keeps one channel per address; `async with` closes them all."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._asked: dict[str, float] = {}
        self._warm_until: dict[str, float] = {}
        self._left: deque[grpc.aio.Channel] = deque()

    def channel(self, address: str, stuck: grpc.aio.Channel | None = None) -> grpc.aio.Channel:
        """The channel to `host:port`; it connects when first used.

        stuck: one on which nothing comes through. If it is this one, there is another from now on: TCP, which lost a
        few packets in a row, may sleep for seconds before it tries again, and a new connection need not wait for that.
        """
        self._asked[address] = time.monotonic()
        if stuck is not None and self._channels.get(address) is stuck and len(self._left) < MOST_LEFT:
            self._left.append(self._channels.pop(address))
            self._warm_until.pop(address, None)
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    def was_cold(self, address: str) -> bool:
        """Whether the connection needs warming up; the caller does it now, and it counts as warm for a while."""
        now = time.monotonic()
        was_cold = now >= self._warm_until.get(address, now)
        self._warm_until[address] = now + WARM_S
        return was_cold

    async def tidy(self, idle_s: float = IDLE_S) -> None:
        """Close channels that nobody asked for lately and that are not connected: machines come and go.

        A connected one is left alone: its streams may be in use for hours. Of those that were given up a few are.
        """
        while len(self._left) > LEFT:
            await self._left.popleft().close(grace=None)
        until = time.monotonic() - idle_s
        for address in [address for address, asked in self._asked.items() if asked < until]:
            if self._channels[address].get_state() in (ChannelConnectivity.READY, ChannelConnectivity.CONNECTING):
                continue
            channel = self._channels.pop(address)
            self._asked.pop(address)
            self._warm_until.pop(address, None)
            await channel.close(grace=None)

    async def __aenter__(self) -> Dialer:
        """Nothing is dialled yet."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close every channel."""
        for channel in (*self._channels.values(), *self._left):
            await channel.close(grace=None)
        self._channels.clear()
        self._left.clear()
        self._asked.clear()
