"""Records, identities and the hello proof: what is believed and what is refused, by field."""

from __future__ import annotations

import stat
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import base58
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import IdentityError
from swarm.base.ids import ModelIdentity, PeerId, SwarmId
from swarm.base.layers import Span
from swarm.directory.address_proof import check_hello, hello_response
from swarm.directory.identity import Identity
from swarm.directory.node_record import (
    MAX_DELAYS,
    MAX_SPEEDS,
    RECORDS,
    NodeRecord,
    NodeState,
    Reach,
    live_records,
    seal,
    tombstone,
    unseal,
)
from swarm.directory.sealing import RecordError
from swarm.link.certificate import ServerCertificate
from swarm.protocol.limits import MAX_RECORD_BYTES
from swarm.protocol.peer_keys import verify

NOW = 1_800_000_000.0
ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 40)
SWARM = SwarmId(bytes(range(16)))
RECORD = NodeRecord(
    peer=ME.peer_id,
    model=MODEL,
    span=Span(0, 20),
    address="192.0.2.7:5000",
    state=NodeState.SERVING,
    numeric_class="cpu-float32",
    version="0.2.0",
    name="Größe ✓",
    sweep_ms=((1, 1.5), (8, 4.0), (64, 20.25)),
    kv_tokens_free=100,
    kv_tokens_total=200,
    sequence=3,
    expires_at=NOW + 60,
    delays_ms=((OTHER.peer_id, 12.5),),
    busy=0.25,
    uplink_mbit_per_s=20.5,
    row_bytes=16_384,
    certificate=ServerCertificate.fresh(ME.peer_id).der,
)
SEALED = seal(RECORD, ME)
OTHERS_CERTIFICATE = ServerCertificate.fresh(OTHER.peer_id).der
DIGEST = RECORD.endpoint.digest


def model_with(name: str = MODEL.name, num_layers: int = MODEL.num_layers) -> tuple[object, ...]:
    """A model whose fingerprint is that of its parts."""
    return astuple(ModelIdentity.of(name, "b2" * 32, "c3" * 32, "d4" * 32, num_layers))


def forged(**changes: object) -> bytes:
    """A record signed by its own peer that breaks its own bounds, as hostile software would make it."""
    names = ["format", *(fact.name for fact in RECORDS.form.facts)]
    values = dict(zip(names, RECORDS.body(RECORD), strict=True)) | changes
    return RECORDS.sign(list(values.values()), ME)


def field_at_fault(data: bytes, now: float = NOW) -> str:
    with pytest.raises(RecordError) as caught:
        unseal(data, now)
    assert "\n" not in str(caught.value)
    return caught.value.field


def test_a_record_comes_back_as_it_was_and_is_small() -> None:
    assert unseal(SEALED, NOW) == RECORD
    assert unseal(forged(), NOW) == RECORD
    assert len(SEALED) < MAX_RECORD_BYTES / 3
    assert unseal(seal(replace(RECORD, name=None, address="[2001:db8::1]:1"), ME), NOW).name is None


def test_a_relayed_address_names_its_own_peer_and_the_relay() -> None:
    relayed = replace(RECORD, address=f"{ME.peer_id}.via.[2001:db8::9]:5000", reach=Reach.RELAYED)
    assert unseal(seal(relayed, ME), NOW) == relayed
    assert relayed.endpoint.relay == "[2001:db8::9]:5000"
    assert RECORD.endpoint.relay is None


def test_what_a_later_release_adds_to_records_is_read_past() -> None:
    assert unseal(forged(of_tomorrow=["anything"]), NOW) == RECORD


def test_what_an_earlier_release_did_not_sign_is_taken_as_it_was_then() -> None:
    full = replace(RECORD, bucketed=True, aux_rows=True, swarm=SWARM)
    key, body, _ = msgpack.unpackb(seal(full, ME))
    assert unseal(seal(full, ME), NOW).swarm == SWARM
    places = ["format", *(fact.name for fact in RECORDS.form.facts)]
    wants = {"swarm": replace(full, swarm=None), "aux_rows": replace(RECORD, bucketed=True), "bucketed": RECORD}
    for first_missing, wanted in wants.items():
        earlier = msgpack.packb(msgpack.unpackb(body)[: places.index(first_missing)])
        data = msgpack.packb([key, earlier, ME.sign(b"canopy-record" + earlier)])
        assert unseal(data, NOW) == wanted


