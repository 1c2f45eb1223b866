"""Publishes a node's telemetry over MQTT: connects, signs, sends, connects again. Owns neither content nor order.

One connection has one nonce: the will is signed with it at the start, the birth is the first message, and all that
follow are counted. Whatever a broker does, serving goes on: one message at a time is under way, each with a deadline,
and no error leaves this file.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

import aiomqtt

from swarm.base.tasks import TaskScope
from swarm.directory.identity import Identity
from swarm.link.broker_address import BrokerAddress
from swarm.status.messages import (
    METRICS_S,
    STATUS_S,
    Body,
    Event,
    EventKind,
    MessageKind,
    Metrics,
    Receipts,
    RefutedPart,
    Stamp,
    Status,
    Will,
    seal_body,
    topic_of,
)

logger = logging.getLogger(__name__)

# What a node has yet to publish over MQTT: the newest status and metrics, a few events. Bounded; never blocks.
#
# Status and metrics are made when they leave, so only the fact that they are due is kept: old ones are never sent. When
# there are too many events, the oldest are dropped.

MAX_EVENTS: Final = 32
"""Fewer than `swarm.status.guard.BURST_MESSAGES`: what waited for a broker may come all at once."""


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event that has not left yet."""

    event: EventKind
    text: str
    refuted: RefutedPart | None = None


Due = PendingEvent | MessageKind


class Outbox:
    """A queue whose order is by kind: status first, then events, receipts and metrics.

    Attributes:
        dropped: how many events were dropped.
        leaving: the node leaves; the status is the last message.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.leaving = False
        self._events: deque[PendingEvent] = deque()
        self._requested: set[MessageKind] = set()
        self._changed = asyncio.Event()

    def request(self, part: MessageKind) -> None:
        """The newest status or metrics are due."""
        self._requested.add(part)
        self._changed.set()

    def add_event(self, event: EventKind, text: str, refuted: RefutedPart | None = None) -> None:
        """Something happened."""
        if len(self._events) >= MAX_EVENTS:
            self._events.popleft()
            self.dropped += 1
        self._events.append(PendingEvent(event, text, refuted))
        self._changed.set()

    def leave(self) -> None:
        """Publish nothing more but what waits, and then the status."""
        self.leaving = True
        self.request(MessageKind.RECEIPTS)
        self.request(MessageKind.STATUS)

    async def next(self) -> Due:
        """What is to be published next; it stays due until `sent`."""
        while (due := self._first()) is None:
            self._changed.clear()
            await self._changed.wait()
        if isinstance(due, MessageKind):
            self._requested.discard(due)  # what changes from now on is news
        return due

    def sent(self, due: Due) -> None:
        """It has left."""
        if self._events and self._events[0] is due:
            self._events.popleft()

    def _first(self) -> Due | None:
        if MessageKind.STATUS in self._requested and not self.leaving:
            return MessageKind.STATUS
        if self._events:
            return self._events[0]
        if MessageKind.RECEIPTS in self._requested:
            return MessageKind.RECEIPTS
        if self.leaving:
            return MessageKind.STATUS
        return MessageKind.METRICS if MessageKind.METRICS in self._requested else None


MAX_INCOMING: Final = 8
"""A node subscribes to nothing; what a broker sends all the same is dropped."""

_silent = logging.getLogger(f"{__name__}.mqtt")
_silent.setLevel(logging.CRITICAL)  # an outage is reported once, and by this file


class Reporter(Protocol):
    """Makes the messages."""

    def status(self, stamp: Stamp, *, is_birth: bool, leaving: bool) -> Status:
        """What the node is now."""

    def metrics(self, stamp: Stamp) -> Metrics:
        """What it has done."""

    def receipts(self, stamp: Stamp, *, is_first: bool) -> Receipts | None:
        """What clients signed for, as much as one message holds; None where nothing waits.

        Args:
            is_first: whether it is the first of a connection.
        """

    def published(self, receipts: Receipts) -> None:
        """The broker has these."""


@dataclass(frozen=True, slots=True)
class PublishIntervals:
    """How often messages are published, and how long the publisher waits, in seconds."""

    metrics_s: float = METRICS_S
    status_s: float = STATUS_S
    keep_alive_s: int = 5
    answer_s: float = 10.0
    """For the broker's answer to one message."""
    first_wait_s: float = 1.0
    """Before the broker is tried again, the first time; then doubled each time, with jitter."""
    longest_wait_s: float = 60.0
    """No wait is longer, jitter apart."""
    steady_s: float = 10.0
    """After a connection that lived so long, the next wait is the first again."""
    leave_s: float = 2.0
    """For the last messages."""
    jitter: Callable[[], float] = random.random
    """Drawn from [0, 1): each wait is multiplied by half to one and a half."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node publishes, under which identity, and of which model."""

    broker: BrokerAddress
    prefix: str
    fingerprint: str
    identity: Identity

    def topic(self, part: MessageKind) -> str:
        """The node's topic for a part."""
        return topic_of(self.prefix, self.fingerprint, self.identity.peer_id, part)

    def seal(self, body: Body, part: MessageKind) -> bytes:
        """The payload for that topic."""
        return seal_body(body, self.topic(part), self.identity)


