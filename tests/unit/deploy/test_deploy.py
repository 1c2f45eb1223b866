"""deploy/ against itself and against our programs: what it mounts exists, what it runs is understood, limits agree."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from node.model.config import ServeConfig
from swarm import alive
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.cli import BOOTSTRAP_PORT, COMMANDS
from swarm.commands.private_swarm import HEALTH_USER, Private
from swarm.demo import TARGET
from swarm.directory.identity import Identity
from swarm.health.options import Health
from swarm.health.service import check
from swarm.link.broker_address import PORTS
from swarm.status.messages import DEFAULT_PREFIX, MAX_PAYLOAD_BYTES, MessageKind, topic_of
from tests.private_swarm import DEPLOY, env_settings, make_private_swarm

ROOT = DEPLOY.parent
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
OURS = ("bootstrap", "node-1", "node-2", "node-3", "health")
UNITS = [DEPLOY / "systemd" / f"canopy-{name}.service" for name in ("node@", "bootstrap", "health")]
JOIN = "/ip4/203.0.113.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What compose.yaml expects in deploy/private."""
    folder = tmp_path_factory.mktemp("private")
    make_private_swarm(Private(folder, ("mosquitto",), "bootstrap"))
    return folder


def understood(arguments: list[str]) -> object:
    """What our command lines make of it; SystemExit where they refuse."""
    match arguments:
        case ["swarm-node", "serve", *rest]:
            return tyro.cli(ServeConfig, args=rest)
        case ["swarm", *rest]:
            return tyro.extras.subcommand_cli_from_dict(dict(COMMANDS), args=rest)
        case _:
            raise AssertionError(arguments)


def entry(target: str) -> list[str]:
    """The ENTRYPOINT of a target of our Dockerfile."""
    stage = DOCKERFILE.partition(f"FROM base AS {target}\n")[2].partition("\nFROM ")[0]
    found = re.search(r"^ENTRYPOINT (\[.*\])$", stage, re.MULTILINE)
    assert found is not None, target
    words: list[str] = json.loads(found[1])
    return words


def started(name: str, join: str = JOIN) -> list[str]:
    """The command line of one of our services, without tini."""
    service = SERVICES[name]
    words = service.get("entrypoint") or entry(service["build"]["target"])
    assert words[:2] == ["tini", "--"]
    line = [*words[2:], *service.get("command", [])]
    return [re.sub(r"\$\{CANOPY_JOIN:\?[^}]*\}", join, word) for word in line]


def mounts(service: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for volume in service.get("volumes", []):
        source, target, *_ = volume.split(":")
        yield source, target


@pytest.mark.parametrize("name", OURS)
def test_compose_starts_what_our_programs_understand(secrets: Path, name: str) -> None:
    join = env_settings(secrets / "compose.env")["CANOPY_JOIN"]
    line = started(name, join)
    for source, target in mounts(SERVICES[name]):
        if source.startswith("./private/"):
            line = [word.replace(target, str(secrets / source.removeprefix("./private/"))) for word in line]
    config = understood(line)
    if isinstance(config, ServeConfig):
        (env,) = SERVICES[name]["env_file"]
        url = env_settings(secrets / env.removeprefix("./private/"))["CANOPY_MQTT"]
        replace(config, mqtt=url).check()
        assert config.mqtt_ca is not None
        assert config.mqtt_ca.is_file()
        assert config.identity is not None
        assert f"//{Identity.load_or_create(config.identity).peer_id}:" in url
        assert url.endswith(f"@mosquitto:{PORTS['mqtts']}")
    elif isinstance(config, Health):
        check(config)


def test_the_three_nodes_serve_every_layer_of_the_demo_model_once() -> None:
    spans = []
    for name in ("node-1", "node-2", "node-3"):
        config = understood(started(name))
        assert isinstance(config, ServeConfig)
        spans.append(Span.parse(config.layers))
    layers = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
    assert (spans[0].start, spans[-1].end) == (0, layers)
    assert all(one.end == other.start for one, other in pairwise(spans))
    assert f"CANOPY_MODEL=/opt/canopy/lib/python3.11/site-packages/{TARGET.relative_to(ROOT)}" in DOCKERFILE


@pytest.mark.parametrize("name", SERVICES)
def test_what_compose_mounts_exists_or_is_a_volume(secrets: Path, name: str) -> None:
    for source, _ in mounts(SERVICES[name]):
        if source.startswith("./private/"):
            assert (secrets / source.removeprefix("./private/")).is_dir(), source
        elif source.startswith("./"):
            assert (DEPLOY / source).is_dir(), source
        else:
            assert source in COMPOSE["volumes"]
    for env in SERVICES[name].get("env_file", []):
        assert (secrets / env.removeprefix("./private/")).is_file()


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_bounded_watched_and_can_do_little(name: str) -> None:
    service = SERVICES[name]
    limits = service["deploy"]["resources"]["limits"]
    assert {"cpus", "memory", "pids"} <= set(limits)
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    tag = service["image"].rpartition(":")[2]
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), "an exact version"
    is_ours = "build" in service
    watched = "healthcheck" in service or is_ours
    assert watched
    assert name == "client" or service["restart"] == "unless-stopped"


