"""What a way is: something that opens a byte stream to a peer. Another transport becomes one more of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from swarm.base.errors import SwarmError
from swarm.base.ids import PeerId
from swarm.link.egress.streams import Streams
from swarm.link.endpoint import LinkPath

REMEMBERED_S: Final = 600.0
"""For how long a way that failed is not tried again to the same peer."""
SOON_S: Final = 30.0
"""The same where it did not come to a real attempt: the relay or the peer was busy, or gone."""


@dataclass(frozen=True, slots=True)
class OpenedWay:
    """A connection to a peer.

    Attributes:
        streams: bytes for the peer and nothing else, from the first byte on.
        path: how it goes.
    """

    streams: Streams
    path: LinkPath


class NoWay(SwarmError):
    """A way does not lead to a peer.

    Attributes:
        again_s: seconds until it may be tried again.
    """

    def __init__(self, reason: str, again_s: float = SOON_S) -> None:
        super().__init__(reason)
        self.again_s = again_s


class Way(Protocol):
    """One kind of path to peers. Vouches for nobody: what travels is encrypted between its two ends."""

    @property
    def name(self) -> str:
        """What failures are remembered by, such as "punch"."""

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        """A connection to a peer, within a few seconds.

        Raises:
            NoWay: there is none.
            OSError, TimeoutError, RemoteProtocolError: somebody on the way does not answer, or not as they should.
        """
