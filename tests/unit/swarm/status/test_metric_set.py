"""What Prometheus is told: values, bounds, names, and the document that lists them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import client.api.command
import node.life.metrics
import swarm.health.metrics.exporter
from node.session.counters import ErrorKind
from swarm.base import errors
from swarm.base.histogram import BOUNDS_S, Histogram
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.health.metrics.models import MAX_LAYERS, MAX_NODES
from swarm.health.state.contributions import MAX_SWEEPS_PER_S, TotalsBook
from swarm.health.state.node import Condition
from swarm.status.messages import ServedModel
from swarm.status.metric_set import MetricFamily, MetricKind, MetricSet
from tests.sample_metrics import SHAKY, TORN, WHOLE, SampleHealth, SampleNode
from tests.telemetry_messages import NOW, metrics, status

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "metrics.md"
Collected = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(families: Iterable[Metric]) -> Collected:
    """Every sample by name and labels; no two may be the same."""
    found: Collected = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Collected, name: str, **labels: str) -> float:
    """The only sample of that name with these labels, whatever its others are."""
    (one,) = [number for (called, has), number in found.items() if called == name and set(labels.items()) <= has]
    return one


@pytest.fixture(scope="module")
def health() -> Collected:
    return samples(SampleHealth().look().collect())


def test_a_models_state_is_one_series_per_verdict(health: Collected) -> None:
    for model, verdict in ((WHOLE, "serving"), (SHAKY, "degraded"), (TORN, "broken")):
        shown = {one: value(health, "canopy_model_verdict", model=model.name, verdict=one) for one in
                 ("serving", "degraded", "broken")}  # fmt: skip
        assert shown == {one: float(one == verdict) for one in shown}
        assert value(health, "canopy_model_layers", fingerprint=model.fingerprint) == 12
    assert value(health, "canopy_model_layers_missing", model="torn") == 8
    assert value(health, "canopy_model_layer_machines_min", model="torn") == 0
    assert value(health, "canopy_model_layer_machines_min", model="whole") == 1
    assert value(health, "canopy_model_layer_machines", model="torn", layer="3") == 1
    assert value(health, "canopy_model_layer_machines", model="torn", layer="4") == 0
    assert value(health, "canopy_model_machines", model="whole", state="serving") == 2
    assert value(health, "canopy_model_machines", model="whole", state="offline") == 0


def test_probes_are_in_seconds_and_say_nothing_that_is_not_known(health: Collected) -> None:
    assert value(health, "canopy_model_probe_first_token_seconds", model="whole") == 0.21
    assert value(health, "canopy_model_probe_hop_seconds", model="whole", hop="1", part="compute") == 0.009
    assert value(health, "canopy_model_probe_success", model="whole") == 1
    assert value(health, "canopy_model_probe_success", model="torn") == 0
    assert value(health, "canopy_model_probe_failures", model="torn") == 2
    assert ("canopy_model_probe_first_token_seconds", "torn") not in {
        (name, dict(labels).get("model")) for name, labels in health
    }


def test_the_services_own_figures(health: Collected) -> None:
    assert value(health, "canopy_health_source_state", source="broker", state="down") == 1
    assert value(health, "canopy_health_source_state", source="dht", state="ok") == 1
    assert value(health, "canopy_health_telemetry_accepted_total", part="status") == 2
    assert value(health, "canopy_health_telemetry_refused_total", reason="forged") == 20
    assert value(health, "canopy_health_telemetry_refused_total", reason="flood") == 0
    assert (
        value(health, "canopy_health_alerts", kind="probe", severity="critical") == 1
    )  # nobody vouches for the torn one
    assert sum(number for (name, _), number in health.items() if name == "canopy_health_left_out") == 0


def test_a_node_is_described_and_measured(health: Collected) -> None:
    facts = next(dict(has) for name, has in health if name == "canopy_model_node_info" and ("peer", "QmFirst") in has)
    assert (facts["layers"], facts["name"], facts["source"]) == ("0-6", "attic", "mqtt")
    assert value(health, "canopy_model_node_state", peer="QmFirst", state="serving") == 1
    assert value(health, "canopy_model_node_agrees", peer="QmSecond") == 0
    assert value(health, "canopy_model_node_probed_compute_seconds", peer="QmFirst") == 0.008
    assert value(health, "canopy_model_node_sweeps_per_second", peer="QmThird") == 20


def test_a_nodes_own_page() -> None:
    one = SampleNode()
    one.counters.bytes_in = 7
    one.counters.failed(errors.RemoteProtocolError("rows", "are not finite"))
    one.counters.errors_by_kind[ErrorKind.PROTOCOL] -= 1
    one.counters.errors -= 1
    found = samples(one.figures.collect())
    assert value(found, "canopy_node_received_bytes_total") == 7
    assert value(found, "canopy_node_kv_used_tokens") == 4_086
    assert value(found, "canopy_node_busy_seconds_total") == 1.0
    assert value(found, "canopy_node_errors_total", kind="internal") == 1
    assert value(found, "canopy_node_errors_total", kind="protocol") == 0
    assert value(found, "canopy_node_queue_seconds_count") == 1
    assert value(found, "canopy_node_forward_seconds_sum") == pytest.approx(0.04)
    assert value(found, "canopy_node_forward_seconds_bucket", le="0.025") == 2
    assert value(found, "canopy_node_state", state="serving") == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.Busy(PeerId("Qm"), "0-4", "full"), ErrorKind.BUSY),
        (errors.Unreachable(PeerId("Qm"), "0-4", "gone"), ErrorKind.HOP),
        (errors.RemoteProtocolError("rows", "bad"), ErrorKind.PROTOCOL),
        (errors.LocalProtocolError("rows", "bad"), ErrorKind.INTERNAL),
        (errors.ContextFull("full"), ErrorKind.SESSION),
        (errors.ModelMismatch("other"), ErrorKind.REFUSED),
        (ZeroDivisionError(), ErrorKind.INTERNAL),
    ],
)
def test_errors_have_kinds(error: Exception, kind: ErrorKind) -> None:
    assert ErrorKind.of(error) is kind


def crowd(models: int, nodes: int, layers: int) -> SampleHealth:
    """A public swarm that is far beyond the bounds."""
    health = SampleHealth()
    for number in range(nodes):
        model = ServedModel(f"crowded {number % models}", f"{number % models:064x}", layers)
        start = number * 7 % (layers - 8)
        told = status(model=model, span=Span(start, start + 8))
        peer = PeerId(f"QmPeer{number:040d}")
        health.overview.knowledge.apply_telemetry(peer, model.fingerprint, told, NOW)
        health.overview.knowledge.apply_telemetry(peer, model.fingerprint, metrics(), NOW)
    return health


def test_a_thousand_nodes_are_bounded_told_and_quick() -> None:
    view = crowd(models=8, nodes=1_000, layers=400).look()
    found = samples(view.collect())
    names = [name for name, _ in found]
    assert names.count("canopy_model_node_busy_ratio") == MAX_NODES
    assert names.count("canopy_model_layer_machines") == MAX_LAYERS
    assert value(found, "canopy_health_left_out", what="nodes") == 1_004 - MAX_NODES
    assert value(found, "canopy_health_left_out", what="layers") == 8 * 400 + 36 - MAX_LAYERS
    assert value(found, "canopy_health_left_out", what="hops") == 0
    assert names.count("canopy_model_layers") == 11, "what is told of models as a whole is told of all"
    assert value(found, "canopy_model_machines", fingerprint="0" * 64, state="serving") == 125
    assert calls_of(partial(generate_latest, view)) < 200_000, "each pair of nodes once would be a million"


def calls_of(made: Callable[[], object]) -> int:
    """How many functions of Python are called meanwhile: a cost that is the same on every machine."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        made()
    finally:
        sys.setprofile(None)
    return calls


