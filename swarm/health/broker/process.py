"""The embedded MQTT broker's process: amqtt behind bounds of our own. `python -m swarm.health.broker.process`.

One line of JSON on standard input holds the settings; one on standard output says where it listens. It ends when its
standard input closes, and when it uses too much memory. What amqtt 0.12 leaves open is closed here:

    it never enforces keep-alive                       `BoundedReader` does, so wills of cut-off nodes come
    it takes packets of 256 MB                         `MAX_PACKET_BYTES` is the limit
    it sends retained messages to every client         to subscribers only
    any client may subscribe and publish anything      only the service subscribes, nodes publish their topics
    it reads as fast as anybody writes                 `BoundedReader` reads no faster than its address may send
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
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

from swarm.base.logs import OneLineFormatter, set_up_logging
from swarm.base.quota import NEAR_WEIGHT, UNKNOWN, Quota, QuotaLimits, RateLimit, address_key, is_private

MAX_PACKET_BYTES = 16_384
MAX_CONNECTIONS = 2_048
MAX_RETAINED = 4_096
RETAINED_S = 900.0
"""How long a retained status is kept without a newer one: longer than telemetry counts."""
MAX_MEMORY_BYTES = 512 * 2**20
CONNECT_S = 10.0
SILENT_S = 3_600.0
"""Longest silence of a client that asked for no keep-alive."""
EXPIRE_S = 5.0
PACKETS = "packets"
LIMITS = QuotaLimits(rates={PACKETS: RateLimit(per_key=40, burst=400, total=1e6, total_burst=1e6)})
"""Of an address: a packet is one, and each KiB of it. A node sends one in two seconds, so 80 of them may share one."""
_CONNECT = 0x10
_ACKNOWLEDGEMENTS = range(0x40, 0x80)
"""First bytes of packets that answer what the broker sent: only its own subscriber has any."""
_HEAD_BYTES = 16


class PacketQuota:
    """How fast the packets of each address are read: who sends more waits, as on a slow line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = Quota(LIMITS, clock, lambda key: NEAR_WEIGHT if key == UNKNOWN or is_private(key) else 1)

    def charge(self, key: str, amount: float) -> float:
        """Something was read from this address; returns seconds until more of it should be."""
        self._quota.charge(PACKETS, key, amount)
        return self._quota.wait_s(PACKETS, key, 0.0)


class BoundedReader(StreamReaderAdapter):  # type: ignore[misc]  # amqtt has no types
    """What a client sends, within bounds: small packets, few of them, and something within 1.5 times its keep-alive."""

    def __init__(self, reader: asyncio.StreamReader, quota: PacketQuota, key: str) -> None:
        super().__init__(reader)
        self._quota, self._key = quota, key
        self._boundary = PacketBoundary()
        self._wait_s = 0.0
        self._head = b""
        self._limit_s = CONNECT_S
        self._heard_at = time.monotonic()
        self._is_over = False

    async def read(self, n: int = -1) -> bytes:
        """The next `n` bytes.

        Raises:
            ConnectionResetError: too many, or too late; the connection is over.
        """
        if self._is_over or n > MAX_PACKET_BYTES:
            self._is_over = True
            raise ConnectionResetError
        if self._wait_s > 0:
            await asyncio.sleep(self._wait_s)
            self._heard_at = time.monotonic()  # that was no silence of the client's
        try:
            async with asyncio.timeout(max(self._heard_at + self._limit_s - time.monotonic(), 0.0)):
                data: bytes = await super().read(n)
        except TimeoutError:
            self._is_over = True
            raise ConnectionResetError from None
        self._heard_at = time.monotonic()
        cost = self._boundary.take(data)
        self._wait_s = self._quota.charge(self._key, cost) if cost else 0.0
        if len(self._head) < _HEAD_BYTES:
            self._head += data[:_HEAD_BYTES]
            keep_alive_s = read_keep_alive(self._head)
            if keep_alive_s is not None:
                self._limit_s = 1.5 * keep_alive_s or SILENT_S
        return data


class PacketBoundary:
    """Where packets begin in what amqtt reads: the first byte and those of the length one by one, then the rest."""

    def __init__(self) -> None:
        self._kind: int | None = None
        self._length = self._shift = self._left = 0

    def take(self, data: bytes) -> float:
        """What these bytes, read next, cost: 0 within a packet, whose cost is that of its length."""
        if not data:
            return 0.0
        if self._left:
            self._left -= min(len(data), self._left)
            return 0.0
        if self._kind is None:
            self._kind, self._length, self._shift = data[0], 0, 0
            return 0.0
        self._length += (data[0] & 0x7F) << self._shift
        self._shift += 7
        if data[0] & 0x80:
            return 0.0
        kind, self._kind, self._left = self._kind, None, self._length
        return 0.0 if kind in _ACKNOWLEDGEMENTS else 1.0 + min(self._length, MAX_PACKET_BYTES) / 1_024


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
    """Authenticates the service by its secret; without a password file it lets every node in."""

    @dataclass
    class Config:
        """Settings from the service.

        Attributes:
            own_user: the service's user.
            own_secret: its password.
            is_open: there is no password file.
        """

        own_user: str
        own_secret: str
        is_open: bool

    async def authenticate(self, *, session: Session) -> bool | None:
        """Whether this client may connect; None where the password file decides."""
        if session.username == self.config.own_user:
            return bool(session.password == self.config.own_secret)
        return True if self.config.is_open else None


