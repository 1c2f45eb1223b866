"""A model's manifest as bytes and back; in a file of its own because records and sessions have no part in it."""

from __future__ import annotations

from itertools import pairwise

from google.protobuf.message import DecodeError

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.protocol import checks
from swarm.protocol.manifest import (
    COMMIT,
    MAX_FILE_BYTES,
    MAX_FILE_NAME,
    MAX_MANIFEST_BYTES,
    MAX_WEIGHT_FILES,
    Manifest,
    WeightFile,
)
from swarm.protocol.v1 import node_pb2 as pb

SHA256_BYTES = 32


def encode_manifest(manifest: Manifest) -> bytes:
    """The answer to Manifest.

    Raises:
        LocalProtocolError: the wire cannot hold it.
    """
    try:
        files = [
            pb.WeightFile(name=file.name, size_bytes=file.size_bytes, sha256=bytes.fromhex(file.sha256))
            for file in manifest.files
        ]
        data = pb.ManifestReply(files=files, commit=manifest.commit).SerializeToString()
        decode_manifest(data)
    except (ValueError, RemoteProtocolError) as error:
        raise LocalProtocolError("files", str(error)) from error
    return data


def decode_manifest(data: bytes) -> Manifest:
    """The answer to Manifest; whether it is the manifest that was asked for, its digest says.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    checks.at_most(data, MAX_MANIFEST_BYTES, "bytes")
    reply = pb.ManifestReply()
    try:
        reply.ParseFromString(data)
    except DecodeError as error:
        raise RemoteProtocolError("bytes", "not a ManifestReply message") from error
    checks.positive(len(reply.files), "files", MAX_WEIGHT_FILES + 1)
    files = tuple(_file(file) for file in reply.files)
    names = [file.name for file in files]
    if any(one >= other for one, other in pairwise(names)):
        raise RemoteProtocolError("files", "their names do not rise")
    if reply.commit and COMMIT.fullmatch(reply.commit) is None:
        raise RemoteProtocolError("commit", "is no commit's hash")
    return Manifest(files, reply.commit)


def _file(file: pb.WeightFile) -> WeightFile:
    checks.positive(len(file.name), "name", MAX_FILE_NAME + 1)
    size_bytes = checks.number(file.size_bytes, "size_bytes", MAX_FILE_BYTES + 1)
    digest = checks.exactly(file.sha256, SHA256_BYTES, "sha256")
    return WeightFile(checks.printable(file.name, "name"), size_bytes, digest.hex())
