"""Whether a libp2p peer answers at an address: its own proof, without joining anything and without a daemon.

Each libp2p connection begins with TLS in which the peer's certificate holds a signature of its identity over the
certificate's key. The handshake is made up to there, and given up. What carries bytes in between proves nothing and
needs not to: the peer at the end is the one that was meant.
Sources: https://github.com/libp2p/specs/blob/master/tls/tls.md and connections/README.md (multistream-select)
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.base.ids import PeerId
from swarm.protocol.peer_keys import verify

PROVE_S: Final = 4.0
"""How long one proof may take, a name's look-up included."""
MAX_PROVEN: Final = 48
"""Addresses that are tried at once."""
_DIRECT: Final = re.compile(r"/(ip4|ip6|dns[46]?)/([^/]+)/tcp/([0-9]+)/p2p/([^/]+)")
_OFFER: Final = b"/multistream/1.0.0", b"/tls/1.0.0"
_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_DOMAIN: Final = b"libp2p-tls-handshake:"
_MAX_CERTIFICATE: Final = 8_192


def is_provable(address: str) -> bool:
    """Whether an address is of the kind at which `prove_peer` can tell."""
    return _DIRECT.fullmatch(address) is not None


async def prove_peer(address: str, limit_s: float = PROVE_S) -> bool | None:
    """Whether the peer that a multiaddress names answers there; never raises.

    Args:
        address: multiaddress with a peer id.

    Returns:
        None where that cannot be told, for an address is of another kind than plain TCP.
    """
    found = _DIRECT.fullmatch(address)
    if found is None:
        return None
    _, host, port, peer = found.groups()
    with suppress(OSError, TimeoutError, ValueError, UnicodeError, asyncio.IncompleteReadError):
        async with asyncio.timeout(limit_s):
            return is_proof(PeerId(peer), await _certificate(host, int(port)))
    return False


async def proven(addresses: Sequence[str], limit_s: float = PROVE_S) -> dict[str, bool | None]:
    """`prove_peer` of several addresses at once, at most `MAX_PROVEN`."""
    tried = list(dict.fromkeys(addresses))[:MAX_PROVEN]
    verdicts = await asyncio.gather(*(prove_peer(one, limit_s) for one in tried))
    return dict(zip(tried, verdicts, strict=True))


def is_proof(peer: PeerId, certificate: bytes) -> bool:
    """Whether a certificate (DER) was made by this peer; never raises."""
    if len(certificate) > _MAX_CERTIFICATE:
        return False
    try:
        made = x509.load_der_x509_certificate(certificate)
        extension = made.extensions.get_extension_for_oid(_EXTENSION).value
        if not isinstance(extension, x509.UnrecognizedExtension):
            return False
        public_key, signature = _two_strings(extension.value)
        subject = made.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, TypeError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
    return verify(peer, public_key, _DOMAIN + subject, signature)


async def _certificate(host: str, port: int) -> bytes:
    """The certificate with which a peer answers; the handshake has shown that it has its key."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"".join(bytes([len(one) + 1]) + one + b"\n" for one in _OFFER))
        for one in _OFFER:
            (length,) = await reader.readexactly(1)
            if await reader.readexactly(length) != one + b"\n":
                raise ValueError("no libp2p peer with TLS")
        await writer.start_tls(_context())
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return certificate or b""
    finally:
        writer.transport.abort()


@cache
def _context() -> ssl.SSLContext:
    """Takes any certificate: who made it is checked here, and no authority is asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context


def _two_strings(der: bytes) -> tuple[bytes, bytes]:
    """The two octet strings of an ASN.1 sequence.

    Raises:
        ValueError: it is none.
    """
    body, rest = _value(der, 0x30)
    first, left = _value(body, 0x04)
    second, end = _value(left, 0x04)
    if rest or end:
        raise ValueError("more than two strings")
    return first, second


def _value(der: bytes, tag: int) -> tuple[bytes, bytes]:
    """What stands behind a tag and its length, and what follows."""
    if len(der) < 2 or der[0] != tag:
        raise ValueError("another tag")
    size, at = der[1], 2
    if size & 0x80:
        at += size & 0x7F
        size = int.from_bytes(der[2:at])
    if len(der) < at + size or at > 6:
        raise ValueError("cut off")
    return der[at : at + size], der[at + size :]
