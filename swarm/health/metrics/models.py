"""Metrics of models, their layers, probes and nodes. Pure: assessments in, values out.

Anybody may join a public swarm, so what a page holds is bounded: `MAX_NODES` nodes, `MAX_LAYERS` layers and `MAX_HOPS`
hops in all, the models with most machines first, their nodes by peer id. What is beyond is counted, not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from swarm.health.state.contributions import Totals
from swarm.health.state.node import Condition, NodeView, by_condition
from swarm.health.state.probe_results import HopProbe, ProbeLog
from swarm.health.state.verdict import Assessment, Grade
from swarm.status.metric_set import MetricFamily, MetricKind, MetricSet

MAX_NODES: Final = 200
MAX_LAYERS: Final = 1_024
MAX_HOPS: Final = 128

OF_MODEL: Final = ("model", "fingerprint")
OF_NODE: Final = (*OF_MODEL, "peer")
NODE_FACTS: Final = ("layers", "device", "numeric_class", "version", "name", "source")

VERDICT = MetricFamily(
    "canopy_model_verdict", "1 for what the model is, 0 for the other verdicts.", (*OF_MODEL, "verdict")
)
VERDICT_AT = MetricFamily(
    "canopy_model_verdict_changed_timestamp_seconds", "When the verdict became what it is.", OF_MODEL
)
LAYERS = MetricFamily("canopy_model_layers", "Layers that the model has.", OF_MODEL)
MISSING = MetricFamily("canopy_model_layers_missing", "Layers that no machine serves.", OF_MODEL)
FEWEST = MetricFamily("canopy_model_layer_machines_min", "Serving machines of the layer that has fewest.", OF_MODEL)
MARGIN = MetricFamily(
    "canopy_model_margin_machines", "Machines that may go, any ones, before no chain covers the model.", OF_MODEL
)
MACHINES = MetricFamily(
    "canopy_model_machines", "Machines that hold layers of the model, by state.", (*OF_MODEL, "state")
)
HOLDERS = MetricFamily(
    "canopy_model_layer_machines", "Serving machines of one layer (0 is the first).", (*OF_MODEL, "layer")
)
SWEEPS = MetricFamily(
    "canopy_model_sweeps_total",
    "Sweeps through the whole model: those that nodes report, each by the part of the layers that the node holds.",
    OF_MODEL,
    MetricKind.COUNTER,
)
LAYER_TOKENS = MetricFamily(
    "canopy_model_layer_tokens_total",
    "Committed tokens times layers, as nodes report them.",
    OF_MODEL,
    MetricKind.COUNTER,
)
PROBE_OK = MetricFamily("canopy_model_probe_success", "1 if the last probe made its tokens, 0 if it failed.", OF_MODEL)
PROBE_AT = MetricFamily("canopy_model_probe_timestamp_seconds", "When the last probe ended.", OF_MODEL)
PROBE_FAILURES = MetricFamily("canopy_model_probe_failures", "Probes that failed in a row, up to now.", OF_MODEL)
PROBE_BLOCKED = MetricFamily(
    "canopy_model_probe_blocked", "1 if the newest probe could not be made, which says nothing of the swarm.", OF_MODEL
)
FIRST_TOKEN = MetricFamily("canopy_model_probe_first_token_seconds", "Last probe: time to the first token.", OF_MODEL)
SPEED = MetricFamily("canopy_model_probe_tokens_per_second", "Last probe: tokens a second after the first.", OF_MODEL)
ACCEPTED = MetricFamily(
    "canopy_model_probe_acceptance_length", "Last probe: tokens a sweep; plain decoding has 1.", OF_MODEL
)
SWEEP_TIME = MetricFamily("canopy_model_probe_sweep_seconds", "Last probe: median time of a sweep.", OF_MODEL)
HOP_TIME = MetricFamily(
    "canopy_model_probe_hop_seconds",
    "Last probe: median time at one hop of its chain (0 is the first), by part: link (one way), queue, compute.",
    (*OF_MODEL, "hop", "part"),
)
RETURN_TIME = MetricFamily(
    "canopy_model_probe_return_seconds", "Last probe: one way from the tail to the prober.", OF_MODEL
)

NODE = MetricFamily(
    "canopy_model_node_info", "A node; its layers are half-open, its name is empty unless it gave one.",
    (*OF_NODE, *NODE_FACTS), MetricKind.INFO,
)  # fmt: skip
NODE_STATE = MetricFamily(
    "canopy_model_node_state", "1 for how the node is, 0 for the other states.", (*OF_NODE, "state")
)
NODE_SEEN = MetricFamily(
    "canopy_model_node_seen_timestamp_seconds", "When anything was last heard of the node.", OF_NODE
)
NODE_BUSY = MetricFamily(
    "canopy_model_node_busy_ratio", "Part of the time in which the node computes, as it says.", OF_NODE
)
NODE_KV = MetricFamily("canopy_model_node_kv_capacity_tokens", "KV tokens that the node has, as it says.", OF_NODE)
NODE_KV_FREE = MetricFamily("canopy_model_node_kv_free_tokens", "KV tokens that a new session could take.", OF_NODE)
NODE_SWEEPS = MetricFamily(
    "canopy_model_node_sweeps_per_second", "Sweeps a second between its last two metrics.", OF_NODE
)
NODE_LAYER_TOKENS = MetricFamily(
    "canopy_model_node_layer_tokens_total", "Committed tokens times layers in this run, as the node says.",
    OF_NODE, MetricKind.COUNTER,
)  # fmt: skip
NODE_PROBED = MetricFamily(
    "canopy_model_node_probed_compute_seconds", "Compute per sweep, as a probe measured it.", OF_NODE
)
NODE_AGREES = MetricFamily(
    "canopy_model_node_agrees", "1 if its work was another holder's, 0 if not, absent if nobody compared.", OF_NODE
)
NODE_NAMED = MetricFamily(
    "canopy_model_node_named", "1 if an audit found it to differ from two other holders of its layers, else 0.", OF_NODE
)
NODE_REFUTERS = MetricFamily(
    "canopy_model_node_refuters", "Nodes whose records say that they computed its work again and found it wrong.",
    OF_NODE,
)  # fmt: skip
LEFT_OUT = MetricFamily("canopy_health_left_out", "What this page leaves out, to stay within its bounds.", ("what",))

FIGURES: Final = (
    VERDICT, VERDICT_AT, LAYERS, MISSING, FEWEST, MARGIN, MACHINES, HOLDERS, SWEEPS, LAYER_TOKENS,
    PROBE_OK, PROBE_AT, PROBE_FAILURES, PROBE_BLOCKED, FIRST_TOKEN, SPEED, ACCEPTED, SWEEP_TIME, HOP_TIME, RETURN_TIME,
    NODE, NODE_STATE, NODE_SEEN, NODE_BUSY, NODE_KV, NODE_KV_FREE, NODE_SWEEPS, NODE_LAYER_TOKENS, NODE_PROBED,
    NODE_AGREES, NODE_NAMED, NODE_REFUTERS, LEFT_OUT,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model at the time of a scrape."""

    assessment: Assessment
    log: ProbeLog
    totals: Totals


