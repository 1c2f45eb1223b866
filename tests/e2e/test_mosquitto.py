"""mosquitto as deploy/ configures it, with the secrets of `swarm private` and our own clients: who may do what."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiomqtt
import pytest

from node.life.publisher import Address, BrokerClient, TelemetryPublisher
from swarm.base.tasks import TaskScope
from swarm.commands.private_swarm import Private
from swarm.directory.identity import Identity
from swarm.link.broker_address import BrokerAddress, parse_broker
from swarm.status.messages import MessageKind, Presence, Status, Will, topic_of
from tests.net.brokers import TelemetryListener, free_port
from tests.net.node.life.test_telemetry import QUICK, Speaker
from tests.private_swarm import HOST, env_settings, make_private_swarm, mosquitto_for
from tests.telemetry_messages import FINGERPRINT

pytestmark = [
    pytest.mark.needs_program("mosquitto", "mosquitto"),
    pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning"),  # paho's, after a failed handshake
]


@dataclass(frozen=True, slots=True)
class Swarm:
    """A private swarm's folder, with its broker running."""

    folder: Path
    port: int

    def url(self, name: str, file: str = "node.env") -> str:
        return env_settings(self.folder / name / file)["CANOPY_MQTT"]

    def address(self, name: str, file: str = "node.env") -> BrokerAddress:
        return parse_broker(self.url(name, file), self.folder / name / "ca.crt")

    def identity(self, name: str) -> Identity:
        return Identity.load_or_create(self.folder / name / "identity.key")

    def publisher(self, name: str, speaker: Speaker, address: BrokerAddress | None = None) -> TelemetryPublisher:
        to = Address(address or self.address(name), "canopy", FINGERPRINT, self.identity(name))
        return TelemetryPublisher(to, speaker, speaker.outbox, speaker.say, QUICK)

    @asynccontextmanager
    async def listener(self) -> AsyncIterator[TelemetryListener]:
        """The health page's ear, subscribed when this is entered."""
        listener = TelemetryListener()
        async with client(self.address("health", "health.env")) as health, TaskScope() as scope:
            await health.subscribe("canopy/#", qos=1)
            scope.spawn(listener.listen(health))
            yield listener


