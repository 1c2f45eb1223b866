"""`swarm health` over real nodes and real brokers: what dies shows at once, and the line that it gives mends it."""

from __future__ import annotations

import json
import shlex
import signal
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.demo import TARGET
from tests.e2e.programs import Program, bootstrap, program, serve, within
from tests.net.brokers import free_port, mosquitto

SPANS = ("0-4", "4-8", "8-12")
SHOWN_S = 2.0


def state(health: Program) -> dict[str, Any]:
    """What the health service says now."""
    url = health.wait_for(r"health page at http://\S+/").split()[-1]
    with urllib.request.urlopen(f"{url}api/v1/state", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def model(health: Program) -> dict[str, Any]:
    """The one model that it knows; empty if there is none yet."""
    models: list[dict[str, Any]] = state(health)["models"]
    return models[0] if models else {"verdict": None, "nodes": [], "probe": None}


def states(health: Program) -> list[tuple[list[int], str, str]]:
    return sorted((node["span"], node["state"], node["source"]) for node in model(health)["nodes"])


def watch(peer: str, folder: Path, *options: str) -> list[str]:
    given = ["--join", peer, "--port", "0", "--data", str(folder / "health.sqlite3"), *options]
    return ["swarm.cli", "health", *given]


@pytest.mark.needs_program("mosquitto", "mosquitto")
def test_a_killed_node_shows_at_once_and_the_line_mends_it(tmp_path: Path) -> None:
    url = f"mqtt://127.0.0.1:{(port := free_port())}"
    with ExitStack() as stack:
        stack.enter_context(mosquitto(tmp_path, port))
        peer = stack.enter_context(bootstrap(tmp_path))
        options = watch(peer, tmp_path, "--mqtt", url, "--probe-every", "3600")
        health = stack.enter_context(program(options, tmp_path / "health.log"))
        nodes = {
            span: stack.enter_context(
                program([*serve(TARGET, span, peer, tmp_path), "--mqtt", url], tmp_path / f"{span}.log")
            )
            for span in SPANS
        }
        everybody = [([0, 4], "serving", "both"), ([4, 8], "serving", "both"), ([8, 12], "serving", "both")]
        assert within(100, lambda: states(health) == everybody), state(health)
        assert (model(health)["verdict"], model(health)["margin"]) == ("serving", 0), "each layer has one machine only"
        assert within(60, lambda: model(health)["probe"] is not None), state(health)
        probe = model(health)["probe"]
        assert probe["ok"], probe
        assert [hop["span"] for hop in probe["hops"]] == [[0, 4], [4, 8], [8, 12]]

        died = time.monotonic()
        nodes["4-8"].process.kill()
        assert within(10, lambda: model(health)["verdict"] == "broken"), state(health)
        assert time.monotonic() - died < SHOWN_S
        broken = model(health)
        assert broken["missing"] == [[4, 8]]
        assert ([4, 8], "offline") in [(node["span"], node["state"]) for node in broken["nodes"]]
        (line,) = broken["fixes"]
        assert line == f"node serve demo-target --layers 4-8 --join {peer}"

        arguments = ["node.cli", *shlex.split(line)[1:], "--mqtt", url]
        arguments += ["--host", "127.0.0.1", "--threads", "1", "--identity", str(tmp_path / "new.key")]
        stack.enter_context(program(arguments, tmp_path / "new.log", folder=TARGET.parent))
        assert within(100, lambda: model(health)["verdict"] == "serving"), state(health)
        assert model(health)["missing"] == []
        ours = psutil.Process(health.process.pid)
        assert not [file for file in ours.memory_maps() if "libtorch" in file.path], "the service must stay small"
        status, left = health.end(signal.SIGTERM)
        assert (status, left) == (0, [])


def test_one_command_is_a_whole_observatory(tmp_path: Path) -> None:
    with ExitStack() as stack:
        peer = stack.enter_context(bootstrap(tmp_path))
        options = watch(peer, tmp_path, "--embedded-broker", "--broker-port", "0", "--probe-every", "0")
        health = stack.enter_context(program(options, tmp_path / "health.log"))
        url = health.wait_for(r"broker at mqtt://[0-9.:]+").split()[-1]
        node = stack.enter_context(
            program([*serve(TARGET, "0-4", peer, tmp_path), "--mqtt", url], tmp_path / "node.log")
        )
        assert within(100, lambda: states(health) == [([0, 4], "serving", "both")]), state(health)
        assert model(health)["missing"] == [[4, 12]]
        died = time.monotonic()
        node.process.kill()
        assert within(10, lambda: [one[1] for one in states(health)] == ["offline"]), state(health)
        assert time.monotonic() - died < SHOWN_S
        assert health.end(signal.SIGTERM) == (0, [])
