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

from swarm.discovery.address_proof import check_hello, hello_response
from swarm.discovery.identity import Identity, verify
from swarm.discovery.node_record import (
    MAX_DELAYS,
    MAX_SPEEDS,
    NodeRecord,
    NodeState,
    Reach,
    live_records,
    open_filed,
    seal,
    tombstone,
    unseal,
)
from swarm.discovery.record_fields import RecordError
from swarm.errors import IdentityError
from swarm.ids import ModelIdentity, PeerId, SwarmId
from swarm.layers import Span
from swarm.protocol.limits import MAX_RECORD_BYTES
from swarm.transport.certificate import ServerCertificate

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
MODEL_FIELDS = astuple(MODEL)


def model_with(name: str = MODEL.name, num_layers: int = MODEL.num_layers) -> tuple[object, ...]:
    """A model whose fingerprint is that of its parts."""
    return astuple(ModelIdentity.of(name, "b2" * 32, "c3" * 32, "d4" * 32, num_layers))


FIELDS = [
    *["format", "left", "peer", "model", "span", "address", "state", "numeric_class", "version", "name"],
    *["sweep_ms", "kv_tokens_free", "kv_tokens_total", "sequence", "expires_at"],
    *["delays_ms", "busy", "uplink_mbit_per_s", "row_bytes", "movable", "certificate", "reach"],
    *["bucketed", "aux_rows", "swarm"],
]


