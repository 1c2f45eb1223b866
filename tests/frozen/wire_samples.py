"""Samples of every message of the wire: full, default and at its bounds. `wire.json` holds their bytes.

`python -m tests.frozen.wire_samples` writes bytes for samples that have none yet; it changes no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.protocol import wire
from swarm.protocol.limits import (
    MAX_COUNT,
    MAX_HOLD_S,
    MAX_HOP_MS,
    MAX_LAYERS,
    MAX_TELL_NODES,
    MAX_TEMPERATURE,
    MAX_WIDTH,
)
from swarm.protocol.manifest import MAX_FILE_BYTES, Manifest, WeightFile
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Border,
    Close,
    Codec,
    Counters,
    Credits,
    Fault,
    FaultKind,
    Hedge,
    Held,
    Hold,
    HopTime,
    NodeInfo,
    Open,
    OwnerProof,
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
from swarm.protocol.pick_rules import GRAMMAR_KINDS, MAX_CANDIDATES, MAX_DRAWS, DraftDistribution, Grammar, PickRules

FILE: Final = Path(__file__).parent / "wire.json"
BIG: Final = 2**63 - 1
WORD: Final = 2**32 - 1
TOKEN: Final = 2**31 - 1
A, B, C = (PeerId("Qm" + letter * 44) for letter in "abc")
SESSION: Final = SessionId(bytes(range(16)))
ROUTE: Final = (RouteHop(A, Span(0, 4)), RouteHop(B, Span(4, MAX_LAYERS)))
TIMES: Final = (HopTime(0.0, 0.0, 0.0, 0.0), HopTime(0.5, MAX_HOP_MS, 1e-9, 12.25))

Codecs = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]
FRAME: Final[Codecs] = (wire.encode_frame, wire.decode_frame)
UPSTREAM: Final[Codecs] = (wire.encode_upstream, wire.decode_upstream)
REPLIES_UP: Final[Codecs] = (wire.encode_replies_up, wire.decode_replies_up)
HOLD: Final[Codecs] = (wire.encode_hold, wire.decode_hold)
HELD: Final[Codecs] = (wire.encode_held, wire.decode_held)
INFO: Final[Codecs] = (wire.encode_info, wire.decode_info)
MANIFEST: Final[Codecs] = (wire.encode_manifest, wire.decode_manifest)


def samples() -> dict[str, tuple[Codecs, Any]]:
    """By name: how it is written and read, and the message."""
    kinds = (
        *((FRAME, message) for part in (_openings, _sweeps, _replies, _snapshots, _short) for message in part()),
        *((UPSTREAM, message) for message in (*_upstreams(), *_faults())),
        *((REPLIES_UP, message) for message in (RepliesRequest(SESSION), RepliesRequest(SESSION, BIG, 1, True))),
        *((REPLIES_UP, Pong(nonce)) for nonce in (0, 2**64 - 1)),
        *((HOLD, message) for message in (Hold(SESSION, 0), Hold(SESSION, BIG, MAX_HOLD_S), Hold(SESSION, 3, 0, True))),
        *((HELD, message) for message in (Held(False), Held(True, BIG, True, 1, 2, 3), Held(True, 7, False, 4, 0, 0))),
        *((INFO, message) for message in _infos()),
        *((MANIFEST, message) for message in _manifests()),
        *((REPLIES_UP, message) for message in _tells()),
        *((FRAME, message) for message in _structure()),
    )
    return {f"{place:03} {type(message).__name__}": (codecs, message) for place, (codecs, message) in enumerate(kinds)}


def _opens() -> Iterator[Open]:
    yield Open("", 1, 1, 1, Codec.FP32, bytes(32))
    for codec in Codec:
        yield Open("f" * 64, WORD, 8, 512, codec, bytes(range(32)))
    yield Open("ü✓" * 128, 4_096, WORD, WORD, Codec.BF16, b"\xff" * 32, (1,))
    prefix = tuple(Border(64 * place, bytes([place]) * 16) for place in range(64, 0, -1))
    yield Open("f", 4_096, 2, 3, Codec.INT8, bytes(32), (1, 2, 255, MAX_LAYERS - 1), prefix)
    yield Open("f", 4_096, 2, 3, Codec.FP16, bytes(32), (), prefix[-1:])


def _openings() -> Iterator[Attach | Reroute]:
    long = tuple(RouteHop(PeerId("x" * (1 + hop % 128)), Span(hop, hop + 1)) for hop in range(256))
    for number, wanted in enumerate(_opens()):
        yield Attach(SESSION, number, ROUTE, 1, wanted, signature=b"\x01" * 64)
        yield Reroute(number, ROUTE, wanted, signature=b"\x02" * 64)
    wanted = Open("f", 64, 4, 64, Codec.FP32, bytes(32))
    yield Attach(SESSION, BIG, ROUTE, 0, wanted, Hedge(1, C), (b"", b"r", b"\x00" * 6_144), bytes(64))
    yield Attach(SESSION, 0, long, 255, wanted, Hedge(0, C), (), bytes(64))
    yield Reroute(BIG, ROUTE[:1], wanted, Hedge(0, C), (b"one", b"two"), bytes(64))
    yield Reroute(1, long, wanted, None, (b"r" * 25,) * 257, bytes(64))


def _samplings() -> Iterator[Sampling]:
    yield Sampling()
    yield Sampling(2**64 - 1, MAX_TEMPERATURE, WORD, 1.0, 1.0, True)
    yield Sampling(1, 0.7, 1, 2.0**-20, 0.0)
    yield Sampling(5, 0.5, None, 0.9, None)
    yield Sampling(rules=PickRules())
    yield Sampling(3, rules=PickRules(BIG, 2.0, -2.0, 0.01, ((0, -100.0), (TOKEN, 100.0)), None, (0, TOKEN)))
    for kind in GRAMMAR_KINDS:
        yield Sampling(4, 1.0, rules=PickRules(7, 0.5, 0.25, 100.0, (), Grammar(kind, "ä{}"), (2,)))
    yield Sampling(4, 1.0, rules=PickRules(7, grammar=Grammar("json"), end_tokens=tuple(range(64))))


def _sweep_values() -> Iterator[Sweep]:
    ids = tuple(map(TreeNodeId, range(10, 13)))
    plain = Sweep(3, 5, ids[0], (7, 0, TOKEN), (None, ids[0], TreeNodeId(0)), ids[1])
    yield plain
    yield Sweep(0, 0, TreeNodeId(0), (), (), TreeNodeId(0))
    first = TreeNodeId(BIG - 1)
    yield Sweep(BIG, BIG, first, (1,), (TreeNodeId(BIG),), TreeNodeId(BIG), BIG, BIG, BIG, TreeNodeId(BIG))
    yield replace(plain, truncate_to=0, commit_to=TreeNodeId(0), generation=1, acked=2)
    for sampling in _samplings():
        yield replace(plain, sampling=sampling)
    for want in (Want(), Want(True, True, 20, 1_024), Want(log_probs=True, top_log_probs=1), Want(hidden_rows=True)):
        yield replace(plain, want=want)
    most = DraftDistribution(
        2, tuple(range(MAX_CANDIDATES)), (0.5,) * MAX_CANDIDATES, (MAX_CANDIDATES - 1,) * MAX_DRAWS
    )
    yield replace(plain, guesses=(DraftDistribution(0, (TOKEN,), (2.0**-100,), ()), most))


def _sweeps() -> Iterator[SweepFrame]:
    for sweep in _sweep_values():
        yield SweepFrame(sweep)
    three = next(_sweep_values())
    yield SweepFrame(three, (True, False, True), Rows(Codec.BF16, 2, 4, b""), TIMES)
    yield SweepFrame(three, (False, False, False), Rows(Codec.FP32, 0, MAX_WIDTH, b""))
    yield SweepFrame(three, None, Rows(Codec.INT8, 3, 1, b""), TIMES * 128)
    many = replace(three, tokens=tuple(range(300)), parents=(None, *map(TreeNodeId, range(10, 309))))
    yield SweepFrame(many, (True, False) * 150, Rows(Codec.FP16, 150, 64, b""))


def _replies() -> Iterator[Reply]:
    picks = ((TreeNodeId(0), 0), (TreeNodeId(BIG), TOKEN))
    yield Reply(0, 0, ())
    yield Reply(BIG, BIG, picks, TIMES)
    yield Reply(3, 1, picks, (), (-1.0, -0.0))
    yield Reply(3, 1, picks, (), (-1.0, -2.5), top_log_probs=(((1, -0.5), (2, -1.5)), ((3, 0.0), (TOKEN, -(2.0**100)))))
    yield Reply(3, 1, (), (), ())
    yield Reply(3, 1, picks, TIMES, None, (TreeNodeId(4), TreeNodeId(BIG)), Rows(Codec.FP32, 2, 8, b""))


def _snapshots() -> Iterator[Snapshot]:
    ids = (TreeNodeId(0), TreeNodeId(BIG))
    empty = Snapshot(0, 0, 0, TreeNodeId(0), Sampling(), (), (), (), (), ())
    yield empty
    two = Snapshot(2, BIG, BIG, TreeNodeId(BIG), Sampling(1, 0.5), ids, (0, TOKEN), (1, BIG), (None, TreeNodeId(0)), ())
    yield two
    yield replace(
        two, committed=1, headers=tuple(_sweep_values()), kept=(True, False), rows=Rows(Codec.BF16, 1, 4, b"")
    )
    for sampling in _samplings():
        yield replace(two, sampling=sampling)


def _faults() -> Iterator[Fault]:
    for kind in FaultKind:
        yield Fault(1, A, kind, "", "full")
    yield Fault(BIG, B, FaultKind.PROTOCOL, "f" * 256, "ü" * 1_024, A, b"\x07" * 512)
    yield Fault(0, B, FaultKind.BUSY, "", "", A, b"")


def _short() -> Iterator[Close | Ping | Fault]:
    yield from (Close(""), Close("done"), Close("x" * 1_024, dismissed=True), Ping(0), Ping(2**64 - 1))
    yield from _faults()


def _upstreams() -> Iterator[Attached | Ready | Ack | Pong]:
    yield from (Attached(0, None), Attached(BIG, 0), Attached(1, BIG))
    yield from (Ready(0, Credits(1, 1, 1)), Ready(BIG, Credits(WORD, WORD, WORD, WORD)), Ready(1, Credits(4, 3, 2, 1)))
    yield from (Ack(0), Ack(BIG, BIG, BIG), Ack(3, 17, 2), Pong(0), Pong(2**64 - 1))


def _infos() -> Iterator[NodeInfo]:
    least = NodeInfo("", "", "", "", "", 1, Span(0, 1), 1, 1, "", "", 0, 0, 0, Counters())
    yield least
    yield replace(
        least,
        name="x" * 256,
        fingerprint="ü",
        config_digest="c",
        weights_digest="w",
        tokenizer_digest="t",
        num_layers=MAX_LAYERS,
        span=Span(1, MAX_LAYERS),
        vocab_size=TOKEN + 1,
        hidden_size=MAX_WIDTH,
        numeric_class="cpu-float32",
        version="0.2.0",
        kv_tokens_total=MAX_COUNT,
        kv_tokens_free=MAX_COUNT,
        sessions=WORD,
        counters=Counters(*[MAX_COUNT] * 15),
    )
    yield replace(least, kv_tokens_total=10, kv_tokens_free=5, counters=Counters(*range(15)))


def _manifests() -> Iterator[Manifest]:
    yield Manifest.of([WeightFile("a", 0, "00" * 32)])
    files = (WeightFile(f"ü{number:03}", MAX_FILE_BYTES, f"{number:064x}") for number in range(4))
    yield Manifest.of([*files, WeightFile("y" * 255, 7, "ab" * 32)], "c0" * 20)
    yield Manifest.of([WeightFile("b", 1, "ff" * 32)], "c0" * 32)


def _tells() -> Iterator[Tell]:
    for sweep in _sweep_values():
        yield Tell(sweep.sequence, sweep.nodes, sweep.tokens, sweep.sampling, sweep.want, sweep.guesses)
    yield Tell(0, (), (), has_more=True)
    nodes = tuple(map(TreeNodeId, range(0, 3 * MAX_TELL_NODES, 3)))
    yield Tell(BIG, nodes, tuple(range(MAX_TELL_NODES)), Sampling(), has_more=True)


def _structure() -> Iterator[Attach | Reroute | SweepFrame | Snapshot]:
    """Of a session whose token ids go to the ends alone."""
    for wanted in _opens():
        yield Attach(SESSION, 1, ROUTE, 1, replace(wanted, ends_only=True), signature=b"\x01" * 64)
        yield Reroute(2, ROUTE, replace(wanted, ends_only=True), signature=b"\x02" * 64)
    three = next(_sweep_values()).structure()
    yield SweepFrame(three, (True, False, True), Rows(Codec.BF16, 2, 4, b""), TIMES)
    for snapshot in _snapshots():
        yield replace(
            snapshot, tokens=(), sampling=Sampling(), headers=tuple(one.structure() for one in snapshot.headers)
        )
    owned = Attach(SESSION, 1, ROUTE, 1, next(_opens()), signature=b"\x01" * 64, ticket=b"t", payer=b"p" * 16)
    yield replace(owned, owner=OwnerProof(b"k" * 1_024, b"s" * 512))


def main() -> None:
    """Write bytes for new samples."""
    held: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
    made = {name: encode(message).hex() for name, ((encode, _), message) in samples().items()}
    FILE.write_text(json.dumps(made | held, indent=0) + "\n")


if __name__ == "__main__":
    main()
