"""`/metrics` of a node (`--metrics-port`): what its counters and its scene say, for Prometheus.

Served from the event loop, which also writes every counter: nothing is locked, and no second thread competes with the
one that computes for Python's lock, of which a switch takes up to 5 ms. A page has some hundred and fifty lines and is
written in about two milliseconds, once per second at most.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from prometheus_client.metrics_core import Metric

from node.telemetry.counters import ErrorKind
from node.telemetry.report import NodeDescription
from swarm.discovery.node_record import NodeState, bracketed
from swarm.errors import ConfigError
from swarm.ids import PeerId
from swarm.metrics.metric_set import MetricFamily, MetricKind, MetricSet
from swarm.runtime.tasks import TaskScope

BACKLOG: Final = 16
FACTS: Final = ("peer", "model", "fingerprint", "layers", "device", "numeric_class", "version", "name")

ABOUT = MetricFamily("canopy_node_info", "The node; its layers are half-open, its name is empty unless one was given.",
               FACTS, MetricKind.INFO)  # fmt: skip
STATE = MetricFamily("canopy_node_state", "1 for how the node is, 0 for the other states.", ("state",))
LAYERS = MetricFamily("canopy_node_layers", "Layers that the node holds, or is about to load.")
SESSIONS = MetricFamily("canopy_node_sessions", "Open sessions.")
KV = MetricFamily("canopy_node_kv_capacity_tokens", "KV tokens for all sessions together.")
KV_USED = MetricFamily("canopy_node_kv_used_tokens", "KV tokens that open sessions have reserved.")
MEMORY = MetricFamily(
    "canopy_node_device_memory_used_bytes", "Device memory in use, by all programs; absent for a CPU."
)
HEAT = MetricFamily("canopy_node_device_temperature_celsius", "Temperature of the device, where it is known.")
QUEUE = MetricFamily("canopy_node_queue_seconds", "How long a sweep waited here, in queues.", kind=MetricKind.HISTOGRAM)
COMPUTE = MetricFamily(
    "canopy_node_compute_seconds",
    "How long a sweep was computed here: its share, where it was not alone.",
    kind=MetricKind.HISTOGRAM,
)
FORWARD = MetricFamily(
    "canopy_node_forward_seconds",
    "How long one forward took, picks included: several for a long sweep, one for several sessions.",
    kind=MetricKind.HISTOGRAM,
)
ERRORS = MetricFamily("canopy_node_errors_total", "Errors in sessions, by kind.", ("kind",), MetricKind.COUNTER)
BUSY = MetricFamily("canopy_node_busy_seconds_total", "Time in which the node computed.", kind=MetricKind.COUNTER)
REPLAYED = MetricFamily(
    "canopy_node_restore_compute_seconds_total", "Computing of restored sessions.", kind=MetricKind.COUNTER
)

TOTALS: Final[Mapping[str, MetricFamily]] = {
    name: MetricFamily(f"canopy_node_{metric}_total", text, kind=MetricKind.COUNTER)
    for name, metric, text in (
        ("sweeps", "sweeps", "Sweeps that were run."),
        ("frames_in", "received_sweeps", "Sweeps that arrived, those run before included."),
        ("frames_out", "sent_sweeps", "Sweeps that were sent on or answered."),
        ("tree_nodes", "tree_nodes", "Tree nodes that were computed."),
        ("pruned_nodes", "pruned_tree_nodes", "Tree nodes that were skipped: a later commit had ruled them out."),
        ("tokens", "committed_tokens", "Tree nodes that became committed."),
        ("layer_tokens", "layer_tokens", "Committed tokens times the layers that computed them."),
        ("bytes_in", "received_bytes", "Bytes from upstream neighbours."),
        ("bytes_out", "sent_bytes", "Bytes to the next hop, back upstream, and to clients."),
        ("replays", "replays", "Sessions sent again to a new next hop."),
        ("catch_ups", "catch_up_sweeps", "Sweeps sent again to a next hop that lacked them."),
        ("restores", "restores", "Snapshots of sessions taken over."),
        ("restored_nodes", "restored_tree_nodes", "Tokens and tree nodes in those snapshots."),
        ("doubles", "double_sweeps", "Sweeps that a replica had brought already."),
        ("differences", "differing_sweeps", "Sweeps in which replicas computed different rows."),
    )
}

FIGURES: Final = (
    *(ABOUT, STATE, LAYERS, SESSIONS, KV, KV_USED, MEMORY, HEAT, QUEUE, COMPUTE, FORWARD, ERRORS, BUSY, REPLAYED),
    *TOTALS.values(),
)


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """A node's figures; `collect` reads them as they stand."""

    peer: PeerId
    subject: NodeDescription

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        sheet, subject, tally = MetricSet(FIGURES), self.subject, self.subject.tally
        scene = subject.look()
        model = subject.model
        own = (self.peer, model.name, model.fingerprint, str(scene.span))
        facts = (subject.device.name, scene.numeric_class, version("canopy-swarm"), subject.name or "")
        sheet.set_info(ABOUT, dict(zip(FACTS, (*own, *facts), strict=True)))
        sheet.set_state(STATE, NodeState, scene.state)
        sheet.set(LAYERS, len(scene.span))
        sheet.set(SESSIONS, scene.sessions)
        sheet.set(KV, scene.kv_tokens_total)
        sheet.set(KV_USED, scene.kv_tokens_total - scene.kv_tokens_free)
        sheet.set(MEMORY, subject.device.memory_bytes())
        sheet.set(HEAT, subject.device.temperature_c())
        sheet.set_histogram(QUEUE, tally.queue_times)
        sheet.set_histogram(COMPUTE, tally.compute_times)
        sheet.set_histogram(FORWARD, tally.forward_times)
        for kind in ErrorKind:
            sheet.set(ERRORS, tally.errors_by_kind[kind], kind.value)
        sheet.set(BUSY, scene.worked_ms / 1e3)
        sheet.set(REPLAYED, tally.replay_us / 1e6)
        for name, figure in TOTALS.items():
            sheet.set(figure, getattr(tally, name))
        return sheet.collect()


@contextmanager
def listening(host: str, port: int | None) -> Iterator[socket.socket | None]:
    """Take the port before anything slow; None where no metrics are wanted.

    Raises:
        ConfigError: it is taken, or the address is not this machine's.
    """
    if port is None:
        yield None
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        taken = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--metrics-port {port} of {host} cannot be opened ({error}); choose another") from error
    with taken:
        yield taken


@asynccontextmanager
async def serving_metrics(
    taken: socket.socket | None, figures: NodeFigures, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Answer scrapes on a socket that listens, for as long as the block lasts."""
    if taken is None:
        yield
        return
    from starlette.applications import Starlette  # a node without metrics needs no web server

    from swarm.metrics.http import Guarded, make_server
    from swarm.metrics.page import MetricsPage

    page = MetricsPage(lambda: figures, in_thread=False)
    server = make_server(Guarded(Starlette(routes=[page.route()])))

    async def serve() -> None:
        await server.serve(sockets=[taken])

    host, port = taken.getsockname()[:2]
    async with TaskScope() as scope:
        task = scope.spawn(serve(), "metrics")
        say(f"metrics at http://{bracketed(host)}:{port}/metrics")
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait([task])
