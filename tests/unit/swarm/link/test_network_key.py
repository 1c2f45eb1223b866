"""One key makes the same authority, proofs and places on every machine, and betrays itself nowhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.link.network_key import CERTIFICATE_S, RENEW_S, NetworkKey, _authority_pem, _member

KEY, OTHER = NetworkKey(bytes(range(32))), NetworkKey(bytes(32))
ME, HIM = PeerId("QmMe"), PeerId("QmHim")
NOW = 1_800_000_000.0


def test_every_machine_derives_the_same() -> None:
    authorities = []
    for _ in range(2):
        _authority_pem.cache_clear()
        authorities.append(x509.load_pem_x509_certificate(KEY.authority_pem))
    assert authorities[0].public_key() == authorities[1].public_key()
    assert authorities[0].subject == authorities[1].subject
    assert x509.load_pem_x509_certificate(OTHER.authority_pem).subject != authorities[0].subject


def test_what_is_derived_does_not_change_with_a_release() -> None:
    assert KEY.name == "70341d0040ae2c17"
    assert KEY.proof(ME).hex()[:16] == "101f6c19f83f0b70"
    assert KEY.place(ME).hex()[:16] == "be6a320f8ebd6c8e"
    assert KEY.presence.hex()[:16] == "2e2530021bf6417e"
    number = x509.load_pem_x509_certificate(KEY.authority_pem).public_key().public_numbers()  # type: ignore[union-attr]
    assert f"{number.x:064x}"[:16] == "757458d9b24b3aa3"  # type: ignore[union-attr]


def test_a_members_certificate_is_short_lived_and_signed_by_the_authority() -> None:
    member = KEY.member(NOW)
    certificate = x509.load_pem_x509_certificate(member.pem)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(KEY.authority_pem))
    with pytest.raises(ValueError, match="does not match"):
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(OTHER.authority_pem))
    left_s = certificate.not_valid_after_utc.timestamp() - NOW
    assert CERTIFICATE_S - RENEW_S <= left_s <= CERTIFICATE_S
    assert certificate.not_valid_before_utc.timestamp() < NOW - 3_000
    assert load_pem_private_key(member.key_pem, None).public_key() == certificate.public_key()


def test_it_is_made_anew_each_day() -> None:
    _member.cache_clear()
    assert KEY.member(NOW).pem == KEY.member(NOW + 1).pem != KEY.member(NOW + RENEW_S).pem


def test_a_proof_is_one_peers_of_one_swarm() -> None:
    assert KEY.is_proof(ME, KEY.proof(ME))
    assert not KEY.is_proof(HIM, KEY.proof(ME))
    assert not KEY.is_proof(ME, OTHER.proof(ME))
    assert not KEY.is_proof(ME, b"")
    assert KEY.place(ME) != KEY.proof(ME)[:20]  # members tell each other places


def test_a_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "networks" / "own.key"
    KEY.save(path)
    KEY.save(path)
    assert NetworkKey.load(path) == KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="is another one"):
        OTHER.save(path)
    assert NetworkKey.load(path) == KEY
    assert len(list(path.parent.iterdir())) == 1


NO_KEYS = (b"", b"canopy-network-key-1 ", b"canopy-network-key-1 AAAA", b"\xff" * 400, b"AAAA\n")


@pytest.mark.parametrize("text", NO_KEYS)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "own.key"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no network key"):
        NetworkKey.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        NetworkKey.load(tmp_path / "none.key")


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.key"
    KEY.save(path)
    path.chmod(0o640 if os.geteuid() == path.stat().st_uid else 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        NetworkKey.load(path)


def test_only_32_bytes_are_one() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        NetworkKey(b"short")
    assert len(NetworkKey.fresh().secret) == 32
    assert NetworkKey.fresh() != NetworkKey.fresh()
    assert repr(KEY) == "NetworkKey()"
