"""`swarm health` over real nodes and real brokers: what dies shows at once, and the line that it gives mends it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.life.publisher import PublishIntervals
from swarm.demo import TARGET
from tests.e2e.programs import Program, bootstrap, ended_after, environment, program, serve, within

SPANS = ("0-6", "6-12")
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


def test_one_command_sees_a_killed_node_at_once_and_gives_the_line_that_mends_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        peer = stack.enter_context(bootstrap(tmp_path))
        options = watch(peer, tmp_path, "--embedded-broker", "--broker-port", "0", "--probe-every", "3600")
        health = stack.enter_context(program(options, tmp_path / "health.log"))
        url = health.wait_for(r"broker at mqtt://[0-9.:]+").split()[-1]
        nodes = {
            span: stack.enter_context(
                program([*serve(TARGET, span, peer, tmp_path), "--mqtt", url], tmp_path / f"{span}.log")
            )
            for span in SPANS
        }
        everybody = [([0, 6], "serving", "both"), ([6, 12], "serving", "both")]
        assert within(100, lambda: states(health) == everybody), state(health)
        assert (model(health)["verdict"], model(health)["margin"]) == ("serving", 0), "each layer has one machine only"
        assert within(60, lambda: model(health)["probe"] is not None), state(health)
        probe = model(health)["probe"]
        assert probe["ok"], probe
        assert [hop["span"] for hop in probe["hops"]] == [[0, 6], [6, 12]]

        died = time.monotonic()
        nodes["6-12"].process.kill()
        assert within(10, lambda: model(health)["verdict"] == "broken"), state(health)
        assert time.monotonic() - died < SHOWN_S
        broken = model(health)
        assert broken["missing"] == [[6, 12]]
        assert ([6, 12], "offline") in [(node["span"], node["state"]) for node in broken["nodes"]]
        (line,) = broken["fixes"]
        assert line == f"node serve demo-target --layers 6-12 --join {peer}"

        arguments = ["node.cli", *shlex.split(line)[1:], "--mqtt", url]
        arguments += ["--host", "127.0.0.1", "--threads", "1", "--identity", str(tmp_path / "new.key")]
        stack.enter_context(program(arguments, tmp_path / "new.log", folder=TARGET.parent))
        assert within(100, lambda: model(health)["verdict"] == "serving"), state(health)
        assert model(health)["missing"] == []
        ours = psutil.Process(health.process.pid)
        assert not [file for file in ours.memory_maps() if "libtorch" in file.path], "the service must stay small"
        status, left = health.end(signal.SIGTERM)
        assert (status, left) == (0, [])


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two networks, `hub` at 192.0.2.1 and `far` at 192.0.2.2, with a wire between them."""
    hub, far = f"hub{os.getpid()}", f"far{os.getpid()}"

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    try:
        for name in (hub, far):
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"-n {hub} link add wire type veth peer name wire netns {far}")
        for name, address in ((hub, "192.0.2.1/30"), (far, "192.0.2.2/30")):
            ip(f"-n {name} address add {address} dev wire")
            ip(f"-n {name} link set wire up")
        yield hub, far
    finally:
        for name in (hub, far):
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextmanager
def inside(namespace: str, log: Path, *command: str) -> Iterator[Program]:
    """A program in one of them."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    with ended_after(running := Program(process, log)):
        yield running


@pytest.mark.needs_root
@pytest.mark.needs_program("ip", "iproute2")
@pytest.mark.needs_program("mosquitto", "mosquitto")
def test_a_node_whose_network_is_cut_shows_when_its_keep_alive_is_over(tmp_path: Path) -> None:
    config, broker = tmp_path / "mosquitto.conf", "mqtt://192.0.2.1:1883"
    config.write_text("listener 1883 192.0.2.1\nallow_anonymous true\nuser root\n")
    nobody = "/ip4/192.0.2.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    python = (sys.executable, "-m")
    with ExitStack() as stack:
        hub, far = stack.enter_context(namespaces())

        def run(where: str, name: str, *command: str) -> Program:
            return stack.enter_context(inside(where, tmp_path / f"{name}.log", *command))

        run(hub, "broker", "mosquitto", "-c", str(config)).wait_for("running")
        given = watch(nobody, tmp_path, "--mqtt", broker, "--probe-every", "0")
        url = run(hub, "health", *python, *given).wait_for(r"http://\S+/")
        shown = run(hub, "shown", *python, "tests.e2e.partition_ends", "watch", url)
        run(far, "node", *python, "tests.e2e.partition_ends", "publish", broker)
        shown.wait_for(r"serving\n")
        cut_at = time.monotonic()
        subprocess.run(["ip", "-n", far, "link", "set", "wire", "down"], check=True)
        offline_at = float(shown.wait_for(r"\S+ offline\n").split()[0])
        assert 1.0 < offline_at - cut_at <= 1.5 * PublishIntervals().keep_alive_s + SHOWN_S
