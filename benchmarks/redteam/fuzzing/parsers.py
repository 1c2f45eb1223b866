"""Mutants of every kind of message, given to the parser that reads it: typed errors only, whatever the bytes.

In one process, without a network: hundreds of thousands of mutants in minutes. What they do to a live node, the fuzz
that sends them shows.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from benchmarks.redteam.fuzzing.mutations import mutate_bytes, mutate_packed, mutate_wire
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import ModelIdentity, PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.directory.address_proof import check_hello, hello_response
from swarm.directory.dht.dialback import pack_request, parse_request
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import open_pointer, seal_announcement
from swarm.directory.node_record import RECORDS, NodeRecord, NodeState, open_sealed, seal
from swarm.link.certificate import ServerCertificate
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import FrameAssembler, split
from swarm.protocol.manifest import Manifest, WeightFile
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Codec,
    Credits,
    Fault,
    FaultKind,
    Frame,
    Hold,
    HopTime,
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
    Tell,
    Want,
)
from swarm.protocol.pick_rules import DraftDistribution
from swarm.status.messages import (
    Metrics,
    Presence,
    ServedModel,
    Stamp,
    Status,
    TelemetryError,
    open_payload,
    part_of,
    seal_body,
    topic_of,
)

Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    seeds: Sequence[bytes]
    mutate: Mutate
    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]


@dataclass(slots=True)
class ParserRun:
    """What came of some mutants.

    Attributes:
        accidents: What no parser may raise, with the mutant in hex.
        slowest_s: The longest that one took, by subject.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    accidents: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return self.outcomes.total()


def fuzz_parsers(count: int, seed: int, subjects: Sequence[Subject] | None = None) -> ParserRun:
    """Give so many mutants to the parsers in turn; the same seed makes the same ones."""
    rng, run, began = random.Random(seed), ParserRun(), time.perf_counter()
    chosen = subjects or all_subjects()
    pools = {subject.name: list(subject.seeds) for subject in chosen}
    for number in range(count):
        subject = chosen[number % len(chosen)]
        pool = pools[subject.name]
        mutant = subject.mutate(rng, rng.choice(pool))
        started = time.perf_counter()
        try:
            subject.parse(mutant)
            outcome = "taken"
            if len(pool) < 64 and rng.random() < 0.1:
                pool.append(mutant)  # what is still readable is worth changing again
        except subject.errors:
            outcome = "refused"
        except Exception as error:  # noqa: BLE001 (that is what is looked for)
            outcome = "accident"
            if len(run.accidents) < 20:
                run.accidents.append(f"{subject.name}: {type(error).__name__}: {error}: {mutant[:200].hex()}")
        took = time.perf_counter() - started
        run.slowest_s[subject.name] = max(took, run.slowest_s.get(subject.name, 0.0))
        run.outcomes[f"{subject.name} {outcome}"] += 1
    run.seconds = time.perf_counter() - began
    return run


def all_subjects() -> list[Subject]:
    """Every kind of message that strangers send."""
    who = Identity.ephemeral()
    protocol = (RemoteProtocolError,)
    body = sample_metrics(who)
    record = seal(sample_record(who), who)
    pointer = seal_announcement(sample_record(who), who)[-1].data
    hello = hello_response(who, bytes(16), bytes(32))
    dial_back = pack_request("127.0.0.1:9", bytes(16), sample_record(who).certificate)
    return [
        Subject(
            "frame", [wire.encode_frame(one) for one in sample_frames(who)], mutate_wire, wire.decode_frame, protocol
        ),
        Subject("part", [part for one in sample_frames(who) for part in split(one)], mutate_wire, _assemble, protocol),
        Subject(
            "upstream", [wire.encode_upstream(one) for one in UPSTREAM], mutate_wire, wire.decode_upstream, protocol
        ),
        Subject(
            "reply request",
            [wire.encode_replies_up(one) for one in REPLIES_UP],
            mutate_wire,
            wire.decode_replies_up,
            protocol,
        ),
        Subject(
            "hold", [wire.encode_hold(Hold(SessionId(bytes(16)), 3, 9.0))], mutate_wire, wire.decode_hold, protocol
        ),
        Subject("manifest", [wire.encode_manifest(MANIFEST)], mutate_wire, wire.decode_manifest, protocol),
        Subject("record", [record], mutate_packed, lambda data: open_sealed(data, NOW_S), protocol),
        Subject("signed record", [_body(record)], mutate_packed, lambda data: _open_signed(who, data), protocol),
        Subject("pointer", [pointer], mutate_packed, lambda data: open_pointer(data, NOW_S), protocol),
        Subject("hello", [hello], mutate_packed, lambda data: check_hello(who.peer_id, bytes(16), bytes(32), data), ()),
        Subject("dial-back", [dial_back], mutate_packed, parse_request, ()),
        Subject(
            "telemetry", [body[1]], mutate_bytes, lambda data: open_payload("canopy", body[0], data), (TelemetryError,)
        ),
    ]


