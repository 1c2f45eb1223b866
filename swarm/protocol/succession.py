"""That one identity takes another one's place: signed by the old key, shown by the new one. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgpack

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.protocol.limits import MAX_SUCCESSION_BYTES
from swarm.protocol.peer_keys import is_peer_id, peer_id_of, verify

SUCCESSION: Final = b"canopy-succession\n"


def seal_succession(public_key: bytes, sign: Callable[[bytes], bytes], heir: PeerId) -> bytes:
    """Sign that another key takes this one's place.

    Args:
        public_key: the old one, as libp2p encodes it.
        sign: with the old one.
        heir: peer id of the new one.
    """
    sealed: bytes = msgpack.packb([public_key, heir, sign(SUCCESSION + heir.encode())])
    return sealed


def opened_succession(sealed: bytes) -> tuple[PeerId, PeerId]:
    """The old peer id and the new one, once the signature holds.

    Raises:
        RemoteProtocolError: it is none.
    """
    try:
        if len(sealed) > MAX_SUCCESSION_BYTES:
            raise ValueError("is too large")
        public_key, heir, signature = msgpack.unpackb(sealed)
        old = peer_id_of(public_key)
        if not is_peer_id(heir) or not verify(old, public_key, SUCCESSION + heir.encode(), signature):
            raise ValueError("is not signed by the old key")
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("succession", f"is none ({error})") from None
    return old, PeerId(heir)
