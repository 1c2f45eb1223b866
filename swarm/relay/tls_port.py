"""One TLS port for everything that a machine offers, for networks that let nothing else out.

What a connection is for is told by the protocols that its ClientHello names (ALPN):

    h2                  the node's gRPC server: its own TLS goes on to it, unread
    canopy-directory    the DHT peer's libp2p, in this port's TLS
    canopy-relay        what the relay is told (`swarm.relay.openings`), in this port's TLS

This port's own TLS vouches for nobody: what travels inside is encrypted between its two ends. Whoever connects costs
the address that he comes from, as at the relay's own port; the services see a loopback address that stands for it.
"""

from __future__ import annotations

from swarm.egress.ports import DIRECTORY, NODE, RELAY
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.relay.client_hello import MAX_HELLO_BYTES, named_protocols
from swarm.relay.tls_connection import TlsConnection, tls_context
from swarm.relay.visits import Visit


class TlsEntry:
    """Lets connections in."""

    def __init__(self, peer: PeerId, directory: str = "", node: str = "") -> None:
        """Offer the relay, and what else there is.

        Args:
            peer: whose port it is.
            directory: `host:port` of the DHT peer of this machine; empty: it is not offered.
            node: the same of a node.
        """
        self._services = {DIRECTORY: directory} if directory else {}
        self._node = node
        self._context = tls_context(peer, [RELAY, *self._services])

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
        if self._node and NODE in names:
            return self._node
        secured = TlsConnection(visit.connection, self._context)
        visit.connection = secured
        match await secured.shake_hands():
            case None:
                raise RemoteProtocolError("ALPN", "wants what this port does not offer")
            case protocol:
                return self._services.get(protocol, "")