def test_who_is_left_out_does_not_change_from_scrape_to_scrape() -> None:
    health = crowd(models=1, nodes=300, layers=40)
    shown = [
        {dict(has)["peer"] for name, has in samples(health.look().collect()) if name == "canopy_model_node_busy_ratio"}
        for _ in range(2)
    ]
    assert shown[0] == shown[1]


def test_names_that_would_break_a_page_do_not() -> None:
    health = SampleHealth()
    model = ServedModel('a"b\\c\nd\ud800', "d" * 64, 4)
    health.overview.knowledge.apply_telemetry(PeerId("QmOdd"), "d" * 64, status(model=model, span=Span(0, 4)), NOW)
    text = generate_openmetrics(health.look()).decode()  # type: ignore[no-untyped-call]
    found = samples(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    assert value(found, "canopy_model_layers", model='a"b\\c\nd?') == 4


def test_an_offline_node_is_still_told() -> None:
    health = SampleHealth()
    health.health_loop.clock = lambda: NOW + 100
    found = samples(health.look().collect())
    assert value(found, "canopy_model_node_state", peer="QmFirst", state=Condition.STALE.value) == 1


def test_totals_only_rise_over_runs_gaps_and_liars() -> None:
    book, told = TotalsBook(), status(model=ServedModel("m", "a" * 64, 12), span=Span(0, 6))
    seen = []

    def hear(before: tuple[float, int] | None, after: tuple[float, int], seconds: float = 5.0) -> None:
        said = [
            None if pair is None else metrics(uptime_s=pair[0], sweeps=pair[1], layer_tokens=pair[1])
            for pair in (before, after)
        ]
        assert said[1] is not None
        book.add(told, said[0], said[1], seconds)
        seen.append((book.models["a" * 64].sweeps, book.models["a" * 64].layer_tokens))

    hear(None, (100.0, 50))
    hear((100.0, 50), (105.0, 70))
    hear((105.0, 70), (1.0, 4))
    hear((1.0, 4), (6.0, 2))
    assert seen == [(0, 0), (10, 20), (12, 24), (12, 24)]
    hear((6.0, 2), (11.0, 2**53))
    assert seen[-1][0] == 12 + MAX_SWEEPS_PER_S * 15 / 2
    book.keep({"a" * 64})
    assert book.models
    book.keep(())
    assert not book.models


def test_the_knowledge_counts_and_forgets() -> None:
    health = SampleHealth()
    totals = health.overview.knowledge.totals.models
    before = replace(totals[WHOLE.fingerprint])
    health.hear()
    assert totals[WHOLE.fingerprint].sweeps == before.sweeps + 100
    assert totals[WHOLE.fingerprint].layer_tokens == before.layer_tokens + 2_000
    health.overview.knowledge.forget(NOW + 10_000)
    assert not totals


@given(st.lists(st.floats(0, 1e6)))
def test_a_histogram_counts_all_once(many_ms: list[float]) -> None:
    histogram = Histogram()
    for milliseconds in many_ms:
        histogram.add_ms(milliseconds)
    pairs = histogram.cumulative()
    assert pairs[-1] == ("+Inf", len(many_ms))
    for bound, (_, count) in zip(BOUNDS_S, pairs, strict=False):
        assert count == sum(milliseconds / 1e3 <= bound for milliseconds in many_ms)


def test_a_figure_is_used_as_it_was_described() -> None:
    gauge, info = MetricFamily("one", "Text.", ("kind",)), MetricFamily("two_info", "Text.", ("fact",), MetricKind.INFO)
    sheet = MetricSet((gauge, info))
    sheet.set(gauge, None, "left out")
    assert not samples(sheet.collect())
    for wrong in (
        lambda: sheet.set(gauge, 1.0),
        lambda: sheet.set(info, 1.0, "x"),
        lambda: sheet.set_info(gauge, {"kind": "x"}),
        lambda: sheet.set_info(info, {"other": "x"}),
        lambda: sheet.set_histogram(gauge, Histogram()),
        lambda: MetricSet((gauge, gauge)),
        lambda: MetricSet((MetricFamily("sweeps", "Text.", kind=MetricKind.COUNTER),)),
    ):
        with pytest.raises(AssertionError):
            wrong()


@pytest.mark.needs_program("promtool", "prometheus")
def test_promtool_finds_nothing_wrong_with_names_and_types() -> None:
    for page in (SampleHealth().look(), SampleNode().figures):
        judged = subprocess.run(["promtool", "check", "metrics"], input=generate_latest(page), capture_output=True)
        assert (judged.returncode, judged.stdout, judged.stderr) == (0, b"", b"")


ROW = re.compile(r"\| `([a-z_]+)` \| (\w+) \| (.*?) \| (.+?) \|")


@pytest.mark.parametrize(
    ("heading", "figures"),
    [
        ("## `swarm health`", swarm.health.metrics.exporter.FIGURES),
        ("## `node serve`", node.life.metrics.FIGURES),
        ("## `client api`", client.api.command.FIGURES),
    ],
)
def test_the_document_lists_exactly_what_is_exported(heading: str, figures: tuple[MetricFamily, ...]) -> None:
    _, _, rest = DOCUMENT.read_text().partition(f"{heading}\n")
    listed = {found.groups() for line in rest.partition("\n## ")[0].splitlines() if (found := ROW.match(line))}
    wanted = {
        (one.name, one.kind.value, ", ".join(f"`{label}`" for label in one.labels), one.help.replace("|", "\\|"))
        for one in figures
    }
    assert listed == wanted