class TelemetryPublisher:
    """`async with TelemetryPublisher(…)`: entering does not wait, leaving sends the last status if it goes in time."""

    def __init__(
        self,
        address: Address,
        reporter: Reporter,
        outbox: Outbox,
        say: Callable[[str], None],
        intervals: PublishIntervals | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            say: takes a line when an outage begins and when it is over.
        """
        self._address = address
        self._reporter = reporter
        self._outbox = outbox
        self._say = say
        self._intervals = intervals or PublishIntervals()
        self._client_id = f"canopy-{secrets.token_hex(8)}"  # kept: a broker then drops the old connection for the new
        self._is_down = self._has_sent_receipts = False
        self._up_s: float | None = None
        self._left = asyncio.Event()
        self._scope = TaskScope()

    async def __aenter__(self) -> Self:
        """Begin."""
        await self._scope.__aenter__()
        self._scope.spawn(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the last messages if the broker is there, and end."""
        self._outbox.leave()
        try:
            if not self._is_down:
                async with asyncio.timeout(self._intervals.leave_s):
                    await self._left.wait()
        except TimeoutError:
            logger.info("left without saying so to the MQTT broker")
        finally:
            await self._scope.__aexit__(None, None, None)

    async def _run(self) -> None:
        """Connect again and again until the last message is sent."""
        wait_s = self._intervals.first_wait_s
        while not self._left.is_set():
            self._up_s = None
            try:
                await self._run_connection()
            except Exception as trouble:  # noqa: BLE001 - nothing that a broker does may end the node
                self._down(trouble)
            if self._up_s is not None and time.monotonic() - self._up_s > self._intervals.steady_s:
                wait_s = self._intervals.first_wait_s
            await self._pause(wait_s * (0.5 + self._intervals.jitter()))
            wait_s = min(2 * wait_s, self._intervals.longest_wait_s)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._left.wait()
        except TimeoutError:
            return

    def _down(self, trouble: Exception) -> None:
        if not self._is_down:
            self._is_down = True
            if not isinstance(trouble, aiomqtt.MqttError | OSError):
                logger.error("telemetry failed", exc_info=trouble)
            reason = str(trouble.__cause__ or trouble) or type(trouble).__name__
            self._say(f"no telemetry: the broker at {self._address.broker} fails ({reason}); serving goes on")

    def _up(self) -> None:
        self._say(f"telemetry goes to {self._address.broker}" + (" again" if self._is_down else ""))
        self._is_down = False
        self._up_s = time.monotonic()

    async def _run_connection(self) -> None:
        """One connection, from its opening to its end.

        Raises:
            Exception: whatever ended it.
        """
        nonce = secrets.token_hex(16)
        async with BrokerClient(self._client(nonce)) as client, TaskScope() as scope:
            scope.spawn(_watch(client))
            await self._send(client, MessageKind.STATUS, Stamp(nonce, 1, _now()), is_birth=True)
            self._up()
            scope.spawn(self._every(self._intervals.metrics_s, MessageKind.METRICS))
            scope.spawn(self._every(self._intervals.status_s, MessageKind.STATUS))
            self._outbox.request(MessageKind.RECEIPTS)
            self._has_sent_receipts = False
            scope.spawn(self._every(self._intervals.metrics_s, MessageKind.RECEIPTS))
            await self._send_due(client, nonce)

    def _client(self, nonce: str) -> aiomqtt.Client:
        address, broker = self._address, self._address.broker
        will = address.seal(Will(Stamp(nonce, 0, _now())), MessageKind.STATUS)
        return aiomqtt.Client(
            broker.host,
            broker.port,
            username=broker.user,
            password=broker.password,
            tls_context=broker.tls,
            identifier=self._client_id,
            will=aiomqtt.Will(address.topic(MessageKind.STATUS), will, qos=1, retain=True),
            clean_session=True,
            keepalive=self._intervals.keep_alive_s,
            timeout=self._intervals.answer_s,
            max_queued_incoming_messages=MAX_INCOMING,
            logger=_silent,
        )

    async def _every(self, seconds: float, part: MessageKind) -> None:
        while True:
            await asyncio.sleep(seconds)
            self._outbox.request(part)

    async def _send_due(self, client: aiomqtt.Client, nonce: str) -> None:
        """Send what is due, as long as the connection holds and the node stays."""
        sequence = 1
        while True:
            due = await self._outbox.next()
            sequence += 1
            await self._send(client, due, Stamp(nonce, sequence, _now()))
            self._outbox.sent(due)
            if self._outbox.leaving and due is MessageKind.STATUS:
                self._left.set()
                return

    async def _send(self, client: aiomqtt.Client, due: Due, stamp: Stamp, *, is_birth: bool = False) -> None:
        body = self._body(due, stamp, is_birth)
        if body is None:
            return
        part = MessageKind.EVENTS if isinstance(due, PendingEvent) else due
        payload = self._address.seal(body, part)
        qos = 0 if part is MessageKind.METRICS else 1
        await client.publish(self._address.topic(part), payload, qos=qos, retain=part is MessageKind.STATUS)
        if isinstance(body, Receipts):
            self._has_sent_receipts = True
            self._reporter.published(body)

    def _body(self, due: Due, stamp: Stamp, is_birth: bool) -> Body | None:
        match due:
            case PendingEvent():
                return Event(stamp, due.event, due.text, due.refuted)
            case MessageKind.RECEIPTS:
                return self._reporter.receipts(stamp, is_first=not self._has_sent_receipts)
            case MessageKind.METRICS:
                return self._reporter.metrics(stamp)
            case _:
                return self._reporter.status(stamp, is_birth=is_birth, leaving=self._outbox.leaving)


class BrokerClient:
    """An aiomqtt client that is left at once: its own way out waits, and its failed way in leaks a socket."""

    def __init__(self, client: aiomqtt.Client) -> None:
        self._client = client

    async def __aenter__(self) -> aiomqtt.Client:
        """Connect.

        Raises:
            MqttError: the broker refuses or does not answer in time.
        """
        try:
            return await self._client.__aenter__()
        except BaseException:
            await self._disconnect()
            raise

    async def __aexit__(self, *error: object) -> None:
        """Send the goodbye if that takes no waiting, and close."""
        await self._disconnect()

    async def _disconnect(self) -> None:
        paho = self._client._client
        # from now on nothing, not even a thread that still connects, asks the loop to watch a socket that is closed
        paho.on_socket_open = paho.on_socket_register_write = None
        await asyncio.sleep(0)  # what was asked before is done
        paho.disconnect()
        paho._sock_close()
        for outcome in (self._client._connected, self._client._disconnected):
            if outcome.done() and not outcome.cancelled():
                outcome.exception()  # or asyncio reports an exception that was never retrieved


async def _watch(client: aiomqtt.Client) -> None:
    """Raise as soon as the connection breaks, or brings a message."""
    async for _ in client.messages:
        raise aiomqtt.MqttError("it sends messages, and the node subscribed to none")


def _now() -> float:
    return round(time.time(), 3)
