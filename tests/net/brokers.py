"""MQTT for tests: a real mosquitto, a broker that answers from a script, a link that can be cut, a listener."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiomqtt

from swarm.base.tasks import TaskScope
from swarm.status.guard import AcceptedMessage, RejectedMessage, TelemetryGuard
from swarm.status.messages import Body

CONNACK = b"\x20\x02\x00\x00"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def mosquitto(folder: Path, port: int, *lines: str) -> Iterator[None]:
    """Run mosquitto on 127.0.0.1; it accepts connections once this is entered. `lines` go to its configuration."""
    rules = lines or ("allow_anonymous true",)
    config = folder / f"{port}.conf"
    settings = ["per_listener_settings true", "user root", "persistence false"]
    config.write_text("\n".join([*settings, f"listener {port} 127.0.0.1", *rules]) + "\n")
    process = subprocess.Popen(["mosquitto", "-c", str(config)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        printed = []
        for line in process.stderr:
            printed.append(line)
            if "running" in line:
                break
        assert process.poll() is None, printed
        yield
    finally:
        process.terminate()
        process.wait(10)
        process.stderr.close()


@dataclass
class TelemetryListener:
    """All messages below `canopy/`, as the guard judges them.

    Attributes:
        accepted: bodies that the guard accepted, in order.
        rejected: what it rejected.
        raw: every message as it came.
        guard: the judge.
    """

    accepted: list[Body] = field(default_factory=list)
    rejected: list[RejectedMessage] = field(default_factory=list)
    raw: list[aiomqtt.Message] = field(default_factory=list)
    guard: TelemetryGuard = field(default_factory=TelemetryGuard)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            assert isinstance(message.payload, bytes)
            self.raw.append(message)
            verdict = self.guard.accept(message.topic.value, message.payload, message.retain, time.time())
            if isinstance(verdict, AcceptedMessage):
                self.accepted.append(verdict.body)
            else:
                self.rejected.append(verdict)
            self._news.set()

    async def until(self, wanted: Callable[[Body], bool], seconds: float = 10.0) -> Body:
        """The first accepted body for which `wanted` is true, whether it has come or is still to come."""
        async with asyncio.timeout(seconds):
            while True:
                for body in self.accepted:
                    if wanted(body):
                        return body
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def listener_at(port: int) -> AsyncIterator[TelemetryListener]:
    """A listener that is subscribed once this is entered."""
    listener = TelemetryListener()
    async with aiomqtt.Client("127.0.0.1", port) as client, TaskScope() as scope:
        await client.subscribe("canopy/#", qos=1)
        scope.spawn(listener.listen(client))
        yield listener


class CuttableLink:
    """A proxy of a port: `cut` aborts all connections; while it is shut it accepts none."""

    def __init__(self, target: int, *, shut: bool = False) -> None:
        self.port = 0
        self.shut = shut
        self._target = target
        self._ends: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.shut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._ends += [writer, far_writer]
        async with TaskScope() as scope:
            scope.spawn(_pass(far_reader, writer))
            await _pass(reader, far_writer)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()
    except OSError:
        writer.transport.abort()


@asynccontextmanager
async def cuttable_link(target: int, *, shut: bool = False) -> AsyncIterator[CuttableLink]:
    link = CuttableLink(target, shut=shut)
    server = await asyncio.start_server(link.carry, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        link.cut()
        await server.wait_closed()


@dataclass
class ScriptedBroker:
    """A server that sends its answers one by one, each after it received something, and then nothing more.

    Attributes:
        answers: bytes to send.
        port: where it listens.
        visits: connections so far.
        visited: set at every connection.
    """

    answers: Sequence[bytes]
    port: int = 0
    visits: int = 0
    visited: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: list[asyncio.StreamWriter] = field(default_factory=list)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        self.visited.set()
        self._ends.append(writer)
        try:
            for answer in self.answers:
                if not await reader.read(65_536):
                    break
                writer.write(answer)
            while await reader.read(65_536):
                pass
        except OSError:
            pass
        writer.close()

    async def until_visits(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.visits < count:
                self.visited.clear()
                await self.visited.wait()


@asynccontextmanager
async def scripted_broker(*answers: bytes) -> AsyncIterator[ScriptedBroker]:
    """A broker that sends these answers."""
    broker = ScriptedBroker(answers)
    server = await asyncio.start_server(broker.receive, "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    try:
        yield broker
    finally:
        server.close()
        for end in broker._ends:
            end.transport.abort()
        await server.wait_closed()
