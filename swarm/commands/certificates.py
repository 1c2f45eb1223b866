"""Certificates and password lines for a private swarm's MQTT broker. Owns no files and no network.

One authority (EC P-256) signs one certificate, the broker's. Passwords are drawn here, never chosen by people.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
import secrets
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from swarm.base.errors import ConfigError

AUTHORITY_DAYS: Final = 3_650
BROKER_DAYS: Final = 1_095
ITERATIONS: Final = 101
"""mosquitto_passwd's own count: stretching protects chosen passwords, and these have 192 random bits."""
_SLACK: Final = datetime.timedelta(hours=1)
"""Clocks that are a little late accept a new certificate too."""
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as PEM, not encrypted."""
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def read_key(data: bytes) -> ec.EllipticCurvePrivateKey:
    """The key in a PEM file.

    Raises:
        ValueError: it holds no EC key.
    """
    key = serialization.load_pem_private_key(data, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an EC key")
    return key


def authority(key: ec.EllipticCurvePrivateKey, now: datetime.datetime) -> x509.Certificate:
    """The authority's own certificate, with which it signs others."""
    name = _common_name("Canopy private swarm")
    usage = _usage(signs_certificates=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def broker_certificate(
    key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    signer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    now: datetime.datetime,
) -> x509.Certificate:
    """A certificate for a TLS server under these names and IP addresses."""
    issuer, issuer_key = signer
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        _builder(_common_name(hosts[0][:64]), issuer.subject, key, now, BROKER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(identifier, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def general_name(host: str) -> x509.GeneralName:
    """A host as a name in a certificate.

    Raises:
        ConfigError: neither an IP address nor a host name.
    """
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not _NAME.fullmatch(host) or len(host) > 253:
            raise ConfigError(f"{host[:80]!r} is neither an IP address nor a host name") from None
        return x509.DNSName(host)


def names_in(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """The hosts that a certificate is for."""
    return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def new_password() -> str:
    """192 random bits, in characters that URLs, shells and env files leave alone."""
    return secrets.token_urlsafe(24)


def password_line(user: str, password: str) -> str:
    """A line of mosquitto's password file: PBKDF2 with SHA-512, as mosquitto_passwd (2.0) writes it."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, ITERATIONS)
    packed = [base64.b64encode(part).decode() for part in (salt, digest)]
    return f"{user}:$7${ITERATIONS}${packed[0]}${packed[1]}"


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    return builder.not_valid_before(now - _SLACK).not_valid_after(now + datetime.timedelta(days=days))


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
