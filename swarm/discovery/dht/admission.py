"""Who is heard by a peer of the directory: everybody, or in a private swarm those who prove that they have its key.

A proof is a function of the key and of the peer id, which libp2p proves for each connection: so it is of no use to whom
it was said, and a stranger cannot make one. A stranger hears that he is none, and nothing else: no record, no model, no
neighbour, no dial-back.
"""

from __future__ import annotations

from typing import Any

from swarm.discovery.dht.hivemind_node import DHTID, AuthorizerBase, PeerID
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.transport.network_key import PROOF_BYTES, NetworkKey

STRANGER = "this is a private swarm"
"""What a stranger is told."""


class StrangerRefused(SwarmError):
    """Who asks has not proven that it is a member."""


class NetworkAdmission(AuthorizerBase):  # type: ignore[misc]  # hivemind is untyped
    """What one member of a private swarm says to the others with each message, and asks of them.

    hivemind signs and checks through this; it does not say here who asks, so `DirectoryProtocol` checks requests.
    """

    def __init__(self, network: NetworkKey, own: PeerId) -> None:
        """Speak for one member.

        Args:
            network: the swarm's key.
            own: this machine's peer id.
        """
        self._network = network
        self._own_proof = network.proof(own)

    def place(self, peer: PeerID) -> DHTID:
        """The one Kademlia id of a member."""
        return DHTID.from_bytes(self._network.place(PeerId(peer.to_base58())))

    def check(self, peer: PeerID, proof: bytes) -> None:
        """Hear a member only.

        Args:
            peer: who asks; libp2p has authenticated it.
            proof: what came with the message.

        Raises:
            StrangerRefused: it proves nothing.
        """
        if not self._network.is_proof(PeerId(peer.to_base58()), proof):
            raise StrangerRefused(STRANGER)

    def seal(self, payload: bytes) -> bytes:
        """A message to a handler of our own, with this member's proof before it."""
        return self._own_proof + payload

    def unseal(self, peer: PeerID, message: bytes) -> bytes:
        """What a member says to a handler of our own.

        Raises:
            StrangerRefused: it is no member.
        """
        self.check(peer, message[:PROOF_BYTES])
        return message[PROOF_BYTES:]

    async def sign_request(self, request: Any, service_public_key: object) -> None:  # noqa: ANN401 - any of three
        """Say who asks; called by hivemind before each question."""
        request.auth.signature = self._own_proof

    async def validate_request(self, request: object) -> bool:
        """Whoever asks is checked where it is known."""
        return True

    async def sign_response(self, response: Any, request: object) -> None:  # noqa: ANN401 - any of three
        """Say who answers."""
        response.auth.signature = self._own_proof

    async def validate_response(self, response: object, request: object) -> bool:
        """Whoever answers is checked where it is known."""
        return True


def seal_for(admission: NetworkAdmission | None, payload: bytes) -> bytes:
    """A message to a handler of our own, as this swarm has them."""
    return payload if admission is None else admission.seal(payload)


def unseal_from(admission: NetworkAdmission | None, peer: PeerID, message: bytes) -> bytes:
    """What a peer says to a handler of our own.

    Raises:
        StrangerRefused: it is no member of this private swarm.
    """
    return message if admission is None else admission.unseal(peer, message)
