"""An identity file that others could use, or that this program cannot."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from swarm.base.errors import IdentityError
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity, kept_successions
from swarm.protocol.peer_keys import verify
from swarm.protocol.succession import opened_succession

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


def test_a_file_that_others_can_use_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = Identity.load_or_create(path)
    for mode in (0o444, 0o640, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(IdentityError, match=f"chmod 600 {path}"):
            Identity.load_or_create(path)
    path.chmod(0o600)
    assert Identity.load_or_create(path).peer_id == made.peer_id


def test_a_mounted_secret_is_read_by_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    made = Identity.load_or_create(path)
    path.chmod(0o440)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert Identity.load_or_create(path).peer_id == made.peer_id
    path.chmod(0o444)
    with pytest.raises(IdentityError, match="open to other users"):
        Identity.load_or_create(path)


def test_a_link_that_somebody_planted_receives_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that several may write: the draft's name cannot be known, and a link in its place is not followed."""
    path, prey = tmp_path / "identity.key", tmp_path / "prey"
    prey.write_text("mine")
    for name in (f".identity.key.{os.getpid()}", ".identity.key.taken000"):
        (tmp_path / name).symlink_to(prey)
    names = iter(["taken000", "free0000"])
    monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: names)
    Identity.load_or_create(path)
    assert prey.read_text() == "mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert {one.name for one in tmp_path.iterdir() if not one.is_symlink()} == {"identity.key", "prey"}


def test_two_containers_with_one_volume_agree_on_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in every container
    path = tmp_path / "identity.key"
    with ThreadPoolExecutor(8) as programs:
        peers = list(programs.map(lambda _: Identity.load_or_create(path).peer_id, range(8)))
    assert len(set(peers)) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["identity.key"]


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


def test_a_rotated_identity_has_a_new_key_which_the_old_one_signed(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    old = Identity.load_or_create(path)
    assert kept_successions(path) == kept_successions(None) == ()
    new = old.rotate()
    assert Identity.load_or_create(path).peer_id == new.peer_id != old.peer_id
    assert Identity.load_or_create(path.with_suffix(f".{old.peer_id}")).peer_id == old.peer_id
    newest = new.rotate()
    found = [opened_succession(sealed) for sealed in kept_successions(path)]
    assert found == [(old.peer_id, new.peer_id), (new.peer_id, newest.peer_id)]
    assert {file.stat().st_mode & 0o077 for file in tmp_path.iterdir()} == {0}


def test_an_identity_in_use_is_not_rotated(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "identity.key")
    with Identity.load_or_create(tmp_path / "identity.key").lock(), pytest.raises(IdentityError, match="in use"):
        identity.rotate()
    assert Identity.load_or_create(tmp_path / "identity.key").peer_id == identity.peer_id
    assert kept_successions(identity.path) == ()
