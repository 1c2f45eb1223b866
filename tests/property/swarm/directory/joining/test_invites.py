"""Whatever is pasted in place of an invite: it is read as its inviter meant it, or refused in one line."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address

import base58
import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.errors import ConfigError
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import (
    _DOMAIN,
    MAX_PEERS,
    SCHEME,
    VERSION,
    Invite,
    _checksum,
    open_invite,
    seal_invite,
)
from swarm.link.network_key import NetworkKey

ME = Identity.ephemeral()
SIGNER = Ed25519PrivateKey.generate()
KEY = SIGNER.public_key().public_bytes_raw()

ips = st.ip_addresses(v=4) | st.ip_addresses(v=6)
digests = st.binary(min_size=32, max_size=32).map(lambda raw: base58.b58encode(b"\x12\x20" + raw).decode())


def address(ip: IPv4Address | IPv6Address, port: int, peer: str) -> str:
    return f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{peer}"


invites = st.builds(
    Invite,
    peers=st.lists(st.builds(address, ips, st.integers(1, 65_535), digests), min_size=1, max_size=MAX_PEERS).map(tuple),
    expires_at=st.integers(1, 2**32 - 1),
    model=st.none() | st.from_regex(r"[A-Za-z0-9]{1,20}/[A-Za-z0-9_-]{1,40}", fullmatch=True),
    fingerprint=st.none() | st.binary(min_size=16, max_size=16).map(bytes.hex),
    broker=st.none() | st.from_regex(r"mqtts?://[a-z]{1,20}(:[1-9][0-9]{0,3})?", fullmatch=True),
    network=st.none() | st.binary(min_size=32, max_size=32).map(NetworkKey),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def refused(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_invite(word, now=0.0)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 150


@settings(max_examples=30)
@given(invites)
def test_round_trip(invite: Invite) -> None:
    opened = open_invite(seal_invite(invite, ME), now=0.0)
    assert (opened.peers, opened.expires_at, opened.model) == (invite.peers, invite.expires_at, invite.model)
    assert (opened.fingerprint, opened.broker, opened.network) == (invite.fingerprint, invite.broker, invite.network)


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: base58.b58encode(raw).decode()))
def test_any_word_is_refused(text: str) -> None:
    refused(SCHEME + text)
    refused(text)


@given(st.binary(max_size=200))
def test_any_bytes_with_a_sound_checksum_are_refused(raw: bytes) -> None:
    data = bytes([VERSION]) + raw
    refused(SCHEME + base58.b58encode(data + _checksum(data)).decode())


@settings(max_examples=60)
@given(st.lists(values, max_size=9) | values)
def test_whatever_somebody_signs_keeps_the_bounds_or_is_refused(body: object) -> None:
    said = bytes([VERSION]) + msgpack.packb([body, 2**31, KEY] if not isinstance(body, list) else body)
    data = said + SIGNER.sign(_DOMAIN + said)
    word = SCHEME + base58.b58encode(data + _checksum(data)).decode()
    with suppress(ConfigError):
        opened = open_invite(word, now=0.0)
        assert 0 < len(opened.peers) <= MAX_PEERS
        assert opened.inviter == KEY


@settings(max_examples=30)
@given(invites, st.data())
def test_one_changed_sign_is_noticed(invite: Invite, data: st.DataObject) -> None:
    word = seal_invite(invite, ME)
    place = data.draw(st.integers(len(SCHEME), len(word) - 1))
    other = data.draw(st.sampled_from([sign for sign in base58.BITCOIN_ALPHABET.decode() if sign != word[place]]))
    refused(word[:place] + other + word[place + 1 :])
