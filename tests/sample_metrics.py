"""A health service and a node whose metrics all have values; everything that an alert is about is wrong in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch

from node.life.metrics import NodeFigures
from node.life.report import NodeDescription, NodeSnapshot
from node.model.device import Device
from node.session.counters import ErrorKind, NodeCounters
from node.session.receipts import ReceiptBook
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeState
from swarm.health.metrics.exporter import HealthView, take_view
from swarm.health.state.overview import Overview
from swarm.health.state.probe_results import HopProbe, Probe, ReplicaComparison
from swarm.health.state.verdict import LinkState
from swarm.health.tasks.history import History
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.tasks.recorder import HealthLoop
from swarm.status.guard import TelemetryGuard
from swarm.status.messages import ServedModel, seal_body
from tests.sample_records import sample_record
from tests.telemetry_messages import NOW, identity, metrics, status, topic

WHOLE, SHAKY, TORN = (
    ServedModel(name, digit * 64, 12) for name, digit in (("whole", "a"), ("shaky", "b"), ("torn", "c"))
)
NODES = (
    (WHOLE, "QmFirst", Span(0, 6)),
    (WHOLE, "QmSecond", Span(6, 12)),
    (SHAKY, "QmThird", Span(0, 12)),
    (TORN, "QmFourth", Span(0, 4)),
)
GOOD = Probe(
    ok=True,
    tokens=32,
    ttft_ms=210.0,
    tokens_per_s=9.9,
    acceptance_length=2.1,
    sweep_ms=130.0,
    hops=(
        HopProbe(PeerId("QmFirst"), (0, 6), 25.0, 0.1, 8.0),
        HopProbe(PeerId("QmSecond"), (6, 12), 25.0, 0.2, 9.0),
    ),
    return_ms=25.0,
)
FAILED = Probe(ok=False, error="nobody answered")
SNAPSHOT = NodeSnapshot(Span(0, 4), NodeState.SERVING, "cpu-float32", ((1, 8.1),), 2, 10, 4_096, 1_000.0)


@dataclass
class SampleHealth:
    """A health service without its network; its counters grow before every scrape."""

    at: float = NOW
    guard: TelemetryGuard = field(default_factory=TelemetryGuard)
    looks: int = 0

    def __post_init__(self) -> None:
        self.overview = Overview(["/ip4/192.0.2.1/tcp/1/p2p/Qm"], "canopy", self.at, self.guard.rejected)
        self.publisher = StatePublisher()
        unused = cast("History", SimpleNamespace())
        self.health_loop = HealthLoop(self.overview, self.publisher, unused, clock=lambda: self.at + 1)
        for model, peer, span in NODES:
            served = ServedModel(model.name, model.fingerprint, model.num_layers)
            told = status(model=served, span=span, name="attic" if peer == "QmFirst" else None)
            self.overview.knowledge.apply_telemetry(PeerId(peer), model.fingerprint, told, self.at)
        self.overview.set_broker_state(LinkState.DOWN, self.at - 60)
        self.overview.set_dht_state(LinkState.OK, self.at - 60)
        self._probe()
        self.hear()

    def _probe(self) -> None:
        overview = self.overview
        overview.record_probe(WHOLE, GOOD, self.at - 5_000)
        overview.record_probe(SHAKY, FAILED, self.at)
        for _ in range(2):
            overview.record_probe(TORN, FAILED, self.at)
        overview.knowledge.record_probe(WHOLE.fingerprint, PeerId("QmFirst"), 8.0)
        overview.record_comparison(WHOLE, ReplicaComparison(PeerId("QmFirst"), (PeerId("QmSecond"),), False, 64))
        third = PeerId("QmThird")
        overview.record_comparison(SHAKY, ReplicaComparison(third, (), False, 64, named=third))
        served = ModelIdentity(WHOLE.name, WHOLE.fingerprint, "c" * 64, "w" * 64, "t" * 64, WHOLE.num_layers)
        said = {PeerId("QmFirst"): ((PeerId("QmSecond"), self.at - 60.0),), PeerId("QmSecond"): ()}
        records = [
            sample_record(PeerId(peer), model=served, span=span, refuted=said[PeerId(peer)])
            for model, peer, span in NODES
            if model is WHOLE
        ]
        overview.knowledge.apply_records(WHOLE.fingerprint, records, self.at)

    def hear(self) -> None:
        """Every node's counters grow; one message is accepted and ten forged ones are rejected."""
        self.looks += 1
        done = 100 * self.looks
        for model, peer, _ in NODES:
            body = metrics(uptime_s=100.0 + 5 * self.looks, sweeps=done, layer_tokens=10 * done)
            self.overview.knowledge.apply_telemetry(PeerId(peer), model.fingerprint, body, self.at)
        told = status(seq=self.looks, at=NOW)
        sealed = seal_body(told, topic(told), identity(0))
        self.guard.accept(topic(told), sealed, False, NOW)
        self.overview.knowledge.contributions.peers[PeerId("QmFirst")].layer_tokens = 10 * done
        for _ in range(10):
            self.guard.accept(topic(told, who=1), sealed, False, NOW)

    def look(self) -> HealthView:
        """One scrape."""
        self.hear()
        self.health_loop.step()
        return take_view(self.health_loop, self.guard, 300.0)


@dataclass
class SampleNode:
    """A node's metrics without the node; its counters grow before every scrape."""

    counters: NodeCounters = field(default_factory=NodeCounters)
    snapshot: NodeSnapshot = SNAPSHOT

    def __post_init__(self) -> None:
        model = ModelIdentity("whole", "a" * 64, "c" * 64, "w" * 64, "t" * 64, 12)
        device = Device(torch.device("cpu"))
        device.memory_bytes, device.temperature_c = (lambda: 10_000), (lambda: 61.0)  # type: ignore[method-assign]
        description = NodeDescription(model, None, device, self.counters, self.look, ReceiptBook(PeerId("QmFirst")))
        self.figures = NodeFigures(PeerId("QmFirst"), [description])

    def look(self) -> NodeSnapshot:
        """One scrape, before which one sweep waited long and ran, and one failed."""
        counters = self.counters
        counters.queue_times.add_ms(2_000.0)
        counters.compute_times.add_ms(40.0)
        counters.forwarded([15.0, 25.0])
        counters.failed(ArithmeticError("hidden states are not finite"))
        counters.sweeps += 1
        assert counters.errors_by_kind[ErrorKind.INTERNAL] == counters.errors
        return self.snapshot
