"""The embedded MQTT broker's process: amqtt behind bounds of our own. `python -m swarm.health.broker.process`.

One line of JSON on standard input says what to do; one on standard output says where it listens. It ends when its
standard input closes, and when it grows too large. What amqtt 0.12 leaves open is closed here:

    it never enforces keep-alive                       `BoundedReader` does, so wills of cut-off nodes come
    it takes packets of 256 MB                         of `MAX_PACKET_BYTES`
    it sends what is retained to whoever connects      to subscribers only
    anybody may subscribe, publish and retain anything only the service subscribes, nodes publish their topics
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import Action, BaseContext, BrokerConfig
from amqtt.plugins.authentication import FileAuthPlugin
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin
from amqtt.session import Session

MAX_PACKET_BYTES = 16_384
MAX_CONNECTIONS = 2_048
MAX_RETAINED = 4_096
RETAINED_S = 900.0
"""How long a retained status is kept without a newer one: longer than anybody may believe it."""
MAX_MEMORY_BYTES = 512 * 2**20
HELLO_S = 10.0
SILENT_S = 3_600.0
"""For a client that asked for no keep-alive."""
SWEEP_S = 5.0
_CONNECT = 0x10
_HEAD_BYTES = 16


class BoundedReader(StreamReaderAdapter):  # type: ignore[misc]  # amqtt has no types
    """What a client sends: small packets, and something within 1.5 times its keep-alive."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._head = b""
        self._limit_s = HELLO_S
        self._heard_at = time.monotonic()
        self._is_over = False

    async def read(self, n: int = -1) -> bytes:
        """The next `n` bytes.

        Raises:
            ConnectionResetError: too many, or too late; nothing comes any more.
        """
        if self._is_over or n > MAX_PACKET_BYTES:
            self._is_over = True
            raise ConnectionResetError
        try:
            async with asyncio.timeout(max(self._heard_at + self._limit_s - time.monotonic(), 0.0)):
                data: bytes = await super().read(n)
        except TimeoutError:
            self._is_over = True
            raise ConnectionResetError from None
        self._heard_at = time.monotonic()
        if len(self._head) < _HEAD_BYTES:
            self._head += data[:_HEAD_BYTES]
            keep_alive_s = read_keep_alive(self._head)
            if keep_alive_s is not None:
                self._limit_s = 1.5 * keep_alive_s or SILENT_S
        return data


def read_keep_alive(head: bytes) -> int | None:
    """Seconds of keep-alive that a CONNECT packet asks for, from its first bytes; None while they are not all here."""
    if not head or head[0] != _CONNECT:
        return None
    length_bytes = next((at for at in range(1, min(len(head), 5)) if not head[at] & 0x80), None)
    if length_bytes is None:
        return None
    name_at = length_bytes + 1
    end = name_at + 2 + int.from_bytes(head[name_at : name_at + 2]) + 4
    return int.from_bytes(head[end - 2 : end]) if len(head) >= end and end <= _HEAD_BYTES else None


class ServiceAuth(BaseAuthPlugin):  # type: ignore[misc]  # amqtt has no types
    """Lets the service in by its secret, and nodes by the password file, or all of them where there is none."""

    @dataclass
    class Config:
        """What the service told."""

        own_user: str
        own_secret: str
        is_open: bool

    async def authenticate(self, *, session: Session) -> bool | None:
        """Whether this one may come in; None where the password file decides."""
        if session.username == self.config.own_user:
            return bool(session.password == self.config.own_secret)
        return True if self.config.is_open else None


class PasswordAuth(FileAuthPlugin):  # type: ignore[misc]  # amqtt has no types
    """The password file; the service itself is not in it."""

    @dataclass
    class Config(FileAuthPlugin.Config):  # type: ignore[misc]  # amqtt has no types
        """Where the file is, and who is not looked up in it."""

        own_user: str = ""

    async def authenticate(self, *, session: Session) -> bool | None:
        """Whether user and password are in the file."""
        if session.username == self.config.own_user:
            return None
        return bool(session.username) and bool(await super().authenticate(session=session))


