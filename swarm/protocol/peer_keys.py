"""A machine's public key: the peer id that it hashes to, and what it signed. Pure; private keys are elsewhere.

Keys have libp2p's own encoding.
Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import hashlib

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from swarm.base.ids import PeerId

_MAX_PUBLIC_KEY_BYTES = 1_024
_KEY_BITS = range(2_048, 4_097)
_EXPONENT = 65_537  # the one that libp2p uses; a huge exponent would make a signature expensive to check
_SHA2_256 = b"\x12\x20"  # multihash: function code, digest length


def verify(peer_id: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether a signature was made by a peer.

    Args:
        peer_id: whose signature it should be.
        public_key: the peer's, as libp2p encodes it; its hash must be the peer id.
        data: what was signed.
        signature: RSA, PKCS #1 v1.5, SHA-256.
    """
    if len(public_key) > _MAX_PUBLIC_KEY_BYTES or peer_id_of(public_key) != peer_id:
        return False
    try:
        key = serialization.load_der_public_key(unwrap_key(public_key))
        if not isinstance(key, rsa.RSAPublicKey) or not is_usual(key):
            return False
        key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def is_peer_id(text: str) -> bool:
    """Whether the text has the form of an RSA peer id (base58 of a SHA-256 multihash)."""
    try:
        raw = base58.b58decode(text)
    except ValueError:
        return False
    return len(raw) == len(_SHA2_256) + 32 and raw.startswith(_SHA2_256)


def peer_id_of(public_key: bytes) -> PeerId:
    """The name of the machine whose public key this is, as libp2p encodes it: the key's hash."""
    return PeerId(base58.b58encode(_SHA2_256 + hashlib.sha256(public_key).digest()).decode())


def is_usual(key: rsa.RSAPublicKey) -> bool:
    """Whether it has the size and exponent of a machine's key."""
    return key.key_size in _KEY_BITS and key.public_numbers().e == _EXPONENT


# libp2p's key message is {1: key type, 2: bytes}, RSA being type 0: a fixed header, then a varint length.
_HEADER = b"\x08\x00\x12"


def wrap_key(der: bytes) -> bytes:
    """A key in DER as libp2p encodes it."""
    low, high = len(der) & 0x7F, len(der) >> 7
    return _HEADER + (bytes([low | 0x80, high]) if high else bytes([low])) + der


def unwrap_key(message: bytes) -> bytes:
    """The key in DER.

    Raises:
        ValueError: it is no RSA key in libp2p's encoding.
    """
    if not message.startswith(_HEADER) or len(message) < len(_HEADER) + 2:
        raise ValueError("not an RSA key in libp2p's encoding")
    start = len(_HEADER) + (2 if message[3] & 0x80 else 1)
    der = message[start:]
    if wrap_key(der) != message:
        raise ValueError("not an RSA key in libp2p's encoding")
    return der
