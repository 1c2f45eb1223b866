"""The health service's sockets: HTTP, the ear at a broker, the embedded broker, the look at the DHT."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from pwdlib.hashers.argon2 import Argon2Hasher

from swarm.base.errors import ConfigError, RegistryError
from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import Registry
from swarm.health.broker.supervisor import EmbeddedBroker
from swarm.health.state.directory import Directory
from swarm.health.state.model import Knowledge
from swarm.health.state.mqtt_feed import MqttFeed
from swarm.health.state.node import Condition
from swarm.health.state.overview import Overview
from swarm.health.state.verdict import LinkState
from swarm.health.tasks.publisher import MAX_READERS, StatePublisher
from swarm.health.web.api import make_app
from swarm.link.broker_address import BrokerAddress
from swarm.status.guard import Reason, TelemetryGuard
from swarm.status.http import HEADERS, make_server
from swarm.status.messages import Body, seal_body
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.brokers import free_port, mosquitto
from tests.telemetry_messages import FINGERPRINT, identity, metrics, status, topic, will

# HTTP


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes


async def ask(port: int, path: str, method: str = "GET", *headers: str) -> Answer:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        "\r\n".join([f"{method} {path} HTTP/1.1", "host: here", "connection: close", *headers, "", ""]).encode()
    )
    data = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in rest)
    return Answer(int(first.split()[1]), fields, body)


@asynccontextmanager
async def served(publisher: StatePublisher, page: Path) -> AsyncIterator[int]:
    """The API on a free port."""

    async def points(model: str, window: str) -> dict[str, object]:
        if model != FINGERPRINT:
            raise KeyError(model)
        return {"model": model, "window": window}

    server = make_server(make_app(publisher, points, page))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        async def serve() -> None:
            await server.serve(sockets=[listening])

        async with TaskScope() as scope:
            task = scope.spawn(serve())
            yield listening.getsockname()[1]
            publisher.close()
            server.should_exit = True
            await asyncio.wait([task])


async def test_http_serves_everything_read_only_under_a_strict_policy(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html><title>page</title>")
    (tmp_path / "app.js").write_text("export {};")
    publisher = StatePublisher()
    publisher.publish({"v": 1, "name": "<script>\ud800"})
    async with served(publisher, tmp_path) as port:
        state = await ask(port, "/api/v1/state")
        assert (state.status, json.loads(state.body)) == (200, {"v": 1, "name": "<script>?"})
        packed = await ask(port, "/api/v1/state", "GET", "accept-encoding: gzip")
        assert gzip.decompress(packed.body) == state.body
        head = await ask(port, "/api/v1/state", "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert (await ask(port, "/api/v1/stream", "HEAD")).status == 200
        history = await ask(port, f"/api/v1/history?model={FINGERPRINT}&window=30d")
        assert json.loads(history.body) == {"model": FINGERPRINT, "window": "30d"}
        assert (await ask(port, "/api/v1/history?model=" + "0" * 32)).status == 404
        for query in ("model=../../etc", f"model={FINGERPRINT}&window=1y", ""):
            assert (await ask(port, f"/api/v1/history?{query}")).status == 422
        described = json.loads((await ask(port, "/api/v1/openapi.json")).body)
        assert {"/api/v1/state", "/api/v1/history", "/api/v1/stream"} <= set(described["paths"])
        assert b"http" not in (await ask(port, "/api/v1/docs")).body.replace(b"<!doctype html>", b"")
        assert b"page" in (await ask(port, "/")).body
        assert (await ask(port, "/page/app.js")).headers["content-type"].startswith("text/javascript")
        assert (await ask(port, "/page/..%2f..%2fetc/passwd")).status == 404
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            refused = await ask(port, "/api/v1/state", method)
            assert (refused.status, refused.headers["allow"]) == (405, "get, head")
        for answer in (state, refused, await ask(port, "/"), await ask(port, "/nowhere")):
            for name, value in HEADERS.items():
                assert answer.headers[name] == value.lower()


async def test_the_stream_brings_the_newest_state_only_and_signs_of_life(tmp_path: Path) -> None:
    publisher = StatePublisher()
    publisher.publish({"v": 1})
    async with served(publisher, tmp_path) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /api/v1/stream HTTP/1.1\r\nhost: here\r\n\r\n")
        assert b"text/event-stream" in await asyncio.wait_for(reader.readuntil(b'event: state\ndata: {"v":1}\n\n'), 10)
        for number in range(2, 5):
            publisher.publish({"v": number})
        seen = await asyncio.wait_for(reader.readuntil(b'{"v":4}\n\n'), 10)
        assert b'{"v":2}' not in seen
        assert publisher.readers == 1
        publisher.readers = MAX_READERS
        assert (await ask(port, "/api/v1/stream")).status == 503
        publisher.readers = 1
        writer.close()
        await until(lambda: publisher.readers == 0)


async def test_a_quiet_stream_shows_that_it_lives() -> None:
    publisher = StatePublisher()
    frames = publisher.frames(heartbeat_s=0.01)
    assert (await anext(frames)).startswith(b": ")
    publisher.close()
    assert [frame async for frame in frames] == []


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return when a condition holds that other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - several tasks' doing, which have no event in common
            await asyncio.sleep(0.01)


# MQTT


@dataclass
class Listening:
    """A feed and what it brings together."""

    overview: Overview = field(default_factory=lambda: Overview(["/ip4/x"], "canopy", 0.0))
    guard: TelemetryGuard = field(default_factory=TelemetryGuard)

    def feed(self) -> MqttFeed:
        def heard(one: object, now: float) -> None:
            self.overview.knowledge.apply_telemetry(one.peer, one.fingerprint, one.body, now)  # type: ignore[attr-defined]

        return MqttFeed(self.guard, "canopy", heard, self.overview.set_broker_state)

    async def until_node_is(self, condition: Condition) -> None:
        def holds() -> bool:
            found = self.overview.knowledge.nodes(time.time()).get(FINGERPRINT)
            return found is not None and [node.condition for node in found[1]] == [condition]

        await until(holds)

    async def until_link_is(self, state: LinkState) -> None:
        await until(lambda: self.overview.broker.state is state)


def node_client(port: int, keep_alive_s: int = 5, **other: Any) -> aiomqtt.Client:  # noqa: ANN401
    """A node with its will."""
    last = will(at=time.time())
    wanted = aiomqtt.Will(topic(last), seal_body(last, topic(last), identity(0)), 1, True)
    return aiomqtt.Client("127.0.0.1", port, will=wanted, keepalive=keep_alive_s, **other)


async def publish(client: aiomqtt.Client, body: Body, retain: bool = False) -> None:
    await client.publish(topic(body), seal_body(body, topic(body), identity(0)), 1, retain)


def break_off(client: aiomqtt.Client) -> None:
    """End the TCP connection without a word."""
    client._client.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


@pytest.mark.needs_program("mosquitto", "mosquitto")
async def test_the_feed_hears_wills_and_survives_the_broker(tmp_path: Path) -> None:
    port, listening = free_port(), Listening()
    async with TaskScope() as scope:
        with mosquitto(tmp_path, port):
            scope.spawn(listening.feed().run(lambda: BrokerAddress("127.0.0.1", port)))
            await listening.until_link_is(LinkState.CONNECTED)
            with suppress(aiomqtt.MqttError):  # its connection breaks
                async with node_client(port) as client:
                    await publish(client, status(at=time.time()), retain=True)
                    await publish(client, metrics(at=time.time()))
                    await listening.until_node_is(Condition.SERVING)
                    await client.publish("canopy/v1/x/y/status", b"\xff" * 10_000)
                    await until(lambda: listening.guard.rejected[Reason.MALFORMED] == 1)
                    break_off(client)
                    await listening.until_node_is(Condition.OFFLINE)
            await listening.until_node_is(Condition.OFFLINE)
        await listening.until_link_is(LinkState.DOWN)
        with mosquitto(tmp_path, port):
            await listening.until_link_is(LinkState.CONNECTED)


async def test_the_embedded_broker_carries_telemetry_and_nothing_else(tmp_path: Path) -> None:
    listening = Listening()
    async with EmbeddedBroker("127.0.0.1", 0, "canopy", None) as broker, TaskScope() as scope:
        port = broker.address.port
        async with node_client(port, identifier="node") as client:
            await publish(client, status(at=time.time()), retain=True)
            scope.spawn(listening.feed().run(broker.own_address))
            await listening.until_node_is(Condition.SERVING)
            assert 0x80 in await client.subscribe("canopy/#")
            await client.publish("canopy/v1/not-hex/nobody/status", b"x", 1)
            async with aiomqtt.Client("127.0.0.1", port, identifier="second") as second:
                await second.publish("canopy/v1/not-hex/nobody/events", b"x", 1)
                assert len(second.messages) == 0, "what is retained is for the service"
            before = listening.overview.changes
            await publish(client, metrics(at=time.time()))
            await until(lambda: listening.overview.changes > before)
            with pytest.raises(aiomqtt.MqttError, match=r"(?i)not authori[sz]ed"):
                await aiomqtt.Client("127.0.0.1", port, username="swarm-health", password="guess").__aenter__()
    assert all(count == 0 for count in listening.guard.rejected.values()), "nothing else came through"


def test_passwords() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        EmbeddedBroker("127.0.0.1", 0, "canopy", Path("/nowhere"))


async def test_the_embedded_broker_misses_who_is_silent_and_shuts_out_what_is_too_large(tmp_path: Path) -> None:
    passwords, listening = tmp_path / "passwords", Listening()
    passwords.write_text(f"attic:{Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1).hash('secret')}\n")
    async with EmbeddedBroker("127.0.0.1", 0, "canopy", passwords) as broker, TaskScope() as scope:
        port = broker.address.port
        scope.spawn(listening.feed().run(broker.own_address))
        await listening.until_link_is(LinkState.CONNECTED)
        refused: list[dict[str, Any]] = [{}, {"username": "attic", "password": "guess"}]
        for wrong in refused:
            with pytest.raises(aiomqtt.MqttError, match=r"(?i)not authori[sz]ed"):
                await node_client(port, **wrong).__aenter__()
        async with node_client(port, 1, username="attic", password="secret") as client:
            await publish(client, status(at=time.time()), retain=True)
            await listening.until_node_is(Condition.SERVING)
            started = time.monotonic()
            client._misc_task.cancel()  # type: ignore[union-attr]  # no pings any more, as if the network were cut
            await listening.until_node_is(Condition.OFFLINE)
            assert 1.0 <= time.monotonic() - started <= 3.0
            client._disconnected.cancel()
        with suppress(aiomqtt.MqttError):
            async with node_client(port, username="attic", password="secret", timeout=2.0) as client:
                with pytest.raises(aiomqtt.MqttError):
                    await client.publish(topic(metrics()), b"x" * 20_000, 1)


# DHT


class Failing(MemoryRegistry):
    """A directory that can be lost."""

    is_lost = False

    async def models(self) -> list[ModelIdentity]:
        if self.is_lost:
            raise RegistryError("lost")
        return await super().models()


async def test_the_directory_is_looked_at_again_and_again() -> None:
    network, knowledge, states = MemoryNetwork(), Knowledge(), list[LinkState]()
    node = MemoryRegistry(network, identity(0))
    model = ModelIdentity("demo-target", FINGERPRINT, "b2" * 32, "c3" * 32, "d4" * 32, 12)
    record = NodeRecord(
        peer=node.peer_id,
        model=model,
        span=Span(0, 4),
        address="192.0.2.7:5000",
        state=NodeState.SERVING,
        numeric_class="cpu-float32",
        version="0.2.0",
        name=None,
        sweep_ms=(),
        kv_tokens_free=1,
        kv_tokens_total=2,
        sequence=1,
        expires_at=time.time() + 60,
    )
    await node.announce(record)
    opened: list[Failing] = []

    def open_registry() -> Registry:
        opened.append(Failing(network))
        return opened[-1]

    directory = Directory(
        open_registry, knowledge.apply_records, lambda state, _: states.append(state), knowledge.slots.choose
    )
    async with TaskScope() as scope:
        scope.spawn(directory.run(poll_s=0.01))
        await until(lambda: FINGERPRINT in knowledge.nodes(time.time()))
        await node.withdraw(replace(record, sequence=2))
        await until(lambda: FINGERPRINT not in knowledge.nodes(time.time()))
        opened[0].is_lost = True
        await until(lambda: len(opened) == 2 and states[-1] is LinkState.OK)
    assert LinkState.DOWN in states