def client(address: BrokerAddress) -> aiomqtt.Client:
    return aiomqtt.Client(
        address.host, address.port, username=address.user, password=address.password, tls_context=address.tls
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Swarm:
    folder, port = tmp_path_factory.mktemp("private"), free_port()
    make_private_swarm(Private(folder, (HOST,), nodes=2, broker_port=port))
    return Swarm(folder, port)


@pytest.fixture
def swarm(made: Swarm) -> Iterator[Swarm]:
    with mosquitto_for(made.folder, made.port):
        yield made


async def test_nodes_are_heard_by_health(swarm: Swarm) -> None:
    async with swarm.listener() as listener:
        first, second = Speaker(), Speaker()
        async with swarm.publisher("node-1", first), swarm.publisher("node-2", second):
            await listener.until(lambda body: isinstance(body, Status))
        await listener.until(lambda body: isinstance(body, Status) and body.state is Presence.LEFT)
        peers = {one.topic.value.split("/")[3] for one in listener.raw}
        assert peers == {swarm.identity(name).peer_id for name in ("node-1", "node-2")}
        assert listener.rejected == []
        assert first.lines == second.lines == [f"telemetry goes to mqtts://{HOST}:{swarm.port}"]
        assert not any(isinstance(body, Will) for body in listener.accepted)


@pytest.mark.parametrize("wrong", ["authority", "password", "user", "name", "nobody", "plain"])
async def test_who_is_not_invited_stays_outside(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory, wrong: str
) -> None:
    good, ca = swarm.url("node-1"), swarm.folder / "ca.crt"
    secret = parse_broker(good, ca).password
    url, says = good, "authorized"
    match wrong:
        case "authority":
            other = tmp_path_factory.mktemp("other")
            make_private_swarm(Private(other, (HOST,), nodes=0))
            ca, says = other / "ca.crt", "certificate"
        case "password":
            url = good.replace(f":{secret}@", ":guessed@")
        case "user":
            url = good.replace(swarm.identity("node-1").peer_id, swarm.identity("node-2").peer_id)
        case "name":
            url, says = good.replace(HOST, "localhost"), "certificate"
        case "nobody":
            url = f"mqtts://{HOST}:{swarm.port}"
        case "plain":
            url, says = f"mqtt://{HOST}:{swarm.port}", "no telemetry"
    speaker = Speaker()
    address = parse_broker(url, ca if url.startswith("mqtts") else None)
    async with swarm.publisher("node-1", speaker, address):
        await speaker.until_said("no telemetry")
    (line,) = speaker.lines
    assert says in line
    assert "guessed" not in line
    assert str(secret) not in line


async def test_a_node_writes_below_its_own_name_only_and_reads_nothing(swarm: Swarm) -> None:
    mine, theirs = swarm.identity("node-1").peer_id, swarm.identity("node-2").peer_id
    own = topic_of("canopy", FINGERPRINT, mine, MessageKind.EVENTS)
    foreign = [
        topic_of("canopy", FINGERPRINT, theirs, MessageKind.STATUS),
        f"canopy/v1/{FINGERPRINT}",
        f"canopy/v2/{FINGERPRINT}/{mine}/status",
        f"other/v1/{FINGERPRINT}/{mine}/status",
        f"canopy/v1/{mine}/{theirs}/status",
        "$SYS/broker/uptime",
    ]
    async with swarm.listener() as listener, client(swarm.address("node-1")) as node:
        await node.subscribe("#", qos=1)
        for topic in foreign:
            await node.publish(topic, b"{}", qos=1, retain=True)
        async with swarm.publisher("node-1", Speaker()):
            await listener.until(lambda body: isinstance(body, Status))
        await node.publish(own, b"{}", qos=1)
        assert len(node.messages) == 0, "what the broker had for it came before this answer"
        assert {one.topic.value.split("/")[3] for one in listener.raw} == {mine}
        assert {one.topic.value.rsplit("/", 1)[0] for one in listener.raw} == {own.rsplit("/", 1)[0]}


async def test_who_sends_too_much_is_sent_away(swarm: Swarm) -> None:
    own = topic_of("canopy", FINGERPRINT, swarm.identity("node-1").peer_id, MessageKind.EVENTS)
    async with swarm.listener() as listener, BrokerClient(client(swarm.address("node-1"))) as node, asyncio.timeout(10):
        await node.publish(own, b"x" * 8_192, qos=1)
        await node.publish(own, b"x" * 9_300, qos=0)
        with pytest.raises(aiomqtt.MqttError):
            await anext(aiter(node.messages))
        assert [len(str(one.payload, "utf-8")) for one in listener.raw] == [8_192]


async def test_a_node_that_is_added_is_let_in_once_the_broker_was_told(tmp_path: Path) -> None:
    command = Private(tmp_path, (HOST,), nodes=0, broker_port=free_port())
    make_private_swarm(command)
    with mosquitto_for(tmp_path, command.broker_port) as pid:
        make_private_swarm(replace(command, nodes=1))
        here = Swarm(tmp_path, command.broker_port)
        speaker = Speaker()
        async with here.publisher("node-1", speaker):
            await speaker.until_said("no telemetry")
            os.kill(pid, signal.SIGHUP)
            await speaker.until_said("goes to")


def test_tls_is_modern_and_the_certificate_is_of_our_authority(swarm: Swarm) -> None:
    context = ssl.create_default_context(cafile=str(swarm.folder / "ca.crt"))
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with socket.create_connection((HOST, swarm.port), 5) as raw, context.wrap_socket(raw, server_hostname=HOST) as tls:
        assert tls.version() == "TLSv1.3"


@pytest.mark.needs_program("mosquitto_passwd", "mosquitto")
def test_the_password_file_is_one_that_mosquitto_passwd_reads(tmp_path: Path) -> None:
    make_private_swarm(Private(tmp_path, (HOST,), nodes=1))
    passwords = tmp_path / "broker" / "passwords"
    before = passwords.read_text().splitlines()
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "another", "word"], check=True, capture_output=True)
    after = passwords.read_text().splitlines()
    assert after[: len(before)] == before
    assert after[-1].startswith("another:$7$")