def write_models(sheet: MetricSet, views: Sequence[ModelView]) -> None:
    """Write every model, and of layers, nodes and hops as many as fit."""
    ranked = sorted(views, key=lambda one: (-sum(_serving(one)), one.assessment.model.fingerprint))
    for view in ranked:
        _write_model(sheet, view)
        _write_probe(sheet, view)
    shown = {
        "layers": _write_layers(sheet, ranked),
        "nodes": _write_nodes(sheet, ranked),
        "hops": _write_hops(sheet, ranked),
    }
    there = {
        "layers": sum(len(view.assessment.verdict.replicas) for view in ranked),
        "nodes": sum(len(view.assessment.nodes) for view in ranked),
        "hops": sum(len(_hops(view)) for view in ranked),
    }
    for what, count in there.items():
        sheet.set(LEFT_OUT, count - shown[what], what)


def names(view: ModelView) -> tuple[str, str]:
    """The labels of all metrics of a model."""
    model = view.assessment.model
    return _plain(model.name), model.fingerprint


def _serving(view: ModelView) -> list[bool]:
    return [node.condition is Condition.SERVING for node in view.assessment.nodes]


def _write_model(sheet: MetricSet, view: ModelView) -> None:
    own, verdict, one = names(view), view.assessment.verdict, view.assessment
    sheet.set_state(VERDICT, Grade, verdict.grade, *own)
    sheet.set(VERDICT_AT, one.since, *own)
    sheet.set(LAYERS, one.model.num_layers, *own)
    sheet.set(MISSING, sum(map(len, verdict.missing)), *own)
    sheet.set(FEWEST, min(verdict.replicas, default=0), *own)
    sheet.set(MARGIN, verdict.margin, *own)
    counts = by_condition(one.nodes)
    for condition in Condition:
        sheet.set(MACHINES, counts.get(condition, 0), *own, condition.value)
    sheet.set(SWEEPS, view.totals.sweeps, *own)
    sheet.set(LAYER_TOKENS, view.totals.layer_tokens, *own)


