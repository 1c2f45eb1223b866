"""Whose place it is in a peer's store: what is there stays, whoever floods it."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import (
    MAX_POINTER_BYTES,
    ModelPointer,
    listed_models,
    open_pointer,
    seal_announcement,
    seal_pointer,
)
from swarm.directory.node_record import NodeRecord
from swarm.directory.record_store import OVERHEAD_BYTES, FiledItem, RecordStore, StoreLimits, open_item
from swarm.directory.registry import StorageKey, storage_key
from swarm.directory.sealing import RecordError
from tests.sample_records import sample_record

NOW = 1_000.0
MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 40)
SMALL = StoreLimits(total_bytes=64 * (100 + OVERHEAD_BYTES), key_items=16, pointers_per_signer=8, records_per_signer=66)
HONEST = "198.51.100.0/24"


def item(signer: str, key: str = "block", *, origin: str = "", life_s: float = 60.0, group: str = "") -> FiledItem:
    subkey = f"{group}/{signer}" if group else signer
    return FiledItem(storage_key(key), subkey, PeerId(signer), NOW + life_s, bytes(100), False, group, origin or signer)


def signers(store: RecordStore, key: str = "block", now: float = NOW) -> list[str]:
    return [one.signer for one in store.get(storage_key(key), now)]


def test_one_identity_that_fills_keys_of_its_own_pushes_nobody_out() -> None:
    """What expires last used to stay: a stranger's 4,200 keys that lived longer emptied the directory."""
    store = RecordStore(SMALL)
    assert store.put(item("honest", origin=HONEST), NOW)
    taken = [
        store.put(item("evil", f"key {number}", origin="203.0.113.0/24", life_s=90), NOW) for number in range(4_200)
    ]
    assert sum(taken) <= 63
    assert signers(store) == ["honest"]
    assert store.put(item("honest", origin=HONEST, life_s=70), NOW + 10), "it renews what it has"
    assert store.put(item("newcomer", "another block", origin="192.0.2.0/24"), NOW), (
        "a newcomer from elsewhere has room"
    )


def test_many_identities_of_one_address_share_one_place() -> None:
    store = RecordStore(SMALL)
    for number in range(500):
        store.put(item(f"evil {number}", origin="203.0.113.0/24", life_s=90), NOW)
    assert len(signers(store)) == 16
    honest = [f"honest {number}" for number in range(7)]
    for number, name in enumerate(honest):
        assert store.put(item(name, origin=f"192.0.{number}.0/24"), NOW)
    for number in range(500, 1_000):
        assert not store.put(item(f"evil {number}", origin="203.0.113.0/24", life_s=90), NOW)
    assert set(honest) <= set(signers(store))
    assert len(signers(store)) == 16


def test_homes_of_one_site_share_its_places_whoever_signs() -> None:
    """A home of a site took as many places as it drew signers, and its neighbours had what was left."""
    store = RecordStore(SMALL)
    site = "2001:db8:aa::/48"
    flood = [replace(item(f"evil {n}", origin=site), address="2001:db8:aa:100::/56") for n in range(20)]
    assert sum(store.put(one, NOW) for one in flood) == SMALL.key_items
    for number in range(4):
        neighbour = replace(item(f"honest {number}", origin=site), address="2001:db8:aa:200::/56")
        assert store.put(neighbour, NOW), "it holds fewer than the other home of its site"
    assert sum(signer.startswith("honest") for signer in signers(store)) == 4
    assert not store.put(flood[-1], NOW)
    assert store.put(item("elsewhere", origin=HONEST), NOW)
    assert sum(signer.startswith("evil") for signer in signers(store)) == 11, "the fullest home gives way"


def test_a_place_that_was_given_away_is_the_youngest_of_the_fullest() -> None:
    store = RecordStore(SMALL)
    for number in range(16):
        assert store.put(item(f"old {number}", origin="203.0.113.0/24"), NOW)
    assert store.put(item("new", origin=HONEST), NOW)
    assert signers(store) == [*(f"old {number}" for number in range(15)), "new"]


