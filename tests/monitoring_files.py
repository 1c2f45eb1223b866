"""The monitoring files below deploy/ as tests read them: queries of the dashboard, expressions of the rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
BOARD = DEPLOY / "grafana" / "dashboards" / "canopy.json"
RULES = PROMETHEUS / "rules" / "canopy.yml"


def board() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(BOARD.read_text())
    return read


def board_queries() -> Iterator[tuple[str, str]]:
    """Name and query of every panel and annotation of the dashboard; variables match everything."""
    for panel in board()["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']} {target['refId']}", _plain(target["expr"])
    for note in board()["annotations"]["list"]:
        if "expr" in note:
            yield f"annotation {note['name']}", _plain(note["expr"])


def rule_queries() -> Iterator[tuple[str, str]]:
    """Name and expression of every rule."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"rule {rule.get('record') or rule['alert']}", rule["expr"]


def recorded() -> set[str]:
    """Names of the series that recording rules make."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def _plain(query: str) -> str:
    for variable, value in (("$__rate_interval", "1m"), ("$model", ".*"), ("$instance", ".*")):
        query = query.replace(variable, value)
    assert "$" not in query, query
    return query
