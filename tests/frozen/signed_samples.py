"""Samples of everything that a node signs of itself: records, pointers, telemetry. `signed.json` holds their bytes.

`python -m tests.frozen.signed_samples` writes bytes for samples that have none yet; it changes no others.
"""

from __future__ import annotations

import json
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.base.ids import ModelIdentity, PeerId, SwarmId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import ModelPointer, open_pointer, seal_pointer
from swarm.directory.node_record import NodeRecord, NodeState, Reach, open_sealed, seal, unseal
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import RouteHop
from swarm.protocol.succession import seal_succession
from swarm.status.messages import (
    Body,
    Event,
    EventKind,
    Metrics,
    Presence,
    Receipts,
    RefutedPart,
    ServedModel,
    Stamp,
    Status,
    Will,
    open_payload,
    part_of,
    seal_body,
    topic_of,
)
from swarm.trust.receipt import Receipt
from swarm.trust.receipt import seal as seal_receipt
from tests.frozen.reading import NOW, releases

FILE: Final = Path(__file__).parent / "signed.json"
OTHER: Final = PeerId("Qm" + "a" * 44)
SWARM: Final = SwarmId(bytes(range(16)))
MODEL: Final = ModelIdentity.of("org/demo:Q4_K_M.gguf", "b2" * 32, "c3" * 32, "d4" * 32, 40)
FRESH: Final = Stamp("0f" * 16, 1, NOW)
BIG: Final = 2**53

Sample = tuple[bytes, Callable[[bytes], Any], Any]
"""Bytes as this program writes them, what reads them, and the value."""


@cache
def signer() -> Identity:
    """The identity of the first frozen release: its signatures are the same each time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "identity"
        path.write_bytes(releases()[0].data("identity"))
        path.chmod(0o400)
        return Identity.load_or_create(path)


def records() -> Iterator[tuple[str, NodeRecord]]:
    """Records."""
    me = signer().peer_id
    bare = NodeRecord(
        me, MODEL, Span(0, 20), "192.0.2.7:5000", NodeState.SERVING, "cpu-float32", "0.2.0", None, (), 0, 0, 0, NOW + 60
    )
    certificate = unseal(releases()[0].data("directory", "bytes", "record"), NOW).certificate
    full = replace(
        bare,
        span=Span(39, 40),
        address=f"{me}.via.[2001:db8::7]:65535",
        state=NodeState.JOINING,
        name="Größe ✓",
        sweep_ms=((1, 0.01), (8, 4.0), (4_096, 1e6)),
        kv_tokens_free=2**40,
        kv_tokens_total=2**40,
        sequence=BIG,
        expires_at=NOW + 59.125,
        delays_ms=((OTHER, 12.5), (me, 0.0)),
        busy=1.0,
        uplink_mbit_per_s=20.5,
        row_bytes=2**20,
        movable=True,
        certificate=certificate,
        reach=Reach.RELAYED,
        bucketed=True,
        aux_rows=True,
        swarm=SWARM,
    )
    yield "bare", bare
    yield "full", full
    yield "last", replace(full, left=True)
    yield "refuting", replace(bare, refuted=((OTHER, NOW - 0.125), (me, 0.0)))
    yield "mapped", replace(bare, state=NodeState.DRAINING, reach=Reach.MAPPED, sweep_ms=((2, 5.0), (4, 3.0)))


def bodies() -> Iterator[tuple[str, Body]]:
    """Telemetry messages."""
    model = ServedModel(MODEL.name, MODEL.fingerprint, MODEL.num_layers)
    bare = Status(FRESH, True, model, Span(0, 40), Presence.JOINING, "cpu", "cpu-float32", "0.2.0", None, NOW - 0.5, 0)
    late = Stamp("ab" * 32, BIG, NOW + 0.125)
    yield "birth", bare
    yield (
        "status",
        replace(bare, stamp=late, is_birth=False, state=Presence.LEFT, name="Grüße", ttl_s=600.0, path="plain"),
    )
    yield "will", Will(replace(FRESH, seq=0))
    counts = Metrics(FRESH, 0.0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0, ())
    yield "metrics", counts
    yield (
        "full metrics",
        replace(
            counts,
            uptime_s=100.5,
            sweeps=BIG,
            busy=0.25,
            queue_ms=0.1,
            compute_ms=1e7,
            kv_tokens_free=100,
            kv_tokens_total=4_096,
            sessions=2,
            sweep_ms=((1, 0.0), (64, 20.125), (4_096, 1e7)),
            device_memory_bytes=2**34,
            device_temperature_c=-273.15,
        ),
    )
    part = RefutedPart(OTHER, Span(4, 8), "cpu-float32", "rows", (0, BIG), 1e9, 1e-5, "e5" * 32)
    yield "refuted part", Event(late, EventKind.REFUTED, "it differs", part)
    key = SessionKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    hops = (RouteHop(signer().peer_id, Span(0, 20)), RouteHop(OTHER, Span(20, 40)))
    receipt = Receipt(key.public_key, MODEL.fingerprint, hops, 7, BIG, int(NOW) - 60, int(NOW))
    succession = seal_succession(signer().public_key, signer().sign, OTHER)
    yield "receipts", Receipts(late, (seal_receipt(receipt, key),), (succession,))
    for kind in EventKind:
        yield f"event {kind}", Event(late, kind, 'layers 0…3 of 12 \\ "<b>')


def samples() -> Iterator[tuple[str, Sample]]:
    """Every sample by its name."""
    me = signer()
    for name, record in records():
        sealed = seal(record, me)
        yield f"record {name}", (sealed, lambda data: open_sealed(data, NOW), record)
    for name, pointer in (
        ("bare", ModelPointer(me.peer_id, MODEL, NOW + 60)),
        ("full", ModelPointer(me.peer_id, MODEL, NOW + 0.5, SWARM, left=True)),
    ):
        yield f"pointer {name}", (seal_pointer(pointer, me), lambda data: open_pointer(data, NOW), pointer)
    for name, body in bodies():
        yield f"telemetry {name}", (seal_body(body, _topic(body), me), _opened(_topic(body)), body)


def _topic(body: Body) -> str:
    return topic_of("canopy", MODEL.fingerprint, signer().peer_id, part_of(body))


def _opened(topic: str) -> Callable[[bytes], Body]:
    return lambda data: open_payload("canopy", topic, data).body


def main() -> None:
    """Write bytes of new samples."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    new = {name: b64encode(sample[0]).decode() for name, sample in samples() if name not in kept}
    FILE.write_text(json.dumps(kept | new, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