def test_what_has_expired_goes_first_and_later_words_keep_the_place() -> None:
    store = RecordStore(SMALL)
    for number in range(16):
        assert store.put(item(f"{number}", life_s=30 + number), NOW)
    assert not store.put(item("full"), NOW)
    assert store.put(item("0", life_s=80), NOW)
    assert signers(store)[0] == "0"
    assert store.put(item("room"), NOW + 32)
    assert "1" not in signers(store, now=NOW + 32)
    assert not store.put(item("dead", life_s=1), NOW + 5)


def test_a_word_that_is_no_later_changes_nothing() -> None:
    store = RecordStore()
    first = item("a")
    assert store.put(first, NOW)
    assert store.put(first, NOW), "the very same is held already"
    assert not store.put(replace(first, data=b"other"), NOW)
    assert not store.put(replace(first, data=b"other", expires_at=NOW + 59), NOW)
    assert store.get(first.key, NOW) == [first]


def test_a_signer_has_eight_models_and_two_spans() -> None:
    store = RecordStore()
    assert [store.put(item("a", f"{n}", group=f"{n}"), NOW) for n in range(10)] == [True] * 8 + [False] * 2
    assert sum(store.put(item("a", f"block {n}"), NOW) for n in range(200)) == 66


def test_a_model_needs_three_pointers_and_a_fourth_is_as_good_as_held() -> None:
    store = RecordStore()
    for number in range(6):
        assert store.put(item(f"{number}", "models", group="f00d", origin=f"net {number}"), NOW)
    assert signers(store, "models") == ["0", "1", "2"]
    crowded = RecordStore()
    for number in range(3):
        assert crowded.put(item(f"evil {number}", "models", group="f00d", origin="one net"), NOW)
    assert crowded.put(item("honest", "models", group="f00d", origin="another"), NOW)
    assert signers(crowded, "models") == ["evil 0", "evil 1", "honest"]


def test_a_key_and_the_whole_are_bounded_in_bytes_also_when_items_grow() -> None:
    limits = StoreLimits(total_bytes=20_000, key_bytes=5_000)
    store = RecordStore(limits)
    for number in range(100):
        store.put(replace(item(f"{number}", f"{number % 7}"), data=bytes(700)), NOW)
    assert store.bytes_held <= limits.total_bytes
    for number in range(100):
        store.put(replace(item(f"{number}", f"{number % 7}", life_s=80), data=bytes(4_000)), NOW)
    assert store.bytes_held <= limits.total_bytes
    for key in range(7):
        held = store.get(storage_key(str(key)), NOW)
        assert sum(one.cost for one in held) <= limits.key_bytes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_flood_keeps_the_bounds_the_order_and_its_own_books(seed: int) -> None:
    rng = random.Random(seed)
    limits = StoreLimits(
        12_000, key_bytes=4_000, list_bytes=2_000, key_items=8, pointers_per_signer=2, records_per_signer=4
    )
    store, now = RecordStore(limits), NOW
    for _ in range(200):
        now += rng.random()
        one = item(
            f"signer {rng.randrange(12)}",
            f"key {rng.randrange(6)}",
            origin=f"net {rng.randrange(3)}",
            group=rng.choice(["", "", "f1", "f2"]),
        )
        data, expires_at = bytes(rng.randrange(800)), now + rng.uniform(0, 20)
        store.put(replace(one, data=data, expires_at=expires_at, left=rng.random() < 0.1), now)
        held = [each for key in range(6) for each in store.get(storage_key(f"key {key}"), now)]
        assert store.bytes_held <= limits.total_bytes
        records = Counter(each.signer for each in held if not each.group)
        pointers = Counter(each.signer for each in held if each.group)
        assert all(count <= 4 for count in records.values())
        assert all(count <= 2 for count in pointers.values())
        per_key = Counter(each.key for each in held)
        assert all(count <= 8 for count in per_key.values())
    now += 100
    assert not store.get(storage_key("key 0"), now)
    assert (len(store), store.bytes_held) == (0, 0)


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.ephemeral()


