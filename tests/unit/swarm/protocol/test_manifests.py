"""A manifest on the wire: it survives, and what breaks a bound is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.protocol import wire
from swarm.protocol.manifest import MAX_FILE_BYTES, MAX_MANIFEST_BYTES, MAX_WEIGHT_FILES, Manifest, WeightFile
from swarm.protocol.v1 import node_pb2 as pb

FILE = WeightFile("model.safetensors", 7, "ab" * 32)
FILES = st.builds(
    WeightFile,
    st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=40),
    st.integers(0, MAX_FILE_BYTES),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
)
MANIFESTS = st.builds(
    Manifest.of,
    st.lists(FILES, min_size=1, max_size=9, unique_by=lambda file: file.name),
    st.sampled_from(["", "c0ffee" + "0" * 34, "ab" * 32]),
)


@given(MANIFESTS)
def test_a_manifest_survives(manifest: Manifest) -> None:
    read = wire.decode_manifest(wire.encode_manifest(manifest))
    assert (read, read.commit, read.digest) == (manifest, manifest.commit, manifest.digest)


def named(*names: str) -> pb.ManifestReply:
    files = [pb.WeightFile(name=name, size_bytes=1, sha256=bytes(32)) for name in names]
    return pb.ManifestReply(files=files)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("files", lambda reply: reply.ClearField("files")),
        ("files", lambda reply: reply.CopyFrom(named("b", "a"))),
        ("files", lambda reply: reply.CopyFrom(named("a", "a"))),
        ("files", lambda reply: reply.CopyFrom(named(*(f"{n:05}" for n in range(MAX_WEIGHT_FILES + 1))))),
        ("name", lambda reply: reply.CopyFrom(named(""))),
        ("name", lambda reply: reply.CopyFrom(named("a" * 256))),
        ("name", lambda reply: reply.CopyFrom(named("a\x1b[2J"))),
        ("size_bytes", lambda reply: setattr(reply.files[0], "size_bytes", MAX_FILE_BYTES + 1)),
        ("sha256", lambda reply: setattr(reply.files[0], "sha256", bytes(20))),
        ("commit", lambda reply: setattr(reply, "commit", "main")),
    ],
)
def test_what_breaks_a_bound_is_refused_by_name(field: str, change: Callable[[pb.ManifestReply], object]) -> None:
    reply = pb.ManifestReply.FromString(wire.encode_manifest(Manifest.of([FILE])))
    change(reply)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_manifest(reply.SerializeToString())
    assert caught.value.field == field


def test_too_many_bytes_and_garbage_are_refused() -> None:
    for data in (bytes(MAX_MANIFEST_BYTES + 1), b"\xff"):
        with pytest.raises(RemoteProtocolError, match="bytes"):
            wire.decode_manifest(data)


@pytest.mark.parametrize(
    "file", [WeightFile("", 7, "ab" * 32), WeightFile("a", 7, "no hex"), WeightFile("a", -1, "ab" * 32)]
)
def test_what_the_wire_cannot_hold_is_a_bug_here(file: WeightFile) -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode_manifest(Manifest.of([file]))