def forged(**changes: object) -> bytes:
    """A record signed by its own peer that breaks its own bounds, as hostile software would make it."""
    key, body, _ = msgpack.unpackb(SEALED)
    values = dict(zip(FIELDS, msgpack.unpackb(body), strict=True)) | changes
    body = msgpack.packb(list(values.values()))
    packed: bytes = msgpack.packb([key, body, ME.sign(b"canopy-record" + body)])
    return packed


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
    for missing, wanted in ((1, replace(full, swarm=None)), (2, replace(RECORD, bucketed=True)), (3, RECORD)):
        earlier = msgpack.packb(msgpack.unpackb(body)[:-missing])
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
    ("changes", "field"),
    [
        ({"bucketed": 1}, "bucketed"),
        ({"bucketed": None}, "bucketed"),
        ({"aux_rows": 1}, "aux_rows"),
        ({"swarm": bytes(15)}, "swarm"),
        ({"swarm": "of text"}, "swarm"),
        ({"bucketed": True, "sweep_ms": [[16, 5.0], [32, 4.0]]}, "sweep_ms"),
        ({"span": [20, 10]}, "span"),
        ({"span": [0, 41]}, "span"),
        ({"span": [5]}, "span"),
        ({"span": [-1, 3]}, "span"),
        ({"expires_at": NOW + 96}, "expires_at"),
        ({"expires_at": float("inf")}, "expires_at"),
        ({"expires_at": NOW - 1}, "expires_at"),
        ({"peer": OTHER.peer_id, "certificate": OTHERS_CERTIFICATE}, "signature"),
        ({"peer": "Qm"}, "peer"),
        ({"address": "no port"}, "address"),
        ({"address": "host:0"}, "address"),
        ({"address": "host:70000"}, "address"),
        ({"address": "http://host:80"}, "address"),
        ({"address": "0.0.0.0:80"}, "address"),
        ({"address": "0:80"}, "address"),
        ({"address": "0x0.0:80"}, "address"),
        ({"address": "1.2.3:80"}, "address"),
        ({"address": "224.0.0.1:80"}, "address"),
        ({"address": "255.255.255.255:80"}, "address"),
        ({"address": "[::]:80"}, "address"),
        ({"address": "[::ffff:0.0.0.0]:80"}, "address"),
        ({"address": "[1:2]:80"}, "address"),
        ({"address": "-o.example:80"}, "address"),
        ({"state": "gone"}, "state"),
        ({"name": "x" * 65}, "name"),
        ({"name": "\x1b[31m"}, "name"),
        ({"numeric_class": 7}, "numeric_class"),
        ({"numeric_class": "cpu float32"}, "numeric_class"),
        ({"numeric_class": "cpu"}, "numeric_class"),
        ({"version": "v" * 33}, "version"),
        ({"version": "--version"}, "version"),
        ({"version": ""}, "version"),
        ({"kv_tokens_free": 201}, "kv_tokens_free"),
        ({"kv_tokens_total": -1}, "kv_tokens_total"),
        ({"kv_tokens_total": 2**41}, "kv_tokens_total"),
        ({"sequence": True}, "sequence"),
        ({"sweep_ms": [[1, "fast"]]}, "sweep_ms"),
        ({"sweep_ms": [[size + 1, 1.0] for size in range(9)]}, "sweep_ms"),
        ({"sweep_ms": [[0, 1.0]]}, "sweep_ms"),
        ({"sweep_ms": [[4_097, 1.0]]}, "sweep_ms"),
        ({"sweep_ms": [[8, 1.0], [8, 2.0]]}, "sweep_ms"),
        ({"sweep_ms": [[8, 1.0], [1, 2.0]]}, "sweep_ms"),
        ({"sweep_ms": [[1, -1e308], [2, 1e308]]}, "sweep_ms"),
        ({"sweep_ms": [[1, 0.0]]}, "sweep_ms"),
        ({"sweep_ms": [[1, 5e-324]]}, "sweep_ms"),
        ({"sweep_ms": [[1, 1.1e6]]}, "sweep_ms"),
        ({"delays_ms": [[ME.peer_id, -1.0]]}, "delays_ms"),
        ({"delays_ms": [[ME.peer_id, float("nan")]]}, "delays_ms"),
        ({"delays_ms": [[ME.peer_id, 60_001.0]]}, "delays_ms"),
        ({"delays_ms": [["Qm", 1.0]]}, "delays_ms"),
        ({"delays_ms": [[ME.peer_id]]}, "delays_ms"),
        ({"delays_ms": [[ME.peer_id, 1.0]] * 17}, "delays_ms"),
        ({"busy": 1.5}, "busy"),
        ({"busy": None}, "busy"),
        ({"uplink_mbit_per_s": 0.0}, "uplink_mbit_per_s"),
        ({"row_bytes": 2**20 + 1}, "row_bytes"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"movable": 1}, "movable"),
        ({"certificate": None}, "certificate"),
        ({"certificate": b"not one"}, "certificate"),
        ({"certificate": bytes(513)}, "certificate"),
        ({"certificate": OTHERS_CERTIFICATE}, "certificate"),
        ({"certificate": RECORD.certificate + b"!"}, "certificate"),
        ({"model": ["demo"]}, "model"),
        ({"model": ["demo", "A1" * 32, "b2" * 32, "c3" * 32, "d4" * 32, 40]}, "model"),
        ({"model": list(model_with(name="--mqtt=mqtt://evil.example"))}, "model"),
        ({"model": list(model_with(name="a; rm -rf /"))}, "model"),
        ({"model": list(model_with(name="a/../../b"))}, "model"),
        ({"model": list(model_with(num_layers=513))}, "model"),
        ({"model": list(model_with(num_layers=0))}, "model"),
        ({"model": [*MODEL_FIELDS[:5], 41]}, "model"),  # the honest fingerprint and a layer more
        ({"model": [*MODEL_FIELDS[:2], "ff" * 32, *MODEL_FIELDS[3:]]}, "model"),  # and another config
        ({"model": [*MODEL_FIELDS[:3], "ff" * 32, *MODEL_FIELDS[4:]]}, "model"),  # and other weights
        ({"reach": "magic"}, "reach"),
        ({"reach": "relayed"}, "reach"),  # and its own address
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


def test_filing_only_under_ones_own_name_until_the_signed_time() -> None:
    assert open_filed(SEALED, ME.peer_id, NOW + 60, NOW).record == RECORD
    for peer, expires_at in [(OTHER.peer_id, NOW + 60), (ME.peer_id, NOW + 61), (None, NOW + 60)]:
        with pytest.raises(RecordError):
            open_filed(SEALED, peer, expires_at, NOW)


def test_live_records_keep_the_newest_per_peer_and_drop_who_left() -> None:
    newer = replace(RECORD, sequence=4, expires_at=NOW + 70, span=Span(20, 40))
    restarted = replace(RECORD, sequence=1, expires_at=NOW + 80, span=Span(3, 5))
    other = replace(RECORD, peer=OTHER.peer_id, certificate=OTHERS_CERTIFICATE)
    blobs = [seal(newer, ME), SEALED, b"junk", seal(other, OTHER), forged(span=[9, 1])]
    assert live_records(blobs, NOW) == [other, newer]
    assert live_records([*blobs, seal(restarted, ME)], NOW) == [other, restarted]
    assert live_records([*blobs, seal(tombstone(newer), ME, left=True)], NOW) == [other]
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
        "import sys; from pathlib import Path; from swarm.discovery.identity import Identity\n"
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
