"""The seam between a dialled machine and the bytes that reach it: how gRPC is led past a relay. Pure.

gRPC dials a machine's own address, or asks a relay by itself. Whatever else opens a byte stream to a peer stands behind
a door: an address on this machine that gRPC dials instead. What is behind it is of no concern to the channel, since its
encryption has its two ends at the peers.
"""

from __future__ import annotations

import enum
from typing import Protocol

from swarm.transport.endpoint import Endpoint


class LinkPath(enum.Enum):
    """How a connection reaches its machine."""

    DIRECT = "direct"
    LAN = "LAN"
    CALLED_BACK = "called back"
    PUNCHED = "punched"
    RELAYED = "relayed"


class Door(Protocol):
    """A local address that leads to one machine, for one channel."""

    @property
    def address(self) -> str:
        """What gRPC dials, such as `unix:/tmp/…`."""

    @property
    def path(self) -> LinkPath | None:
        """How its latest connection goes; None before there was one."""

    @property
    def can_improve(self) -> bool:
        """Whether a new connection would probably go a better way than this one's latest."""

    def release(self) -> None:
        """Its channel is gone: close it soon. May be called from any thread, and more than once."""


class Ways(Protocol):
    """Opens doors to machines that are reached through relays, or that this machine's network lets it not dial."""

    def open_door(self, endpoint: Endpoint) -> Door | None:
        """A door to a machine; None where nothing is better than to let gRPC dial it, or ask its relay."""