def test_a_node_may_take_its_time_to_leave() -> None:
    config = understood(started("node-1"))
    assert isinstance(config, ServeConfig)
    assert float(SERVICES["node-1"]["stop_grace_period"].removesuffix("s")) > config.drain + 10


def test_the_images_ask_whether_the_programs_are_alive() -> None:
    asked = re.findall(r'CMD \["python", "-m", "swarm.alive", "(\w+)", "(\d+)"\]', DOCKERFILE)
    assert asked == [("bootstrap", str(BOOTSTRAP_PORT)), ("health", "8080"), ("node", "31338")]
    assert {kind for kind, _ in asked} == set(alive.CHECKS)
    serve = understood([*entry("node")[2:], "--layers", "auto"])
    assert isinstance(serve, ServeConfig)
    assert serve.port == 31_338
    health = understood([*entry("health")[2:], "--join", JOIN])
    assert isinstance(health, Health)
    assert (health.host, health.port) == ("0.0.0.0", 8_080)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_runs_as_nobody_in_particular_and_is_pinned(name: str) -> None:
    text = (DEPLOY / "docker" / name).read_text()
    final = text.rpartition("COPY --from=build")[2]
    targets = final.split("FROM base AS ")[1:] or [final]
    assert all(target.count("USER 10001:10001") == 1 for target in targets)
    assert "USER root" not in text
    assert "-c constraints.txt" in text
    sources = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_mosquitto_takes_every_message_that_a_node_may_send_and_little_more() -> None:
    said = dict(
        line.split(" ", 1) for line in (DEPLOY / "mosquitto" / "mosquitto.conf").read_text().splitlines() if " " in line
    )
    assert said["listener"] == str(PORTS["mqtts"])
    assert said["allow_anonymous"] == "false"
    topic = topic_of("p" * 100, "f" * 64, PeerId("Q" * 46), MessageKind.METRICS)
    assert MAX_PAYLOAD_BYTES + len(topic) + 16 < int(said["max_packet_size"]) <= MAX_PAYLOAD_BYTES + 1_024
    acl = [line for line in (DEPLOY / "mosquitto" / "acl").read_text().splitlines() if line and line[0] != "#"]
    assert acl == [
        f"pattern write {DEFAULT_PREFIX}/v1/+/%u/#",
        f"user {HEALTH_USER}",
        f"topic read {DEFAULT_PREFIX}/#",
    ]


def unit_settings(unit: Path) -> dict[str, str]:
    """The last value of each setting."""
    return dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line and line[0] not in "#[")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_what_our_programs_understand(unit: Path) -> None:
    kind = unit.stem.removeprefix("canopy-").rstrip("@")
    env = settings_of(DEPLOY / "systemd" / "env" / f"{kind}.options.env")
    said = unit_settings(unit)
    line = said["ExecStart"].replace("${CANOPY_JOIN}", JOIN).replace("%i", "node-1")
    line = line.replace("$CANOPY_OPTIONS", env["CANOPY_OPTIONS"])
    line = line.replace("${CANOPY_LAYERS}", env.get("CANOPY_LAYERS", ""))
    program, *rest = shlex.split(line)
    config = understood([Path(program).name, *rest])
    if isinstance(config, ServeConfig):
        config.check()
        assert float(said["TimeoutStopSec"]) > config.drain + 10
    assert said["NoNewPrivileges"] == "yes"
    assert said["User"] == "canopy"
    assert said["KillSignal"] == "SIGTERM"


def settings_of(env: Path) -> dict[str, str]:
    lines = [line for line in env.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def test_secrets_cannot_be_committed_or_sent_to_the_builder() -> None:
    assert "private/" in (DEPLOY / ".gitignore").read_text().splitlines()
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not [path for path in DEPLOY.rglob("*.key") if "private" not in path.parts]


def test_images_install_the_extras_of_what_they_run() -> None:
    base, *targets = DOCKERFILE.split("FROM base AS ")
    assert "'.[metrics]'" in base
    with_health = {target.partition("\n")[0] for target in targets if "'canopy-swarm[health]'" in target}
    assert with_health == {"health"}
