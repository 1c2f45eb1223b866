"""An identity file that others could use, or that this program cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from swarm.discovery.dht.registry import DhtConfig, DhtRegistry
from swarm.discovery.identity import Identity, verify
from swarm.errors import IdentityError

NOBODY = 65_534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions do not bind root."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_file_that_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0)
    with unprivileged(), pytest.raises(IdentityError, match="Permission denied") as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert "--identity" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_every_user_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = Identity.load_or_create(path)
    path.chmod(0o444)
    with pytest.raises(IdentityError, match=f"chmod 600 {path}"):
        Identity.load_or_create(path)
    path.chmod(0o640)
    assert Identity.load_or_create(path).peer_id == made.peer_id


async def test_joining_oneself_is_named(tmp_path: Path) -> None:
    """With a copied file this is what `--join` gives: libp2p would only say that nobody answers."""
    path = tmp_path / "identity.key"
    peer_id = Identity.load_or_create(path).peer_id
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id}"
    with pytest.raises(IdentityError, match="own identity") as caught:
        await DhtRegistry.open(DhtConfig(join=(address,), host="127.0.0.1", identity_path=path))
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("exponent", [65_537, 3])
def test_only_the_usual_exponent_is_taken(exponent: int, tmp_path: Path) -> None:
    """With a huge one a signature would take fifty times as long to check; cryptography makes no such key, but 3."""
    identity = Identity(rsa.generate_private_key(public_exponent=exponent, key_size=2048))
    is_taken = exponent == 65_537
    assert verify(identity.peer_id, identity.public_key, b"said", identity.sign(b"said")) is is_taken
    path = tmp_path / "identity.key"
    identity.save(path)
    if is_taken:
        assert Identity.load_or_create(path).peer_id == identity.peer_id
        return
    with pytest.raises(IdentityError, match="exponent 65537"):
        Identity.load_or_create(path)