def record(identity: Identity, **changes: object) -> NodeRecord:
    return replace(sample_record(identity.peer_id, model=MODEL, span=Span(10, 40)), **changes)  # type: ignore[arg-type]


def test_what_a_node_files_may_lie_where_it_files_it_and_nowhere_else(identity: Identity) -> None:
    made, now = record(identity), time.time()
    filings = seal_announcement(made, identity)
    assert [one.key.rpartition("/")[2] for one in filings] == [identity.peer_id, "0", "1", "2", MODEL.fingerprint[0]]
    for one in filings:
        opened = open_item(storage_key(one.key), one.subkey, one.data, made.expires_at, now)
        assert (opened.signer, opened.left) == (identity.peer_id, False)
        assert opened.group == (MODEL.fingerprint if one is filings[-1] else "")
        for wrong in (StorageKey(bytes(20)), storage_key("canopy/v2/models/zz"), storage_key("elsewhere")):
            with pytest.raises(RecordError, match="belong"):
                open_item(wrong, one.subkey, one.data, made.expires_at, now)
        with pytest.raises(RecordError, match="expires_at"):
            open_item(storage_key(one.key), one.subkey, one.data, made.expires_at + 1, now)
    with pytest.raises(RecordError):
        open_item(storage_key(filings[-1].key), filings[0].subkey, filings[-1].data, made.expires_at, now)
    for subkey in (None, 7, "x" * 300, "", f"{'0' * 64}/{identity.peer_id}"):
        with pytest.raises(RecordError):
            open_item(storage_key(filings[-1].key), subkey, filings[-1].data, made.expires_at, now)


def test_a_pointer_is_small_signed_and_says_nothing_that_its_digests_deny(identity: Identity) -> None:
    pointer = ModelPointer(identity.peer_id, MODEL, NOW + 60)
    sealed = seal_pointer(pointer, identity)
    assert len(sealed) <= 1_100 < MAX_POINTER_BYTES
    assert open_pointer(sealed, NOW) == pointer
    with pytest.raises(RecordError, match="expires_at"):
        open_pointer(sealed, NOW - 40)
    with pytest.raises(RecordError, match="signature"):
        open_pointer(sealed.replace(b"demo", b"evil"), NOW)
    with pytest.raises(RecordError, match="peer"):
        seal_pointer(replace(pointer, peer=Identity.ephemeral().peer_id), identity)
    for lie in (
        replace(MODEL, num_layers=13),
        replace(MODEL, config_digest="00" * 32),
        replace(MODEL, name="--mqtt=x"),
    ):
        with pytest.raises(RecordError, match="model"):
            seal_pointer(replace(pointer, model=lie), identity)
    for odd in (b"", b"\xc1", b"\x93\x01\x02\x03", sealed[:-1], bytes(MAX_POINTER_BYTES + 1)):
        with pytest.raises(RecordError):
            open_pointer(odd, NOW)


def test_a_list_has_each_model_once_by_its_commonest_name_in_the_order_of_the_answers(identity: Identity) -> None:
    others = [Identity.ephemeral() for _ in range(2)]
    second = ModelIdentity.of("second", "b2" * 32, "c3" * 32, "d4" * 32, 41)
    pointers = [
        (others[0], replace(MODEL, name="nickname"), False),
        (identity, MODEL, False),
        (identity, second, False),
        (others[1], MODEL, False),
    ]
    blobs = [seal_pointer(ModelPointer(who.peer_id, what, NOW + 60, left=left), who) for who, what, left in pointers]
    assert listed_models([b"rubbish", *blobs], NOW) == [MODEL, second]
    assert listed_models(blobs[:1], NOW) == [replace(MODEL, name="nickname")]
    gone = seal_pointer(ModelPointer(identity.peer_id, second, NOW + 60.001, left=True), identity)
    assert listed_models([*blobs, gone], NOW) == [MODEL]
    assert listed_models(blobs, NOW + 60) == []
