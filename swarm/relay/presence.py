"""The proof with which a machine claims its name at a relay: its signature over the relay's name and a nonce. Pure.

Another relay cannot use it: its name is in what is signed. Nobody can use it later: the nonce is the relay's.
In a private swarm both sides put `NetworkKey.presence` behind the nonce, so that its relays carry members only.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Final

from swarm.discovery.identity import Identity
from swarm.ids import PeerId
from swarm.protocol.peer_keys import verify

NONCE_BYTES: Final = 16
_DOMAIN: Final = b"canopy-relay-here-1\n"


def prove_presence(identity: Identity, relay: PeerId, nonce: bytes) -> tuple[str, str]:
    """Public key and signature, in base 64.

    Args:
        identity: who claims its name.
        relay: at whom.
        nonce: the relay's, 16 bytes; in a private swarm with the secret of its members behind it.
    """
    signature = identity.sign(_DOMAIN + relay.encode() + b"\n" + nonce)
    return b64encode(identity.public_key).decode(), b64encode(signature).decode()


def check_presence(peer: PeerId, relay: PeerId, nonce: bytes, key: str, signature: str) -> bool:
    """Whether a proof was made by this peer, for this relay and this nonce; never raises."""
    try:
        public_key, signed = b64decode(key, validate=True), b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        return False
    return verify(peer, public_key, _DOMAIN + relay.encode() + b"\n" + nonce, signed)
