"""What earlier releases wrote is read as they meant it, and what this one writes is what they read (Versions)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from swarm.base.errors import RemoteProtocolError
from swarm.base.version import VERSION, which_side
from swarm.directory.address_proof import check_hello
from swarm.directory.dht import about
from swarm.directory.dht.dialback import parse_request
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import ModelPointer, open_pointer, seal_pointer
from swarm.directory.node_record import open_sealed, seal, unseal
from swarm.directory.sealing import RecordError
from swarm.link.endpoint import Endpoint
from swarm.protocol import wire
from swarm.protocol.frames import FrameAssembler
from swarm.protocol.messages import Frame, Sampling, Snapshot, SweepFrame
from swarm.protocol.pick_rules import PickRules
from swarm.protocol.v1 import node_pb2
from swarm.reach.relay.openings import check_presence, parse_opening
from swarm.status.messages import open_payload
from tests.frozen.reading import NONCE, NOW, Frozen, holds, plain, releases

ME = Identity.ephemeral()
RELEASE = re.escape(VERSION)


@pytest.fixture(params=releases(), ids=lambda release: release.name)
def frozen(request: pytest.FixtureRequest) -> Frozen:
    found: Frozen = request.param
    return found


def test_there_is_a_frozen_release() -> None:
    assert releases()


# The directory


def test_records_are_read_as_they_were_meant(frozen: Frozen) -> None:
    record = unseal(frozen.data("directory", "bytes", "record"), NOW)
    then = frozen.content["directory"]["record"] | {"sealed": plain(record)["sealed"]}
    assert holds(plain(record), then)
    assert unseal(frozen.data("directory", "bytes", "direct record"), NOW).name is None
    assert open_sealed(frozen.data("directory", "bytes", "last record"), NOW).left
    pointer = open_pointer(frozen.data("directory", "bytes", "pointer"), NOW)
    assert (pointer.peer, pointer.model) == (record.peer, record.model)


def test_proofs_and_requests_are_understood(frozen: Frozen) -> None:
    record = unseal(frozen.data("directory", "bytes", "record"), NOW)
    digest = Endpoint(record.peer, record.address, record.certificate).digest
    assert check_hello(record.peer, NONCE, digest, frozen.data("directory", "bytes", "hello"))
    asked = parse_request(frozen.data("directory", "bytes", "dial-back"))
    assert asked == (record.address, NONCE, record.certificate)
    said = frozen.content["directory"]["presence"]
    for line in frozen.content["directory"]["openings"]:
        assert parse_opening(line.encode()).verb.value == line.split()[0]
    assert check_presence(said["peer"], said["relay"], NONCE, said["key"], said["signature"])


def test_records_of_this_release_have_the_old_fields_in_the_old_places(frozen: Frozen) -> None:
    record = replace(unseal(frozen.data("directory", "bytes", "record"), NOW), sealed=b"")
    theirs = _body(frozen.data("directory", "bytes", "record"))
    ours = _body(seal(_of_me(record), ME))
    assert [type(value) for value in ours[: len(theirs)]] == [type(value) for value in theirs]
    mine = {record.peer: ME.peer_id, record.address: _of_me(record).address, record.certificate: b""}
    assert ours[: len(theirs)] == [mine.get(one, one) if isinstance(one, str | bytes) else one for one in theirs]
    pointer = _body(frozen.data("directory", "bytes", "pointer"))
    made = _body(seal_pointer(ModelPointer(ME.peer_id, record.model, NOW + 60), ME))
    assert made[: len(pointer)] == [ME.peer_id if value == record.peer else value for value in pointer]


def test_what_a_later_release_adds_is_read_past(frozen: Frozen) -> None:
    record = _of_me(replace(unseal(frozen.data("directory", "bytes", "record"), NOW), sealed=b""))
    body = _body(seal(record, ME))
    body[3] = [*body[3], "later"]
    later = msgpack.packb([*body, {"any": "thing"}])
    assert unseal(msgpack.packb([ME.public_key, later, ME.sign(b"canopy-record" + later)]), NOW).model == record.model
    pointer = _body(seal_pointer(ModelPointer(ME.peer_id, record.model, NOW + 60), ME))
    later = msgpack.packb([*pointer, 7])
    assert open_pointer(msgpack.packb([ME.public_key, later, ME.sign(b"canopy-model" + later)]), NOW)
    asked = msgpack.unpackb(frozen.data("directory", "bytes", "dial-back"))
    assert parse_request(msgpack.packb([*asked, "later"])) is not None


@pytest.mark.parametrize(
    ("place", "value", "field", "says"),
    [
        (0, 3, "data", f"a record of format 3; release {RELEASE} reads format 2: update this machine"),
        (0, 1, "data", "a record of format 1.*its machine is to be updated"),
        (0, "3", "data", "a record of no format"),
        (6, "resting", "state", f"'resting' is unknown to release {RELEASE}; if a later one has it, update this one"),
        (21, "carried", "reach", "'carried' is unknown to release"),
        (21, ["x"], "reach", "'list' is unknown to release"),
    ],
)
def test_what_cannot_be_read_past_is_refused_by_name(place: int, value: object, field: str, says: str) -> None:
    record = _of_me(replace(unseal(releases()[0].data("directory", "bytes", "record"), NOW), sealed=b""))
    body = _body(seal(record, ME))
    body[place] = value
    packed = msgpack.packb(body)
    with pytest.raises(RecordError, match=says) as refused:
        unseal(msgpack.packb([ME.public_key, packed, ME.sign(b"canopy-record" + packed)]), NOW)
    assert refused.value.field == field


def _of_me(record: Any) -> Any:  # noqa: ANN401
    return replace(record, peer=ME.peer_id, address=record.address.replace(record.peer, ME.peer_id), certificate=b"")


def _body(sealed: bytes) -> list[Any]:
    found: list[Any] = msgpack.unpackb(msgpack.unpackb(sealed)[1])
    return found


# Sessions' messages


def test_frames_are_read_as_they_were_meant(frozen: Frozen) -> None:
    for name, parts in frozen.content["wire"]["frames"].items():
        frame = _joined([frozen.data("wire", "frames", name, place) for place in range(len(parts))])
        assert holds(plain(frame), _as_read(frozen.content["wire"]["read"][name])), name


def test_answers_are_read_as_they_were_meant(frozen: Frozen) -> None:
    for name, then in frozen.content["wire"]["upstream read"].items():
        assert holds(plain(wire.decode_upstream(frozen.data("wire", "upstream", name))), then), name
    assert wire.decode_replies_up(frozen.data("wire", "unary", "replies"))
    assert wire.decode_replies_up(frozen.data("wire", "unary", "pong"))
    assert wire.decode_hold(frozen.data("wire", "unary", "hold")).ttl_s == 10.0
    assert wire.decode_held(frozen.data("wire", "unary", "held")).working == 3
    assert wire.decode_info(frozen.data("wire", "unary", "info")).num_layers == 40


def test_an_older_release_reads_what_this_one_writes(frozen: Frozen) -> None:
    for name, parts in frozen.content["wire"]["frames"].items():
        data = [frozen.data("wire", "frames", name, place) for place in range(len(parts))]
        head = b"".join(wire.decode_part(part).data for part in data)[: wire.decode_part(data[0]).head_bytes]
        theirs, ours = frozen.message("Frame", head), frozen.message("Frame", wire.encode_frame(_joined(data)))
        ours.DiscardUnknownFields()
        if name == "ping":
            theirs.ping.padding = b""  # type: ignore[attr-defined]  # a reader drops it
        assert ours == theirs, name
    for name in frozen.content["wire"]["upstream"]:
        data_ = frozen.data("wire", "upstream", name)
        ours = frozen.message("Upstream", wire.encode_upstream(wire.decode_upstream(data_)))
        assert ours == frozen.message("Upstream", data_), name


def test_no_field_of_the_wire_was_removed_or_given_another_meaning(frozen: Frozen) -> None:
    now = {message.name: message for message in _file(node_pb2.DESCRIPTOR.serialized_pb).message_type}
    then = _file(frozen.data("wire", "descriptor"))
    for message in then.message_type:
        fields = {one.number: one for one in now[message.name].field}
        for old in message.field:
            new = fields[old.number]
            meaning = (old.name, old.type, old.label, old.type_name)
            assert (new.name, new.type, new.label, new.type_name) == meaning, f"{message.name}.{old.name}"
    enums = {enum.name: _values(enum) for enum in _file(node_pb2.DESCRIPTOR.serialized_pb).enum_type}
    for enum in then.enum_type:
        assert enums[enum.name].items() >= _values(enum).items()


def test_an_older_release_takes_no_frame_with_rules_for_one_without(frozen: Frozen) -> None:
    """It would read past the rules, and pick without: it must refuse the whole frame by its kind."""
    for name in ("sweep", "snapshot"):
        frame = _joined([frozen.data("wire", "frames", name, 0)])
        ruled = Sampling(rules=PickRules(frequency_penalty=1.0))
        plain_kind = frozen.message("Frame", wire.encode_frame(frame)).WhichOneof("kind")
        if isinstance(frame, SweepFrame):
            frame = replace(frame, sweep=replace(frame.sweep, sampling=ruled))
        elif isinstance(frame, Snapshot):
            frame = replace(frame, sampling=ruled)
        data = wire.encode_frame(frame)
        found = wire.decode_frame(data)
        assert isinstance(found, SweepFrame | Snapshot)
        assert (found.sweep if isinstance(found, SweepFrame) else found).sampling == ruled
        assert (plain_kind, frozen.message("Frame", data).WhichOneof("kind")) == (name, None)


def _values(enum: Any) -> dict[int, str]:  # noqa: ANN401
    return {one.number: one.name for one in enum.value}


def test_unknown_fields_are_ignored_and_unknown_kinds_refused_by_number() -> None:
    frame = wire.encode_frame(_joined([releases()[0].data("wire", "frames", "sweep", place) for place in range(1)]))
    unknown = bytes([15 << 3 | 2, 2]) + b"hi"
    assert wire.decode_frame(frame + unknown)
    said = f"of kind 15 is unknown to release {RELEASE}; if a later one has it, update this one"
    with pytest.raises(RemoteProtocolError, match=f"kind: Frame {said}"):
        wire.decode_frame(unknown)
    with pytest.raises(RemoteProtocolError, match=f"kind: Upstream {said}"):
        wire.decode_upstream(unknown)
    with pytest.raises(RemoteProtocolError, match=f"kind: RepliesUp {said}"):
        wire.decode_replies_up(unknown)
    with pytest.raises(RemoteProtocolError, match="Frame of no kind"):
        wire.decode_frame(b"")


def _file(descriptor: bytes) -> Any:  # noqa: ANN401
    return FileDescriptorProto.FromString(descriptor)


def _joined(parts: list[bytes]) -> Frame:
    joiner = FrameAssembler()
    frame = None
    for part in parts:
        frame = joiner.feed(part)
    assert frame is not None
    return frame


def _as_read(then: Any) -> Any:  # noqa: ANN401
    """What a reader keeps: it drops padding."""
    return then | {"padding": {"bytes": 0}} if "padding" in then else then


# Telemetry, and which side is to be updated


def test_telemetry_is_read_as_it_was_meant(frozen: Frozen) -> None:
    for message in frozen.content["telemetry"]:
        signed = open_payload("canopy", message["topic"], message["payload"].encode())
        assert type(signed.body).__name__ == message["kind"]
        assert signed.peer in message["topic"]
        sent = json.loads(json.loads(message["payload"])["body"])
        assert signed.body.stamp.seq == sent["seq"]


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ("0.3.0", "0.2.0", "it runs release 0.3.0, this machine 0.2.0: update this machine (pip install"),
        ("0.2.0", "0.10.0", "it runs release 0.2.0, this machine 0.10.0: that one is to be updated"),
        ("0.2.0", "0.2.0", None),
        ("0.2.0+local", "0.2.0", None),
        ("next", "0.2.0", None),
        ("9" * 32, "0.2.0", "it runs release"),
    ],
)
def test_the_older_side_is_to_be_updated(theirs: str, ours: str, says: str | None) -> None:
    found = which_side(theirs, ours)
    assert found == says or (says is not None and found is not None and found.startswith(says))


def test_what_peers_speak_is_known_before_anything_is_asked(frozen: Frozen) -> None:
    said = about.parse_about(frozen.data("directory", "bytes", "about"))
    assert said is not None
    assert about.refusal([said]) is None
    assert about.refusal([]) is None
    later = about.About("0.9.0", (3, 4), (1,))
    older = about.About("0.1.0", (1,), (1,))
    assert about.refusal([later]) == (
        f"this swarm runs release 0.9.0, with records of format 3, 4; this machine runs {VERSION}, with format 2: "
        "update this machine (pip install -U canopy-swarm)"
    )
    assert str(about.refusal([older])).endswith("its machines are to be updated")
    assert "messages of format 2" in str(about.refusal([about.About("1.0", (2,), (2,))]))
    assert about.refusal([later, said]) is None, "one peer that understands is enough"


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", msgpack.packb(["1"]), msgpack.packb(["1", [], [1]]), msgpack.packb(["1", [True], [1]]),
     msgpack.packb(["1", ["2"], [1]]), msgpack.packb(["1", [2] * 17, [1]]), msgpack.packb([1, [2], [1]]), bytes(2_000)],
)  # fmt: skip
def test_an_odd_answer_says_nothing(data: bytes) -> None:
    assert about.parse_about(data) is None


def test_an_answer_of_a_later_release_is_read_past_its_first_places() -> None:
    said = about.parse_about(msgpack.packb(["9.0\x1b[2J", [2, 3], [1, 2], "more"]))
    assert said == about.About("9.0\ufffd[2J", (2, 3), (1, 2))
