"""Make the frozen file of the release that runs: `python -m tests.frozen.freeze`. A file that exists stays as it is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from base64 import b64encode
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.life.serve import Node
from node.model.config import ServeConfig
from node.session.admission import CallerCheck
from swarm.base.ids import ModelIdentity, TreeNodeId
from swarm.base.layers import Span
from swarm.base.version import VERSION
from swarm.demo import TARGET
from swarm.directory.address_proof import hello_response
from swarm.directory.dht.about import pack_about
from swarm.directory.dht.dialback import pack_request
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import ModelPointer, seal_pointer
from swarm.directory.node_record import NodeRecord, NodeState, Reach, seal, tombstone
from swarm.link.certificate import ServerCertificate
from swarm.link.endpoint import Endpoint
from swarm.link.link import Metadata, introduce
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.faults import sign_fault
from swarm.protocol.frames import split
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Codec,
    Counters,
    Credits,
    Fault,
    FaultKind,
    Frame,
    Held,
    Hold,
    HopTime,
    NodeInfo,
    Open,
    Ping,
    Pong,
    Ready,
    RepliesRequest,
    Reply,
    Reroute,
    RouteHop,
    Rows,
    Sampling,
    Snapshot,
    Sweep,
    SweepFrame,
    Upstream,
    Want,
)
from swarm.protocol.pick_rules import DraftDistribution
from swarm.protocol.v1 import node_pb2
from swarm.reach.relay.openings import prove_presence
from swarm.status.messages import Body, seal_body
from tests.frozen.conversation import picks_of
from tests.frozen.reading import FOLDER, NONCE, NOW, plain
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.telemetry_messages import event, metrics, status, topic, will
from tests.telemetry_messages import identity as telemetry_identity

PROMPT = (5, 17, 42, 99, 7)
MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 40)


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _record(identity: Identity, other: Identity) -> NodeRecord:
    return NodeRecord(
        peer=identity.peer_id,
        model=MODEL,
        span=Span(0, 20),
        address=f"{identity.peer_id}.via.192.0.2.7:5000",
        state=NodeState.SERVING,
        numeric_class="cpu-float32",
        version=VERSION,
        name="Größe ✓",
        sweep_ms=((1, 1.5), (8, 4.0), (64, 20.25)),
        kv_tokens_free=100,
        kv_tokens_total=200,
        sequence=3,
        expires_at=NOW + 60,
        delays_ms=((other.peer_id, 12.5),),
        busy=0.25,
        uplink_mbit_per_s=20.5,
        row_bytes=16_384,
        movable=True,
        certificate=ServerCertificate.fresh(identity.peer_id).der,
        reach=Reach.RELAYED,
    )


def _directory(identity: Identity, other: Identity) -> dict[str, Any]:
    record = _record(identity, other)
    direct = replace(record, address="192.0.2.7:5000", reach=Reach.DIRECT, name=None, row_bytes=None)
    digest = Endpoint(record.peer, record.address, record.certificate).digest
    made = {
        "record": seal(record, identity),
        "direct record": seal(direct, identity),
        "last record": seal(tombstone(record), identity),
        "pointer": seal_pointer(ModelPointer(record.peer, MODEL, NOW + 60), identity),
        "hello": hello_response(identity, NONCE, digest),
        "dial-back": pack_request(record.address, NONCE, record.certificate),
        "about": pack_about(),
    }
    key, signature = prove_presence(identity, other.peer_id, NONCE)
    return {
        "bytes": {name: _text(data) for name, data in made.items()},
        "record": plain(record),
        "openings": [
            f"HERE {identity.peer_id}",
            f"CONNECT {identity.peer_id}:1 HTTP/1.1",
            f"TAKE {'0f' * 16}",
            "SEEN",
            f"PUNCH {identity.peer_id} 192.0.2.7:5000,[2001:db8::7]:5000",
            f"CALL {identity.peer_id} 192.0.2.7:5000 {'0f' * 16}",
            "LOAD",
        ],
        "presence": {"peer": identity.peer_id, "relay": other.peer_id, "key": key, "signature": signature},
    }


def _frames(identity: Identity, other: Identity, key: SessionKey) -> dict[str, Frame]:
    nodes = [TreeNodeId(node) for node in range(10, 13)]
    sweep = Sweep(
        sequence=3,
        committed=5,
        first_id=nodes[0],
        tokens=(7, 8, 9),
        parents=(None, nodes[0], TreeNodeId(0)),
        picks_from=nodes[1],
        generation=1,
        acked=2,
        truncate_to=4,
        commit_to=TreeNodeId(4),
        sampling=Sampling(2**63 + 5, 0.5, 40, 0.9, 0.05, multistep=True),
        want=Want(log_probs=True, hidden_rows=True),
        guesses=(DraftDistribution(1, (4, 5), (0.25, 0.75), (1, 0, 1)),),
    )
    route = (RouteHop(identity.peer_id, Span(0, 4)), RouteHop(other.peer_id, Span(4, 12)))
    want = Open("f" * 64, 4_096, 8, 512, Codec.BF16, bytes(32))
    attach = key.command(Attach(key.session, 1, route, 0, want))
    rows = Rows(Codec.BF16, 2, 4, bytes(range(16)))
    fault = Fault(1, other.peer_id, FaultKind.UNREACHABLE, "", "cannot be dialled")
    times = (HopTime(0.5, 8.25, 0.125, 12.0),)
    return {
        "attach": attach,
        "reroute": Reroute(2, route, attach.open, None, (), attach.signature),
        "sweep": SweepFrame(sweep, kept=(True, False, True), rows=rows, times=times),
        "reply": Reply(3, 1, ((nodes[1], 8), (nodes[2], 9)), times, (-1.0, -2.5), (nodes[1], nodes[2]), rows),
        "snapshot": Snapshot(
            1, 3, 2, nodes[2], Sampling(), (nodes[0], nodes[1]), (7, 8), (1, 3), (None, nodes[0]), (sweep,), rows=rows
        ),
        "close": Close("done", dismissed=True),
        "ping": Ping(2**62, bytes(3)),
        "fault": sign_fault(fault, key.session, identity.peer_id, identity.sign),
    }


def _upstreams(identity: Identity, frames: dict[str, Frame]) -> dict[str, Upstream]:
    fault = frames["fault"]
    assert isinstance(fault, Fault)
    return {
        "attached": Attached(1, 0),
        "attached anew": Attached(2, None),
        "ready": Ready(1, Credits(4_096, 8, 512)),
        "ack": Ack(3, 17, 2),
        "pong": Pong(2**62),
        "fault": fault,
    }


def _wire(identity: Identity, other: Identity, key: SessionKey) -> dict[str, Any]:
    frames = _frames(identity, other, key)
    upstreams = _upstreams(identity, frames)
    info = NodeInfo(
        **asdict(MODEL),
        span=Span(0, 4),
        vocab_size=512,
        hidden_size=64,
        numeric_class="cpu-float32",
        version=VERSION,
        kv_tokens_total=10,
        kv_tokens_free=5,
        sessions=1,
        counters=Counters(),
    )
    unary = {
        "replies": wire.encode_replies_up(RepliesRequest(key.session, 1, 2, may_wait=True)),
        "pong": wire.encode_replies_up(Pong(5)),
        "hold": wire.encode_hold(Hold(key.session, 1, 10.0)),
        "held": wire.encode_held(Held(held=True, generation=1, is_ready=True, received=3, passed=2, working=3)),
        "info": wire.encode_info(info),
    }
    return {
        "frames": {name: [_text(part) for part in split(frame)] for name, frame in frames.items()},
        "read": {name: plain(frame) for name, frame in frames.items()},
        "upstream": {name: _text(wire.encode_upstream(one)) for name, one in upstreams.items()},
        "upstream read": {name: plain(one) for name, one in upstreams.items()},
        "unary": {name: _text(data) for name, data in unary.items()},
        "descriptor": _text(node_pb2.DESCRIPTOR.serialized_pb),
    }


def _telemetry() -> list[dict[str, str]]:
    who = telemetry_identity(0)
    bodies: list[Body] = [status(version=VERSION), will(), metrics(), event()]
    return [
        {"topic": topic(body), "payload": seal_body(body, topic(body), who).decode(), "kind": type(body).__name__}
        for body in bodies
    ]


def lone_node(model: Path, registry: MemoryRegistry) -> Node:
    """A node that serves a whole model on this machine, in plain text: nothing in a conversation is drawn by chance."""
    config = ServeConfig(layers="0-12", model=str(model), host="127.0.0.1", threads=1, drain=0.0, insecure=True)
    return Node(replace(config, device="cpu", dtype="float32"), lambda _: None, registry)


async def _conversation(identity: Identity, key: SessionKey) -> dict[str, Any]:
    """What a client says to a node that serves the demo's target alone, and what it picks."""
    async with lone_node(TARGET, MemoryRegistry(MemoryNetwork(), identity)) as node:
        want = Open(node.identity.fingerprint, 256, 4, 64, Codec.FP32)
        attach = key.command(Attach(key.session, 0, (RouteHop(node.peer_id, Span(0, 12)),), 0, want))
        ids = [TreeNodeId(number) for number in range(len(PROMPT))]
        sweep = SweepFrame(Sweep(1, 0, ids[0], PROMPT, (None, *ids[:-1]), ids[0], sampling=Sampling()))
        first = wire.encode_replies_up(RepliesRequest(key.session, may_wait=True))

        def clock() -> float:
            return NOW

        opens = introduce(key, node.endpoint, wire.LINK, attach.signature, clock)
        hears = introduce(key, node.endpoint, wire.REPLIES, first, clock)
        link = [*split(attach), *split(sweep)]  # a part each
        picks = await picks_of(node.address, (link, opens), ([first], hears))
    return {
        "link": {"parts": [_text(part) for part in link], "metadata": _metadata(opens)},
        "replies": {"parts": [_text(first)], "metadata": _metadata(hears)},
        "picks": picks,
    }


def _metadata(metadata: Metadata) -> list[list[str]]:
    return [[name, _text(value)] for name, value in metadata]


def main() -> None:
    """Write the file of this release."""
    if ".dev" in VERSION:
        sys.exit(f"{VERSION} is no release: only those are frozen")
    path = FOLDER / f"release_{'_'.join(VERSION.split('.')[:2])}.json"
    if path.exists():
        sys.exit(f"{path} is frozen: it is not written again")
    with tempfile.TemporaryDirectory() as folder:
        identity, other = Identity.load_or_create(Path(folder) / "a"), Identity.ephemeral()
        private_key = (Path(folder) / "a").read_bytes()
        key = SessionKey(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"frozen").digest()))
        with patch("node.session.service.CallerCheck", partial(CallerCheck, clock=lambda: NOW)):
            conversation = asyncio.run(_conversation(identity, key))
    frozen = {
        "release": VERSION,
        "identity": _text(private_key),
        "directory": _directory(identity, other),
        "wire": _wire(identity, other, key),
        "telemetry": _telemetry(),
        "conversation": conversation,
    }
    path.write_text(json.dumps(frozen, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