def _write_probe(sheet: MetricSet, view: ModelView) -> None:
    own, log, probe = names(view), view.log, view.log.last
    sheet.set(PROBE_FAILURES, log.failures, *own)
    sheet.set(PROBE_BLOCKED, float(log.trouble is not None), *own)
    if probe is None:
        return
    sheet.set(PROBE_OK, float(bool(probe.ok)), *own)
    sheet.set(PROBE_AT, log.last_at, *own)
    sheet.set(FIRST_TOKEN, _seconds(probe.ttft_ms), *own)
    sheet.set(SPEED, probe.tokens_per_s, *own)
    sheet.set(ACCEPTED, probe.acceptance_length, *own)
    sheet.set(SWEEP_TIME, _seconds(probe.sweep_ms), *own)
    sheet.set(RETURN_TIME, _seconds(probe.return_ms), *own)


def _write_layers(sheet: MetricSet, views: Sequence[ModelView]) -> int:
    pairs = ((view, layer) for view in views for layer in range(len(view.assessment.verdict.replicas)))
    shown = 0
    for view, layer in islice(pairs, MAX_LAYERS):
        sheet.set(HOLDERS, view.assessment.verdict.replicas[layer], *names(view), str(layer))
        shown += 1
    return shown


def _write_hops(sheet: MetricSet, views: Sequence[ModelView]) -> int:
    pairs = ((view, number, hop) for view in views for number, hop in enumerate(_hops(view)))
    shown = 0
    for view, number, hop in islice(pairs, MAX_HOPS):
        parts: Mapping[str, float] = {"link": hop.link_ms, "queue": hop.queue_ms, "compute": hop.compute_ms}
        for part, taken_ms in parts.items():
            sheet.set(HOP_TIME, taken_ms / 1e3, *names(view), str(number), part)
        shown += 1
    return shown


def _hops(view: ModelView) -> Sequence[HopProbe]:
    probe = view.log.last
    return () if probe is None else probe.hops


def _write_nodes(sheet: MetricSet, views: Sequence[ModelView]) -> int:
    pairs = (
        (names(view), node) for view in views for node in sorted(view.assessment.nodes, key=lambda node: node.peer)
    )
    shown = 0
    for own, node in islice(pairs, MAX_NODES):
        _write_node(sheet, (*own, node.peer), node)
        shown += 1
    return shown


def _write_node(sheet: MetricSet, own: tuple[str, str, str], node: NodeView) -> None:
    facts = (str(node.span), node.device or "", node.numeric_class, node.version, node.name or "", node.source.value)
    labels = (*own, *map(_plain, facts))
    sheet.set_info(NODE, dict(zip(NODE.labels, labels, strict=True)))
    sheet.set_state(NODE_STATE, Condition, node.condition, *own)
    sheet.set(NODE_SEEN, node.seen_at, *own)
    sheet.set(NODE_BUSY, node.busy, *own)
    sheet.set(NODE_KV, node.kv_tokens_total, *own)
    sheet.set(NODE_KV_FREE, node.kv_tokens_free, *own)
    sheet.set(NODE_SWEEPS, node.sweeps_per_s, *own)
    sheet.set(NODE_LAYER_TOKENS, node.layer_tokens, *own)
    sheet.set(NODE_PROBED, _seconds(node.probed_ms), *own)
    sheet.set(NODE_AGREES, None if node.agrees is None else float(node.agrees), *own)
    sheet.set(NODE_NAMED, float(node.is_named), *own)
    sheet.set(NODE_REFUTERS, len(node.refuted), *own)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _plain(text: str) -> str:
    """The text as UTF-8 can hold it: half a surrogate pair would break the whole page."""
    return text.encode("utf-8", "replace").decode()
