"""The reference pages against the programs: fields of the state and the history, and environment variables."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swarm.health.state.verdict import Grade
from swarm.health.tasks.history import History, Sample
from tests.sample_metrics import GOOD, SHAKY, WHOLE, SampleHealth
from tests.telemetry_messages import NOW

ROOT = Path(__file__).parents[3]
HTTP_API = ROOT / "docs" / "reference" / "http-api.md"
COMMANDS = ROOT / "docs" / "reference" / "cli"


def fields(heading: str) -> set[str]:
    """What the first column of a section's table names."""
    section = HTTP_API.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", re.split(r"^#", section, flags=re.MULTILINE)[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def keys(objects: Iterable[dict[str, Any]]) -> set[str]:
    """The fields that every one of some objects has; there is one at least."""
    (found,) = {frozenset(one) for one in objects}
    return set(found)


def test_every_field_of_the_state_is_in_the_reference() -> None:
    health = SampleHealth()
    health.look()
    health.overview.record_probe(SHAKY, GOOD, health.at)  # the verdict changes, which is an event
    health.look()
    state = health.publisher.state
    models = state["models"]
    probes = [model["probe"] for model in models if model["probe"] is not None]
    assert keys([state]) == fields("## The state")
    assert keys(models) == fields("### A model")
    assert keys(node for model in models for node in model["nodes"]) == fields("### A node")
    assert keys(probes) == fields("### A probe")
    assert keys(hop for probe in probes for hop in probe["hops"]) == fields("### A hop of a probe")
    assert keys(state["alerts"]) == fields("### An alert")
    assert keys(state["events"]) == fields("### An event")
    assert keys(state["contributors"]) == fields("### A contributor")


def test_every_field_of_the_history_is_in_the_reference(tmp_path: Path) -> None:
    async def history() -> dict[str, Any]:
        async with History.open(tmp_path / "history.sqlite3") as kept:
            await kept.add([Sample(WHOLE.fingerprint, Grade.SERVING, 1, 2)], NOW)
            return await kept.points(WHOLE.fingerprint, "1h", NOW)

    answer = asyncio.run(history())
    sentence = HTTP_API.read_text(encoding="utf-8").partition("## The history")[2].partition("\n|")[0]
    assert keys([answer]) <= set(re.findall(r"`(\w+)`", sentence))
    assert keys(answer["points"]) == fields("## The history")


SHARED = ("directory/joining/resolve", "directory/joining/remembered", "base/program")
"""Modules that read the environment for all commands."""
_VARIABLE = re.compile(r"environ\w*\.get\(\"(CANOPY_\w+)\"")


def test_every_environment_variable_is_on_its_commands_page() -> None:
    shared = [(ROOT / "swarm" / f"{name}.py").read_text(encoding="utf-8") for name in SHARED]
    for name in ("client", "node", "swarm"):
        page = (COMMANDS / f"{name}.md").read_text(encoding="utf-8")
        source = (ROOT / name / "cli.py").read_text(encoding="utf-8")
        read = {found for text in (source, *shared) for found in _VARIABLE.findall(text)}
        assert read
        if name == "client":
            read.remove("CANOPY_MQTT")  # it publishes nothing
        assert read == set(re.findall(r"^\| `(CANOPY_\w+)` \|", page, re.MULTILINE))