class TopicAcl(BaseTopicPlugin):  # type: ignore[misc]  # amqtt has no types
    """Nodes publish telemetry and read nothing; the service reads."""

    @dataclass
    class Config:
        """What the service told."""

        own_user: str
        prefix: str

    def __init__(self, context: BaseContext) -> None:
        super().__init__(context)
        below = r"/v[0-9]+/[0-9a-f]{8,128}/[1-9A-HJ-NP-Za-km-z]{40,64}/(status|metrics|events)"
        self._published = re.compile(re.escape(self.config.prefix) + below)

    async def topic_filtering(
        self, *, session: Session | None = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        """Whether this may be done."""
        if action is Action.PUBLISH:
            return topic is not None and self._published.fullmatch(topic) is not None
        return session is not None and session.username == self.config.own_user


class BoundedBroker(Broker):  # type: ignore[misc]  # amqtt has no types
    """amqtt that keeps what is retained to subscribers."""

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Session
    ) -> None:
        subscribers = self._subscriptions.get(subscription[0], [])
        if any(subscriber.client_id == session.client_id for subscriber, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)

    async def sweep(self, first_seen: dict[str, tuple[int, float]]) -> None:
        """Let go of what was retained too long, or is too much; wills pass no topic check, so it is done here."""
        now = time.monotonic()
        for topic, message in self._retained_messages.items():
            seen = first_seen.get(topic)
            if seen is None or seen[0] != id(message):
                first_seen[topic] = id(message), now
        for topic in [topic for topic in first_seen if topic not in self._retained_messages]:
            del first_seen[topic]
        by_age = sorted(first_seen, key=lambda topic: first_seen[topic][1])
        too_many = by_age[: max(len(by_age) - MAX_RETAINED, 0)]
        for topic in {*too_many, *(topic for topic in by_age if now - first_seen[topic][1] > RETAINED_S)}:
            await self.retain_message(None, topic, b"")


def make_broker(told: dict[str, Any]) -> BoundedBroker:
    """The broker as the service wants it; it has no listener of its own."""
    here, user = "swarm.health.broker.process", told["own_user"]
    plugins: dict[str, Any] = {
        f"{here}.ServiceAuth": {
            "own_user": user,
            "own_secret": told["own_secret"],
            "is_open": told["passwords"] is None,
        },
        f"{here}.TopicAcl": {"own_user": user, "prefix": told["prefix"]},
    }
    if told["passwords"] is not None:
        plugins[f"{here}.PasswordAuth"] = {"password_file": told["passwords"], "own_user": user}
    config = {
        "listeners": {"default": {"type": "external", "bind": "-"}},
        "timeout_disconnect_delay": 0,
        "session_expiry_interval": 60,
        "plugins": plugins,
    }
    return BoundedBroker(BrokerConfig.from_dict(config))


async def serve(told: dict[str, Any]) -> None:
    """Run until standard input closes."""
    broker = make_broker(told)
    await broker.start()
    open_now = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        try:
            if open_now <= MAX_CONNECTIONS:
                with suppress(ConnectionError, TimeoutError):
                    await broker.external_connected(BoundedReader(reader), StreamWriterAdapter(writer), "default")
        finally:
            open_now -= 1
            writer.close()

    server = await asyncio.start_server(connected, told["host"], told["port"], limit=2 * MAX_PACKET_BYTES)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201 - the answer
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_watch(broker))
        await _input_closed()
        watch.cancel()
    server.close()
    await broker.shutdown()


async def _watch(broker: BoundedBroker) -> None:
    first_seen: dict[str, tuple[int, float]] = {}
    this = psutil.Process()
    while True:
        await asyncio.sleep(SWEEP_S)
        await broker.sweep(first_seen)
        if this.memory_info().rss > MAX_MEMORY_BYTES:
            raise MemoryError(f"more than {MAX_MEMORY_BYTES >> 20} MiB")


async def _input_closed() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1_024):
        pass


def main() -> None:
    """Entry point."""
    logging.basicConfig(level=logging.CRITICAL)
    told = json.loads(sys.stdin.readline())
    try:
        asyncio.run(serve(told))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201 - the answer
        sys.exit(1)


if __name__ == "__main__":
    main()
