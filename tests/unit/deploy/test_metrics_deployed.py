"""The board, the rules and the scrape configuration: well formed, and about metrics that exist."""

from __future__ import annotations

import itertools
import re
import subprocess

import pytest

import node.life.metrics
import swarm.health.metrics.exporter
from swarm.status.metric_set import MetricKind
from tests.monitoring_files import DEPLOY, PROMETHEUS, board, board_queries, recorded, rule_queries


def exported() -> set[str]:
    """Every series that a page may hold."""
    names = set()
    for figure in (*swarm.health.metrics.exporter.FIGURES, *node.life.metrics.FIGURES):
        suffixes = ("_bucket", "_sum", "_count") if figure.kind is MetricKind.HISTOGRAM else ("",)
        names |= {figure.name + suffix for suffix in suffixes}
    return names


def test_every_query_is_about_something_that_is_exported() -> None:
    queries = [*board_queries(), *rule_queries()]
    assert len(queries) > 60
    known = exported() | recorded()
    for what, query in queries:
        series = set(re.findall(r"\bcanopy[:_][a-z0-9_:]+", query))
        assert series or re.search(r"\b(up|process_\w+|ALERTS)\{", query), what
        assert series <= known, what


def test_every_alert_is_tested() -> None:
    tests = (PROMETHEUS / "tests" / "canopy_test.yml").read_text()
    alerts = [what.removeprefix("rule ") for what, _ in rule_queries() if what.startswith("rule Canopy")]
    assert len(alerts) >= 10
    for alert in alerts:
        assert len(re.findall(rf"alertname: {alert}\b", tests)) >= 2, f"{alert}: when it fires, and when it does not"


@pytest.mark.needs_program("promtool", "prometheus")
@pytest.mark.parametrize(
    "command", ["check config prometheus.yml", "check rules rules/canopy.yml", "test rules tests/canopy_test.yml"]
)
def test_promtool_finds_nothing_wrong(command: str) -> None:
    words = ["promtool", *command.split()]
    judged = subprocess.run(words, cwd=PROMETHEUS, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert "FAILED" not in judged.stdout


def test_the_boards_panels_lie_beside_each_other_and_ask_the_chosen_source() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    names = {variable["name"]: variable["type"] for variable in board()["templating"]["list"]}
    assert names == {"datasource": "datasource", "model": "query", "instance": "query"}
    for panel in panels:
        for part in (panel, *panel.get("targets", [])):
            if panel["type"] != "row":
                assert part["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters)


def test_what_is_provisioned_fits_together() -> None:
    source = (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    chosen = next(one for one in board()["templating"]["list"] if one["name"] == "datasource")
    assert f"uid: {chosen['current']['value']}" in source
