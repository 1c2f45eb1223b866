"""The key of a private swarm: 32 bytes that all its members have, and what is derived from them. Owns no network.

    key ─ HKDF ─▶ authority (P-256)  signs each member's certificate, which machines ask for before they hear a call
               ─▶ proof key          says to DHT peers that a peer id is a member's
               ─▶ place key          where a member's peer id lies among the directory's peers
               ─▶ presence key       is signed along where a member claims its name at a relay
               ─▶ name               tells keys apart in files and messages; nothing can be done with it

Whoever has the key is a member and can invite others. The key itself is never sent; it stands in invites and files.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from swarm.base.errors import ConfigError
from swarm.base.files import create_file
from swarm.base.ids import PeerId

KEY_BYTES: Final = 32
PROOF_BYTES: Final = 32
CERTIFICATE_S: Final = 3 * 86_400.0
"""How long a member's certificate is good. Whoever dials makes a new one each `RENEW_S`."""
RENEW_S: Final = 86_400.0
_SLACK: Final = datetime.timedelta(hours=1)
"""Clocks differ."""
_DOMAIN: Final = b"canopy-network-1/"
_FILE_HEAD: Final = "canopy-network-key-1 "
_MAX_FILE_BYTES: Final = 256
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_LONG_AGO: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NEVER: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""The authority lives as long as its key."""


@dataclass(frozen=True, slots=True)
class MemberCertificate:
    """With what a member dials.

    Attributes:
        key_pem: its private key, PKCS #8.
        pem: the certificate.
    """

    key_pem: bytes = field(repr=False)
    pem: bytes


@dataclass(frozen=True, slots=True)
class NetworkKey:
    """The key of one private swarm.

    Attributes:
        secret: 32 bytes; never printed.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ValueError: it has not 32 bytes.
        """
        if len(self.secret) != KEY_BYTES:
            raise ValueError(f"a network key has {KEY_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def fresh(cls) -> Self:
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key's file.

        Raises:
            ConfigError: it cannot be read, holds something else, or is open to other users.
        """
        try:
            with path.open("rb") as file:
                data, about = file.read(_MAX_FILE_BYTES + 1), os.fstat(file.fileno())
        except OSError as error:
            raise ConfigError(f"network key {path}: {error.strerror}") from error
        closed = 0o077 if about.st_uid == os.geteuid() else 0o007  # another user's is a secret that was mounted
        if about.st_mode & closed:
            raise ConfigError(f"network key {path} is open to other users, who could join with it: chmod 600 {path}")
        try:
            text = data.decode("ascii").strip()
            return cls(base64.b64decode(text.removeprefix(_FILE_HEAD), validate=True))
        except (ValueError, binascii.Error):
            raise ConfigError(f"network key {path} holds no network key; `swarm invite --private` makes one") from None

    def save(self, path: Path) -> None:
        """Write the key's file (mode 0600), unless there is one: an existing file is never changed.

        Raises:
            ConfigError: it cannot be written, or is there and holds another key.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            create_file(path, self.file_line)
        except FileExistsError:
            if self.load(path) != self:
                raise ConfigError(f"network key {path} is there and is another one; choose another file") from None
        except OSError as error:
            raise ConfigError(f"network key {path}: {error.strerror}") from error

    @property
    def file_line(self) -> bytes:
        return f"{_FILE_HEAD}{base64.b64encode(self.secret).decode()}\n".encode()

    @property
    def name(self) -> str:
        """16 hex digits that tell this key from others and betray nothing of it."""
        return _derived(self.secret, b"name", 8).hex()

    def proof(self, peer: PeerId) -> bytes:
        """What says to other members that a peer is one too; of no use to anybody but that peer, which libp2p proves.

        Returns:
            32 bytes.
        """
        return hmac.digest(_derived(self.secret, b"proof", 32), peer.encode(), "sha256")

    def is_proof(self, peer: PeerId, proof: bytes) -> bool:
        return hmac.compare_digest(self.proof(peer), proof)

    def place(self, peer: PeerId) -> bytes:
        """Where a member lies among the directory's peers: 20 bytes that no stranger can tell."""
        return hmac.digest(_derived(self.secret, b"place", 32), peer.encode(), "sha256")[:20]

    @property
    def presence(self) -> bytes:
        """32 bytes that members sign along where they claim their names at a relay of this swarm."""
        return _derived(self.secret, b"presence", 32)

    @property
    def authority_pem(self) -> bytes:
        """The certificate of the authority that signs members' certificates: whom servers trust."""
        return _authority_pem(self.secret)

    def member(self, clock: float | None = None) -> MemberCertificate:
        """A certificate to dial with; the same one for a day.

        Args:
            clock: seconds since 1970 (default: now).
        """
        now = time.time() if clock is None else clock
        return _member(self.secret, int(now // RENEW_S))


def _derived(secret: bytes, purpose: bytes, length: int) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=None, info=_DOMAIN + purpose).derive(secret)


def _authority(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """The same private key on every machine: 384 bits, so that no number of the order is likelier than another."""
    number = int.from_bytes(_derived(secret, b"authority", 48))
    return ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def _authority_name(secret: bytes) -> x509.Name:
    named = hashlib.sha256(_derived(secret, b"authority name", 32)).hexdigest()[:16]
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"canopy network {named}")])


@lru_cache(maxsize=16)
def _authority_pem(secret: bytes) -> bytes:
    key, name = _authority(secret), _authority_name(secret)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(_LONG_AGO)
        .not_valid_after(_NEVER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


@lru_cache(maxsize=16)
def _member(secret: bytes, day: int) -> MemberCertificate:
    """A new key and its certificate; it names nobody, since callers introduce themselves above TLS."""
    key = ec.generate_private_key(ec.SECP256R1())
    begins = datetime.datetime.fromtimestamp(day * RENEW_S, datetime.UTC)
    certificate = (
        x509.CertificateBuilder(
            _authority_name(secret),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "member")]),
            key.public_key(),
            x509.random_serial_number(),
        )
        .not_valid_before(begins - _SLACK)
        .not_valid_after(begins + datetime.timedelta(seconds=CERTIFICATE_S))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(_authority(secret), hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    key_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return MemberCertificate(key_pem, certificate.public_bytes(serialization.Encoding.PEM))