def test_times_of_buckets_do_not_fall() -> None:
    steps = ((16, 4.66), (32, 4.66), (64, 5.29))
    assert unseal(seal(replace(RECORD, sweep_ms=steps, bucketed=True), ME), NOW).sweep_ms == steps
    falling = ((16, 4.66), (32, 4.65))
    assert unseal(seal(replace(RECORD, sweep_ms=falling), ME), NOW).sweep_ms == falling
    with pytest.raises(RecordError, match="sweep_ms"):
        seal(replace(RECORD, sweep_ms=falling, bucketed=True), ME)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("span", [[20, 10], [0, 41], [-1, 3]]),
        ("expires_at", [NOW + 96, NOW - 1]),
        ("address", ["no port", "host:0", "host:70000", "http://host:80", "0.0.0.0:80", "0:80", "0x0.0:80", "1.2.3:80",
                     "224.0.0.1:80", "255.255.255.255:80", "[::]:80", "[::ffff:0.0.0.0]:80", "[1:2]:80",
                     "-o.example:80", ".:80", "a b:80", ":80", f"{'h' * 254}:80", "h"]),
        ("numeric_class", ["cpu float32", "cpu", "-x", ""]),
        ("version", ["--version", "", "a b"]),
        ("kv_tokens_free", [201]),
        ("sweep_ms", [[[8, 1.0], [8, 2.0]], [[8, 1.0], [1, 2.0]], [[1, 5e-324]]]),
        ("certificate", [b"not one", bytes(513), OTHERS_CERTIFICATE, RECORD.certificate + b"!"]),
        ("model", [list(model_with(name=name)) for name in ("--mqtt=mqtt://evil.example", "a; rm -rf /", "a/../../b")]),
        ("model", [list(model_with(num_layers=513)), list(model_with(num_layers=0))]),
        ("reach", ["relayed"]),  # and its own address
    ],
)  # fmt: skip
def test_what_a_field_means_is_checked(field: str, values: list[object]) -> None:
    for value in values:
        assert field_at_fault(forged(**{field: value})) == field, value


BEYOND: dict[str, list[object]] = {
    "address": ["h" * 341], "numeric_class": [f"cpu-{'x' * 93}"], "version": ["v" * 33], "name": ["x" * 65, "\x1b[31m"],
    "sweep_ms": [[[0, 1.0]], [[4_097, 1.0]], [[1, 0.009]], [[1, 1.1e6]], [[size + 1, 1.0] for size in range(9)]],
    "kv_tokens_total": [-1, 2**40 + 1], "sequence": [-1, 2**53 + 1], "expires_at": [-1.0, 1.1e11],
    "delays_ms": [[[ME.peer_id, -1.0]], [[ME.peer_id, 60_001.0]], [["Qm", 1.0]], [[ME.peer_id, 1.0]] * 17],
    "busy": [-0.1, 1.1], "uplink_mbit_per_s": [0.0, 1.1e6], "row_bytes": [0, 2**20 + 1], "certificate": [bytes(513)],
    "swarm": [bytes(15), bytes(17)],
}  # fmt: skip


def test_bounds_are_those_that_other_releases_keep() -> None:
    for field, values in BEYOND.items():
        for value in values:
            assert field_at_fault(forged(**{field: value})) == field, value


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"bucketed": True, "sweep_ms": [[16, 5.0], [32, 4.0]]}, "sweep_ms"),
        ({"peer": OTHER.peer_id, "certificate": OTHERS_CERTIFICATE}, "signature"),
        ({"address": f"{ME.peer_id}.via.192.0.2.9:5000"}, "reach"),  # and said to be direct
        ({"reach": "relayed", "address": f"{OTHER.peer_id}.via.192.0.2.9:5000"}, "address"),
        ({"reach": "relayed", "address": f"{ME.peer_id}.via.0.0.0.0:5000"}, "address"),
        ({"reach": "relayed", "address": f"{ME.peer_id}.via.{ME.peer_id}.via.a.example:5000"}, "address"),
        ({"reach": "relayed", "address": f"{ME.peer_id}.via.{ME.peer_id}.via.192.0.2.9:5000"}, "address"),
        ({"format": 1}, "data"),
    ],
)
def test_what_is_refused_names_its_field(changes: dict[str, object], field: str) -> None:
    assert field_at_fault(forged(**changes)) == field


