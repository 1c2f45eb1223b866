"""One TLS port for everything that a machine offers, for networks that let nothing else out.

What a connection is for is told by the protocols that its ClientHello names (ALPN):

    canopy-directory    the DHT peer's libp2p, in this port's TLS
    canopy-relay        what the relay is told (`swarm.relay.openings`), in this port's TLS

This port's own TLS vouches for nobody: what travels inside is encrypted between its two ends. Whoever connects costs
the address that he comes from, as at the relay's own port; the services see a loopback address that stands for it.
"""

from __future__ import annotations

from swarm.egress.ports import DIRECTORY, RELAY
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.relay.client_hello import MAX_HELLO_BYTES, named_protocols
from swarm.relay.tls_connection import TlsConnection, tls_context
from swarm.relay.visits import Visit


class TlsEntry:
    """Lets connections in."""

    def __init__(self, peer: PeerId, directory: str = "") -> None:
        """Offer the relay, and what else there is.

        Args:
            peer: whose port it is.
            directory: `host:port` of the DHT peer of this machine; empty: it is not offered.
        """
        self._services = {DIRECTORY: directory} if directory else {}
        self._offered = {RELAY, *self._services}
        self._context = tls_context(peer, sorted(self._offered))

    async def enter(self, visit: Visit) -> str:
        """Find out what somebody wants.

        Returns:
            `host:port` of a service of this machine, to which the visit's connection is to lead now; empty where the
            relay is meant.

        Raises:
            RemoteProtocolError: it is no TLS, or names nothing that is here.
            OSError: it went.
        """
        names = None
        while names is None:
            names = named_protocols(await visit.connection.look(MAX_HELLO_BYTES))
        if not self._offered.intersection(names):
            raise RemoteProtocolError("ALPN", "wants what this port does not offer")
        secured = TlsConnection(visit.connection, self._context)
        visit.connection = secured
        return self._services.get(await secured.shake_hands(), "")