class PasswordAuth(FileAuthPlugin):  # type: ignore[misc]  # amqtt has no types
    """Authenticates nodes by the password file, in which the service itself does not stand."""

    @dataclass
    class Config(FileAuthPlugin.Config):  # type: ignore[misc]  # amqtt has no types
        """Where the file is, and which user is not looked up in it."""

        own_user: str = ""

    async def authenticate(self, *, session: Session) -> bool | None:
        if session.username == self.config.own_user:
            return None
        return bool(session.username) and bool(await super().authenticate(session=session))


class TopicAcl(BaseTopicPlugin):  # type: ignore[misc]  # amqtt has no types
    """Nodes publish telemetry and read nothing; the service reads."""

    @dataclass
    class Config:
        """Settings from the service.

        Attributes:
            own_user: the one user that may subscribe.
            prefix: first levels of the topics.
        """

        own_user: str
        prefix: str

    def __init__(self, context: BaseContext) -> None:
        super().__init__(context)
        below = r"/v[0-9]+/[0-9a-f]{8,128}/[1-9A-HJ-NP-Za-km-z]{40,64}/(status|metrics|events|receipts)"
        self._published = re.compile(re.escape(self.config.prefix) + below)

    async def topic_filtering(
        self, *, session: Session | None = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        """Whether the client may publish to the topic, or subscribe to it."""
        if action is Action.PUBLISH:
            return topic is not None and self._published.fullmatch(topic) is not None
        return session is not None and session.username == self.config.own_user


class BoundedBroker(Broker):  # type: ignore[misc]  # amqtt has no types
    """amqtt, with retained messages for subscribers only and for a bounded time."""

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Session
    ) -> None:
        subscribers = self._subscriptions.get(subscription[0], [])
        if any(subscriber.client_id == session.client_id for subscriber, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)

    async def expire_retained(self, first_seen: dict[str, tuple[int, float]]) -> None:
        """Drop retained messages that are too old or too many; wills pass no topic check, so they are bounded here."""
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


def make_broker(settings: dict[str, Any]) -> BoundedBroker:
    """The broker with the service's settings; `serve` brings it connections."""
    user = settings["own_user"]
    plugins: dict[str, Any] = {
        _plugin(ServiceAuth): {
            "own_user": user,
            "own_secret": settings["own_secret"],
            "is_open": settings["passwords"] is None,
        },
        _plugin(TopicAcl): {"own_user": user, "prefix": settings["prefix"]},
    }
    if settings["passwords"] is not None:
        plugins[_plugin(PasswordAuth)] = {"password_file": settings["passwords"], "own_user": user}
    config = {
        "listeners": {"default": {"type": "external", "bind": "-"}},
        "timeout_disconnect_delay": 0,
        "session_expiry_interval": 60,
        "plugins": plugins,
    }
    return BoundedBroker(BrokerConfig.from_dict(config))


def _plugin(plugin: type) -> str:
    """The path by which amqtt imports a plugin; under `python -m` this module's own name is `__main__`."""
    return f"swarm.health.broker.process.{plugin.__name__}"


async def serve(settings: dict[str, Any]) -> None:
    broker = make_broker(settings)
    await broker.start()
    connections, quota = 0, PacketQuota()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            if connections <= MAX_CONNECTIONS:
                peer = writer.get_extra_info("peername") or ("",)
                bounded = BoundedReader(reader, quota, address_key(str(peer[0])))
                with suppress(ConnectionError, TimeoutError):
                    await broker.external_connected(bounded, StreamWriterAdapter(writer), "default")
        finally:
            connections -= 1
            writer.close()

    server = await asyncio.start_server(connected, settings["host"], settings["port"], limit=2 * MAX_PACKET_BYTES)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201 - the answer
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_watch(broker))
        await _input_closed()
        watch.cancel()
    server.close()
    await broker.shutdown()


async def _watch(broker: BoundedBroker) -> None:
    first_seen: dict[str, tuple[int, float]] = {}
    process = psutil.Process()
    while True:
        await asyncio.sleep(EXPIRE_S)
        await broker.expire_retained(first_seen)
        if process.memory_info().rss > MAX_MEMORY_BYTES:
            raise MemoryError(f"more than {MAX_MEMORY_BYTES >> 20} MiB")


async def _input_closed() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1_024):
        pass


def main() -> None:
    set_up_logging("CRITICAL", OneLineFormatter("%(message)s"))
    settings = json.loads(sys.stdin.readline())
    try:
        asyncio.run(serve(settings))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201 - the answer
        sys.exit(1)


if __name__ == "__main__":
    main()