def test_signature_key_and_size() -> None:
    key, body, signature = msgpack.unpackb(SEALED)
    assert field_at_fault(msgpack.packb([key, body, signature[:-1] + bytes([signature[-1] ^ 1])])) == "signature"
    assert field_at_fault(msgpack.packb([OTHER.public_key, body, OTHER.sign(b"canopy-record" + body)])) == "signature"
    assert field_at_fault(b"\x00" * (MAX_RECORD_BYTES + 1)) == "data"
    assert field_at_fault(msgpack.packb([key, body])) == "data"
    with pytest.raises(RecordError, match="peer"):
        seal(RECORD, OTHER)


def test_a_record_with_everything_in_it_fits() -> None:
    peers = [base58.b58encode(b"\x12\x20" + bytes([number + 1]) * 32).decode() for number in range(MAX_DELAYS)]
    most = replace(
        RECORD,
        address=f"{'h' * 253}:65535",
        numeric_class=f"cuda-{'n' * 91}",
        version="v" * 32,
        name="ü" * 64,
        model=ModelIdentity.of("m" * 96, "c" * 64, "e" * 64, "d" * 64, 512),
        sweep_ms=tuple((4_089 + size, 999_999.9) for size in range(MAX_SPEEDS)),
        bucketed=True,
        aux_rows=True,
        swarm=SWARM,
        delays_ms=tuple((PeerId(peer), 59_999.999) for peer in peers),
    )
    assert unseal(seal(most, ME), NOW) == most


def test_a_record_is_over_when_it_expires() -> None:
    assert unseal(SEALED, NOW + 59.9) == RECORD
    assert field_at_fault(SEALED, NOW + 60) == "expires_at"


@given(st.binary(max_size=200), st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_any_bytes_are_refused_with_a_record_error(noise: bytes, place: int, flip: int) -> None:
    flipped = bytearray(SEALED)
    flipped[place] ^= flip
    for data in (noise, bytes(flipped), SEALED[:place], SEALED + noise if noise else b""):
        with pytest.raises(RecordError):
            unseal(data, NOW)


def test_live_records_keep_the_newest_per_peer_and_drop_who_left() -> None:
    newer = replace(RECORD, sequence=4, expires_at=NOW + 70, span=Span(20, 40))
    restarted = replace(RECORD, sequence=1, expires_at=NOW + 80, span=Span(3, 5))
    other = replace(RECORD, peer=OTHER.peer_id, certificate=OTHERS_CERTIFICATE)
    blobs = [seal(newer, ME), SEALED, b"junk", seal(other, OTHER), forged(span=[9, 1])]
    assert live_records(blobs, NOW) == [other, newer]
    assert live_records([*blobs, seal(restarted, ME)], NOW) == [other, restarted]
    assert live_records([*blobs, seal(tombstone(newer), ME)], NOW) == [other]
    assert live_records(blobs, NOW + 65) == [newer]


def test_identity_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    identity = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    signature = identity.sign(b"data")
    assert verify(identity.peer_id, identity.public_key, b"data", signature)
    assert not verify(identity.peer_id, identity.public_key, b"date", signature)
    assert not verify(OTHER.peer_id, identity.public_key, b"data", signature)
    assert not verify(identity.peer_id, OTHER.public_key, b"data", OTHER.sign(b"data"))


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x00\x12\x03abc", b"\x08\x00\x12\xff", b"\x00" * 20_000])
def test_garbage_identity_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(IdentityError) as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_identity_in_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="File exists"):
        Identity.load_or_create(tmp_path / "file" / "identity.key")
    with pytest.raises(IdentityError, match="Is a directory"):
        Identity.load_or_create(tmp_path)


def test_an_identity_is_locked_against_another_process(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    program = (
        "import sys; from pathlib import Path; from swarm.directory.identity import Identity\n"
        "with Identity.load_or_create(Path(sys.argv[1])).lock(): pass"
    )
    command = [sys.executable, "-c", program, str(path)]
    with Identity.load_or_create(path).lock():
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is in use by another program" in refused.stderr
    assert subprocess.run(command, check=False).returncode == 0


def test_hello_proves_who_answers() -> None:
    nonce = bytes(range(16))
    answer = hello_response(ME, nonce, DIGEST)
    assert check_hello(ME.peer_id, nonce, DIGEST, answer)
    assert not check_hello(OTHER.peer_id, nonce, DIGEST, answer)
    assert not check_hello(ME.peer_id, bytes(16), DIGEST, answer)
    assert not check_hello(PeerId("x"), nonce, DIGEST, b"\xff")
    assert not check_hello(ME.peer_id, nonce, DIGEST, msgpack.packb([1]))
    with pytest.raises(ValueError, match="16"):
        hello_response(ME, b"short", DIGEST)
