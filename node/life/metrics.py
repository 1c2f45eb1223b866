"""`/metrics` of a node (`--metrics-port`): its counters and its state now, for Prometheus.

Served from the event loop, which also writes every counter: nothing is locked, and no second thread competes with the
one that computes for Python's lock. A page is short, and is written once per second at most.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import Metric

from node.life.report import NodeDescription
from node.session.admission import OwnerClass
from node.session.counters import ErrorKind
from node.session.table import ClassHoldings
from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.base.version import VERSION
from swarm.directory.node_record import NodeState
from swarm.link.egress.streams import bracketed
from swarm.status.metric_set import MetricFamily, MetricKind, MetricSet

BACKLOG: Final = 16
FACTS: Final = ("peer", "model", "fingerprint", "layers", "device", "numeric_class", "version", "name")

ABOUT = MetricFamily("canopy_node_info", "The node; its layers are half-open, its name is empty unless one was given.",
               FACTS, MetricKind.INFO)  # fmt: skip
STATE = MetricFamily("canopy_node_state", "1 for how the node is, 0 for the other states.", ("model", "state"))
LAYERS = MetricFamily("canopy_node_layers", "Layers that the node holds, or is about to load.", ("model",))
SESSIONS = MetricFamily("canopy_node_sessions", "Open sessions.", ("model",))
KV = MetricFamily("canopy_node_kv_capacity_tokens", "KV tokens for all sessions together.", ("model",))
KV_USED = MetricFamily("canopy_node_kv_used_tokens", "KV tokens that open sessions have reserved.", ("model",))
KV_KEPT = MetricFamily(
    "canopy_node_kv_kept_tokens", "KV tokens of texts that are over, kept for those that begin alike.", ("model",)
)
WAITING = MetricFamily("canopy_node_waiting_sessions", "Sessions that wait for room.", ("model",))
OF_CLASS: Final = ("model", "class")
CLASS_OWNERS = MetricFamily("canopy_node_class_owners", "Owners of sessions, by class.", OF_CLASS)
CLASS_SESSIONS = MetricFamily("canopy_node_class_sessions", "Open sessions, by the class of their owner.", OF_CLASS)
CLASS_KV = MetricFamily("canopy_node_class_kv_tokens", "KV tokens that these have reserved.", OF_CLASS)
CLASS_ROWS = MetricFamily("canopy_node_class_rows_total", "Tree nodes that were computed, by the class of their owner.",
                          OF_CLASS, MetricKind.COUNTER)  # fmt: skip
CLASS_BYTES = MetricFamily("canopy_node_class_received_bytes_total", "Bytes of sessions, by the class of their owner.",
                           OF_CLASS, MetricKind.COUNTER)  # fmt: skip
MEMORY = MetricFamily(
    "canopy_node_device_memory_used_bytes", "Device memory in use, by all programs; absent for a CPU."
)
HEAT = MetricFamily("canopy_node_device_temperature_celsius", "Temperature of the device, where it is known.")
QUEUE = MetricFamily(
    "canopy_node_queue_seconds", "How long a sweep waited here, in queues.", ("model",), MetricKind.HISTOGRAM
)
COMPUTE = MetricFamily(
    "canopy_node_compute_seconds",
    "How long a sweep was computed here: its share, where it was not alone.",
    ("model",),
    kind=MetricKind.HISTOGRAM,
)
FORWARD = MetricFamily(
    "canopy_node_forward_seconds",
    "How long one forward took, picks included: several for a long sweep, one for several sessions.",
    ("model",),
    kind=MetricKind.HISTOGRAM,
)
ERRORS = MetricFamily("canopy_node_errors_total", "Errors in sessions, by kind.", ("model", "kind"), MetricKind.COUNTER)
BUSY = MetricFamily(
    "canopy_node_busy_seconds_total", "Time in which the node computed.", ("model",), kind=MetricKind.COUNTER
)
REPLAYED = MetricFamily(
    "canopy_node_restore_compute_seconds_total", "Computing of restored sessions.", ("model",), kind=MetricKind.COUNTER
)

TOTALS: Final[Mapping[str, MetricFamily]] = {
    name: MetricFamily(f"canopy_node_{metric}_total", text, ("model",), MetricKind.COUNTER)
    for name, metric, text in (
        ("sweeps", "sweeps", "Sweeps that were run."),
        ("frames_in", "received_sweeps", "Sweeps that arrived, those run before included."),
        ("frames_out", "sent_sweeps", "Sweeps that were sent on or answered."),
        ("tree_nodes", "tree_nodes", "Tree nodes that were computed."),
        ("pruned_nodes", "pruned_tree_nodes", "Tree nodes that were skipped: a later commit had ruled them out."),
        ("tokens", "committed_tokens", "Tree nodes that became committed."),
        ("kept_tokens", "kept_tokens", "Tokens with which sessions began, which were not computed again."),
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
    *(
        ABOUT,
        STATE,
        LAYERS,
        SESSIONS,
        KV,
        KV_USED,
        KV_KEPT,
        MEMORY,
        HEAT,
        QUEUE,
        COMPUTE,
        FORWARD,
        ERRORS,
        BUSY,
        REPLAYED,
    ),
    *(WAITING, CLASS_OWNERS, CLASS_SESSIONS, CLASS_KV, CLASS_ROWS, CLASS_BYTES),
    *TOTALS.values(),
)


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """A machine's metrics; `collect` reads them as they are now.

    Attributes:
        descriptions: of the node of each model that it serves; more come while it starts.
    """

    peer: PeerId
    descriptions: Sequence[NodeDescription]

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        sheet, device = MetricSet(FIGURES), self.descriptions[0].device
        sheet.set(MEMORY, device.memory_bytes())
        sheet.set(HEAT, device.temperature_c())
        for description in self.descriptions:
            self._set_model(sheet, description)
        return sheet.collect()

    def _set_model(self, sheet: MetricSet, description: NodeDescription) -> None:
        snapshot, counters, model = description.look(), description.counters, description.model
        own = (self.peer, model.name, model.fingerprint, str(snapshot.span))
        facts = (description.device.name, snapshot.numeric_class, VERSION, description.name or "")
        sheet.set_info(ABOUT, dict(zip(FACTS, (*own, *facts), strict=True)))
        sheet.set_state(STATE, NodeState, snapshot.state, model.name)
        sheet.set(LAYERS, len(snapshot.span), model.name)
        sheet.set(SESSIONS, snapshot.sessions, model.name)
        sheet.set(KV, snapshot.kv_tokens_total, model.name)
        sheet.set(KV_USED, snapshot.kv_tokens_total - snapshot.kv_tokens_free, model.name)
        sheet.set_histogram(QUEUE, counters.queue_times, model.name)
        sheet.set_histogram(COMPUTE, counters.compute_times, model.name)
        sheet.set_histogram(FORWARD, counters.forward_times, model.name)
        for kind in ErrorKind:
            sheet.set(ERRORS, counters.errors_by_kind[kind], model.name, kind.value)
        sheet.set(BUSY, snapshot.worked_ms / 1e3, model.name)
        sheet.set(REPLAYED, counters.replay_us / 1e6, model.name)
        sheet.set(KV_KEPT, snapshot.kv_tokens_kept, model.name)
        sheet.set(WAITING, snapshot.waiting, model.name)
        for owners in OwnerClass:
            held, one = snapshot.held.get(owners, ClassHoldings()), (model.name, owners.value)
            sheet.set(CLASS_OWNERS, held.owners, *one)
            sheet.set(CLASS_SESSIONS, held.sessions, *one)
            sheet.set(CLASS_KV, held.kv_tokens, *one)
            sheet.set(CLASS_ROWS, counters.rows_by_class[owners], *one)
            sheet.set(CLASS_BYTES, counters.bytes_in_by_class[owners], *one)
        for name, figure in TOTALS.items():
            sheet.set(figure, getattr(counters, name), model.name)


@contextmanager
def listening(host: str, port: int | None) -> Iterator[socket.socket | None]:
    """Take the port before anything slow; None without `--metrics-port`.

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

    from swarm.status.http import Guarded, MetricsPage, make_server

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