NOW_S = 1_800_000_000.0
MANIFEST = Manifest.of([WeightFile(f"model-{shard}.safetensors", shard, "ab" * 32) for shard in range(3)], "c" * 40)
REPLIES_UP = (
    RepliesRequest(SessionId(bytes(16)), 3, 4, True),
    Pong(7),
    Tell(
        *(3, (TreeNodeId(1), TreeNodeId(300)), (5, 600), Sampling(3, 0.7), Want(True)),
        (DraftDistribution(1, (5, 6), (0.5, 0.25), (0, 1)),),
    ),
)
UPSTREAM = (
    Attached(3, 5),
    Ready(1, Credits(64, 4, 16)),
    Ack(3, 4, 5),
    Pong(9),
    Fault(0, PeerId("Qm" + "a" * 44), FaultKind.PROTOCOL, "tokens", "why"),
)


def sample_frames(who: Identity) -> list[Frame]:
    """Valid messages of every kind that travels in parts."""
    ids = tuple(map(TreeNodeId, range(4)))
    guess = DraftDistribution(1, (5, 6, 7), (0.5, 0.25, 0.25), (0, 1))
    sweep = Sweep(
        3,
        2,
        ids[0],
        (5, 6, 7),
        (None, ids[0], ids[1]),
        ids[0],
        1,
        2,
        None,
        None,
        Sampling(3, 0.7, 5, 0.9, 0.1),
        Want(True),
        (guess,),
    )
    rows = Rows(Codec.FP32, 3, 8, bytes(96))
    times = (HopTime(1.0, 2.0, 3.0, 4.0),)
    key = SessionKey.fresh()
    route = (RouteHop(who.peer_id, Span(0, 6)), RouteHop(who.peer_id, Span(6, 12)))
    record = seal(sample_record(who), who)
    attach = key.command(Attach(key.session, 2, route, 0, Open("ab" * 32, 64, 4, 16, Codec.FP32), None, (record,)))
    snapshot = Snapshot(
        1, 3, 2, TreeNodeId(3), Sampling(), ids[:3], (5, 6, 7), (1, 2, 3), (None, ids[0], ids[1]), (sweep,)
    )
    return [
        attach,
        Reroute(3, route, attach.open, None, (record,), signature=attach.signature),
        SweepFrame(sweep),
        SweepFrame(replace(sweep, sampling=None), (True, True, True), rows, times),
        Reply(3, 1, ((ids[0], 5), (ids[1], 6)), times, (-0.5, -1.0)),
        Reply(3, 1, ((ids[0], 5),), times, None, ids[:3], rows),
        snapshot,
        replace(snapshot, rows=rows),
        Close("done", True),
        Ping(9, bytes(20)),
        UPSTREAM[-1],
    ]


def sample_record(who: Identity) -> NodeRecord:
    return NodeRecord(
        peer=who.peer_id,
        model=ModelIdentity.of("model", "ab" * 32, "cd" * 32, "ef" * 32, 12),
        span=Span(0, 12),
        address="127.0.0.1:31338",
        state=NodeState.SERVING,
        numeric_class="cpu-float32",
        version="0.2.0",
        name="a name",
        sweep_ms=((1, 1.0), (16, 2.0)),
        kv_tokens_free=10,
        kv_tokens_total=20,
        sequence=3,
        expires_at=NOW_S + 60,
        delays_ms=((who.peer_id, 1.0),),
        certificate=ServerCertificate.fresh(who.peer_id).der,
    )


def sample_metrics(who: Identity) -> tuple[str, bytes]:
    stamp = Stamp("ab" * 8, 1, NOW_S)
    status = Status(
        stamp, True, ServedModel("model", "cd" * 32, 12), Span(0, 12), Presence.SERVING, "cpu", "cpu-float32", "0.2.0",
        None, NOW_S, 10,
    )  # fmt: skip
    assert isinstance(status, Status | Metrics)
    topic = topic_of("canopy", "cd" * 32, who.peer_id, part_of(status))
    return topic, seal_body(status, topic, who)


def _assemble(data: bytes) -> object:
    return FrameAssembler().feed(data)


def _body(record: bytes) -> bytes:
    parts: Any = msgpack.unpackb(record)
    return bytes(parts[1])


def _open_signed(who: Identity, body: bytes) -> object:
    """What a stranger can sign: any body under its own key."""
    packed: bytes = msgpack.packb([who.public_key, body, who.sign(RECORDS.domain + body)])
    return open_sealed(packed, NOW_S)
