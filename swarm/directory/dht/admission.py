"""Who is heard by a peer of the directory: those of its own swarm.

In a private swarm they prove that they have its key. The proof is a function of the key and of the peer id, which
libp2p proves for each connection: so it is of no use to whom it was said, and a stranger cannot make one. A stranger
hears that he is none, and nothing else: no record, no model, no neighbour, no dial-back.

In an open swarm everybody is heard but who says that it is of another one, by its id: two swarms with a machine in
common would flow into each other otherwise. Release 0.2 says no id, and is heard.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import Any, Final

from swarm.base.errors import SwarmError
from swarm.base.ids import SWARM_ID_BYTES, PeerId, SwarmId, as_swarm_id, shown_swarm
from swarm.directory.dht.hivemind_node import DHTID, AuthorizerBase, PeerID
from swarm.link.network_key import PROOF_BYTES, NetworkKey

STRANGER = "this is a private swarm"
"""What a stranger is told."""
_SEALED: Final = b"\xc1swarm"
"""Before an open swarm's id in a message to a handler of our own; nothing that release 0.2 says begins so."""
_MAX_TELLING: Final = 4_096


class StrangerRefused(SwarmError):
    """Who asks has not proven that it is a member, or is of another swarm."""

    def __init__(self, told: str, who: str = "has not this swarm's network key") -> None:
        super().__init__(told)
        self.who = who


class DirectoryAdmission(AuthorizerBase):  # type: ignore[misc]  # hivemind is untyped
    """What one machine says to the others with each message, and asks of them.

    hivemind signs through this; it does not say here who asks, so `DirectoryProtocol` checks requests.
    """

    @abstractmethod
    def place(self, peer: PeerID) -> DHTID:
        """The one Kademlia id of a peer."""

    @abstractmethod
    def hear(self, peer: PeerID, auth: Any) -> None:  # noqa: ANN401 - of any request
        """Hear a question of this swarm only.

        Raises:
            StrangerRefused: it is none of this swarm.
        """

    @abstractmethod
    def seal(self, peer: PeerID, payload: bytes) -> bytes:
        """A message to a handler of our own at a peer, with what says whose it is before it."""

    @abstractmethod
    def unseal(self, peer: PeerID, message: bytes) -> bytes:
        """What a peer says to a handler of our own.

        Raises:
            StrangerRefused: it is none of this swarm.
        """

    def is_ours(self, swarm: SwarmId | None) -> bool:
        """Whether a record may lie here that says so of its swarm."""
        return True

    def note(self, peer: PeerID, auth: Any) -> None:  # noqa: ANN401 - of any answer that was believed
        """Learn what a peer's release can read."""

    async def validate_request(self, request: object) -> bool:
        """Whoever asks is checked where it is known."""
        return True


class NetworkAdmission(DirectoryAdmission):
    """Of one member of a private swarm."""

    def __init__(self, network: NetworkKey, own: PeerId) -> None:
        self._network = network
        self._own_proof = network.proof(own)

    def place(self, peer: PeerID) -> DHTID:
        """A place that only members can tell."""
        return DHTID.from_bytes(self._network.place(PeerId(peer.to_base58())))

    def hear(self, peer: PeerID, auth: Any) -> None:  # noqa: ANN401
        self._check(peer, auth.signature)

    def _check(self, peer: PeerID, proof: bytes) -> None:
        if not self._network.is_proof(PeerId(peer.to_base58()), proof):
            raise StrangerRefused(STRANGER)

    def seal(self, peer: PeerID, payload: bytes) -> bytes:
        """A message with this member's proof before it."""
        return self._own_proof + payload

    def unseal(self, peer: PeerID, message: bytes) -> bytes:
        self._check(peer, message[:PROOF_BYTES])
        return message[PROOF_BYTES:]

    async def sign_request(self, request: Any, service_public_key: object) -> None:  # noqa: ANN401 - any of three
        """Say who asks; called by hivemind before each question."""
        request.auth.signature = self._own_proof

    async def sign_response(self, response: Any, request: object) -> None:  # noqa: ANN401 - any of three
        response.auth.signature = self._own_proof

    async def validate_response(self, response: object, request: object) -> bool:
        """Whoever answers is checked where it is known."""
        return True


class SwarmAdmission(DirectoryAdmission):
    """Of one machine of an open swarm that has an id."""

    def __init__(self, swarm: SwarmId) -> None:
        self._swarm = swarm
        self._telling: set[PeerID] = set()

    def place(self, peer: PeerID) -> DHTID:
        """The hash of the peer id, as in every open swarm."""
        return open_place(peer)

    def hear(self, peer: PeerID, auth: Any) -> None:  # noqa: ANN401
        """Hear everybody but who is of another swarm."""
        self._check(auth.nonce)
        self.note(peer, auth)

    def note(self, peer: PeerID, auth: Any) -> None:  # noqa: ANN401
        """Whoever says an id reads one; release 0.2 does not."""
        if auth.nonce:
            if len(self._telling) >= _MAX_TELLING:
                self._telling.clear()
            self._telling.add(peer)

    def _check(self, said: bytes) -> None:
        if said and said != self._swarm:
            here, there = shown_swarm(self._swarm), shown_swarm(as_swarm_id(said))
            raise StrangerRefused(f"this is {here}, not {there}", f"is of {there}, and this is {here}")

    def seal(self, peer: PeerID, payload: bytes) -> bytes:
        """A message with the swarm's id before it, to whoever is known to read it."""
        return _SEALED + self._swarm + payload if peer in self._telling else payload

    def unseal(self, peer: PeerID, message: bytes) -> bytes:
        """What a machine of this swarm says, or of release 0.2."""
        if not message.startswith(_SEALED):
            return message
        said, payload = message[len(_SEALED) :][:SWARM_ID_BYTES], message[len(_SEALED) + SWARM_ID_BYTES :]
        self._check(said)
        return payload

    def is_ours(self, swarm: SwarmId | None) -> bool:
        """Whether a record is of this swarm, or of a machine that knows of no id."""
        return swarm is None or swarm == self._swarm

    async def sign_request(self, request: Any, service_public_key: object) -> None:  # noqa: ANN401 - any of three
        """Say which swarm asks; release 0.2 does not look there."""
        request.auth.nonce = self._swarm

    async def sign_response(self, response: Any, request: object) -> None:  # noqa: ANN401 - any of three
        response.auth.nonce = self._swarm

    async def validate_response(self, response: Any, request: object) -> bool:  # noqa: ANN401 - any of three
        """Believe nobody who is of another swarm."""
        return response is not None and response.auth.nonce in (b"", self._swarm)


def open_place(peer: PeerID) -> DHTID:
    """The one Kademlia id of a peer of an open swarm."""
    return DHTID.from_bytes(hashlib.sha1(peer.to_bytes(), usedforsecurity=False).digest())


def seal_for(admission: DirectoryAdmission | None, peer: PeerID, payload: bytes) -> bytes:
    """A message to a handler of our own at a peer, as this swarm has them."""
    return payload if admission is None else admission.seal(peer, payload)


def unseal_from(admission: DirectoryAdmission | None, peer: PeerID, message: bytes) -> bytes:
    """What a peer says to a handler of our own.

    Raises:
        StrangerRefused: it is none of this swarm.
    """
    return message if admission is None else admission.unseal(peer, message)
