"""Certificates of records: what is one of a peer's own, and what is refused."""

from __future__ import annotations

import datetime
import warnings
from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.ids import PeerId
from swarm.link.certificate import MAX_CERTIFICATE_BYTES, ServerCertificate, check_certificate, server_name

ME, OTHER = PeerId("QmMe"), PeerId("Qmme")
MINE = ServerCertificate.fresh(ME)
Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def made(key: Key, *names: x509.GeneralName) -> bytes:
    """A certificate as hostile software would make it."""
    name, now = x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    signed = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.DER)


def test_each_start_has_its_own_and_it_is_small() -> None:
    check_certificate(MINE.der, ME)
    assert ServerCertificate.fresh(ME).digest != MINE.digest
    assert len(MINE.der) < MAX_CERTIFICATE_BYTES - 100
    assert len(MINE.digest) == 32


def test_what_is_not_a_peers_own_is_refused() -> None:
    mine, p256 = x509.DNSName(server_name(ME)), ec.generate_private_key(ec.SECP256R1())
    check_certificate(made(p256, mine), ME)
    wrong = {
        "name of": [MINE.der.replace(server_name(ME).encode(), server_name(OTHER).encode())],
        "one DNS name": [
            made(p256, mine, x509.DNSName(server_name(OTHER))),
            made(p256, x509.RFC822Name(f"a@{server_name(ME)}")),
        ],
        "P-256": [
            made(ec.generate_private_key(ec.SECP384R1()), mine),
            made(ed25519.Ed25519PrivateKey.generate(), mine),
        ],
        "with a name": [made(p256), b"", b"\x30", MINE.der + b"!", MINE.der[:-1]],
        "at most 512": [made(rsa.generate_private_key(65_537, 2_048), mine), bytes(513)],
    }
    for reason, certificates in wrong.items():
        for der in certificates:
            with pytest.raises(ValueError, match=reason) as caught:
                check_certificate(der, ME)
            assert "\n" not in str(caught.value)


@given(st.lists(st.tuples(st.integers(0, len(MINE.der) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_damage_is_survived(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(MINE.der)
    for place, value in changes:
        damaged[place] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about serial numbers
        with suppress(ValueError):
            check_certificate(bytes(damaged), ME)
