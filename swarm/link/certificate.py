"""The certificate with which a node answers: made at each start, kept in memory, pinned by whoever dials.

No authority signs it. The node's signed record holds it, so the identity vouches for it. The name in it is the peer's,
not an address's: bytes that come another way, through a relay, prove the same.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from dataclasses import dataclass
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.base.ids import PeerId

MAX_CERTIFICATE_BYTES: Final = 512
"""DER; one of ours has 380 or so."""
_BEFORE: Final = datetime.timedelta(days=30)
"""Clocks differ; the record's expiry is what bounds a certificate's use."""
_AFTER: Final = datetime.timedelta(days=3_650)
_MALFORMED: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""All that is raised for bytes that are no usable certificate."""


def server_name(peer: PeerId) -> str:
    """The DNS name of a peer: a peer id's capitals matter, a DNS name's do not, so it is the id's hash in base 32."""
    digest = hashlib.sha256(peer.encode()).digest()
    return base64.b32encode(digest).decode().rstrip("=").lower() + ".canopy"


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A self-signed P-256 certificate and its key.

    Attributes:
        key_pem: the private key, PKCS #8.
        der: the same, as records hold it.
    """

    key_pem: bytes
    pem: bytes
    der: bytes

    @classmethod
    def fresh(cls, peer: PeerId) -> Self:
        """Make one that bears this peer's name; takes less than a millisecond."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "canopy")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + _AFTER)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(peer))]), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            certificate.public_bytes(serialization.Encoding.PEM),
            certificate.public_bytes(serialization.Encoding.DER),
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 of the DER, 32 bytes: what signatures name the certificate by."""
        return hashlib.sha256(self.der).digest()


def check_certificate(der: bytes, peer: PeerId) -> None:
    """Refuse what is no certificate of this peer.

    Raises:
        ValueError: it is too long, malformed, has another kind of key or another name.
    """
    if name_of(der) != server_name(peer):
        raise ValueError(f"it does not bear the name of {peer}")


def name_of(der: bytes) -> str:
    """The one name that a certificate bears.

    Raises:
        ValueError: it is too long, malformed, has another kind of key, or not exactly one name.
    """
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"{len(der)} bytes; a certificate has at most {MAX_CERTIFICATE_BYTES}")
    try:
        certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
        names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except _MALFORMED as error:
        raise ValueError("not an X.509 certificate with a name") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("its key must be on the curve P-256")
    match names:
        case [x509.DNSName(value=str(name))]:
            return name
        case _:
            raise ValueError("it must bear one DNS name and no other")
