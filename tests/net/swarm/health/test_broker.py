"""An embedded broker that crashes or hangs is started again; nodes and the health service come back by themselves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from node.life.publisher import Address, Outbox, PublishIntervals, TelemetryPublisher
from swarm.base.tasks import TaskScope
from swarm.health.broker.supervisor import EmbeddedBroker, LivenessChecks
from swarm.health.state.mqtt_feed import MqttFeed
from swarm.health.state.overview import Overview
from swarm.health.state.verdict import LinkState
from swarm.status.guard import AcceptedMessage, TelemetryGuard
from swarm.status.messages import Metrics, Presence, Receipts, Stamp, Status
from tests.telemetry_messages import FINGERPRINT, identity, metrics, status

PACE = PublishIntervals(
    metrics_s=0.1, answer_s=0.5, first_wait_s=0.05, longest_wait_s=0.1, leave_s=1.0, jitter=lambda: 0.5
)


class Speaker:
    """A node's words."""

    def status(self, stamp: Stamp, *, is_birth: bool, leaving: bool) -> Status:
        state = Presence.LEFT if leaving else Presence.SERVING
        return status(stamp.at, stamp.seq, stamp.nonce, is_birth=is_birth, state=state)

    def metrics(self, stamp: Stamp) -> Metrics:
        return metrics(stamp.at, stamp.seq, stamp.nonce)

    def receipts(self, stamp: Stamp, *, is_first: bool) -> Receipts | None:
        return Receipts(stamp, (b"sealed",))

    def published(self, receipts: Receipts) -> None:
        pass


@dataclass
class Observatory:
    """A broker, a node that tells, and who listens. born: how many connections of the node were believed."""

    broker: EmbeddedBroker
    overview: Overview = field(default_factory=lambda: Overview(["/ip4/x"], "canopy", 0.0))
    born: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def heard(self, one: AcceptedMessage, now: float) -> None:
        self.born += isinstance(one.body, Status) and one.body.is_birth
        self.overview.knowledge.apply_telemetry(one.peer, one.fingerprint, one.body, now)
        self._news.set()

    def changed(self, state: LinkState, now: float) -> None:
        self.overview.set_broker_state(state, now)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def process_id(self) -> int:
        process = self.broker._process
        assert process is not None
        return process.pid


@asynccontextmanager
async def observatory() -> AsyncIterator[Observatory]:
    checks = LivenessChecks(every_s=0.2, answer_s=1.0, max_misses=2)
    async with EmbeddedBroker("127.0.0.1", 0, "canopy", None, checks) as broker, TaskScope() as scope:
        made = Observatory(broker)
        scope.spawn(broker.supervise())
        scope.spawn(MqttFeed(TelemetryGuard(), "canopy", made.heard, made.changed).run(broker.own_address))
        await made.until(lambda: made.overview.broker.state is LinkState.CONNECTED)
        address = Address(broker.address, "canopy", FINGERPRINT, identity(0))
        async with TelemetryPublisher(address, Speaker(), Outbox(), lambda _: None, PACE):
            await made.until(lambda: made.born == 1)
            yield made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["crashes", "hangs"])
async def test_a_broker_that_ends_or_hangs_is_replaced_and_everybody_comes_back(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    async with observatory() as made:
        first = made.process_id()
        os.kill(first, number)
        await made.until(lambda: made.overview.broker.state is LinkState.DOWN)
        now = made.overview.broker.since
        for second in (0.0, 6.0):
            made.overview.assess(now + second)
        (alert,) = made.overview.alerts.open()
        assert alert.finding.kind == "broker"
        assert made.overview.state([], now)["sources"]["broker"]["state"] == "down", "the page says so meanwhile"
        await made.until(lambda: made.overview.broker.state is LinkState.CONNECTED and made.born == 2)
        assert made.process_id() != first
    assert ("the embedded broker does not answer" in caplog.text) is (number is signal.SIGSTOP)
    assert "starting it again" in caplog.text


async def test_a_broker_that_lives_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with observatory() as made:
        first, asked = made.process_id(), 0
        answers = made.broker._answers

        async def counted() -> bool:
            nonlocal asked
            asked += await answers()
            made._news.set()
            return True

        made.broker._answers = counted  # type: ignore[method-assign]
        await made.until(lambda: asked >= 5)
        assert (made.process_id(), made.born) == (first, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
