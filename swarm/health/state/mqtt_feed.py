"""The health service's MQTT client: subscribes, passes messages to the guard, reconnects after every outage."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable

import aiomqtt

from swarm.health.state.verdict import LinkState
from swarm.link.broker_address import BrokerAddress
from swarm.status.guard import AcceptedMessage, TelemetryGuard

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 10
CONNECT_S = 10.0
MAX_WAITING = 8_192
"""Messages that wait for the guard; more are dropped."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
MESSAGES_PER_TURN = 64
"""Messages handled before the event loop may do other work."""


class MqttFeed:
    """One subscription; `run` never ends by itself."""

    def __init__(
        self,
        guard: TelemetryGuard,
        prefix: str,
        on_message: Callable[[AcceptedMessage, float], None],
        on_link_change: Callable[[LinkState, float], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._guard, self._topics = guard, f"{prefix}/v1/+/+/+"
        self._on_message, self._on_link_change, self._clock = on_message, on_link_change, clock
        self._rng = random.SystemRandom()
        self._was_connected = False

    async def run(self, address: Callable[[], BrokerAddress]) -> None:
        """Listen, and reconnect after every outage; `address` is called before each attempt."""
        pause_s, is_reported = FIRST_PAUSE_S, False
        while True:
            try:
                await self._listen(address())
            except (aiomqtt.MqttError, OSError) as error:
                self._on_link_change(LinkState.DOWN, self._clock())
                if not is_reported or self._was_connected:
                    logger.warning("the MQTT broker does not answer (%s); trying again", error)
                    is_reported = True
            if self._was_connected:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _listen(self, address: BrokerAddress) -> None:
        self._was_connected = False
        client = aiomqtt.Client(
            address.host,
            address.port,
            username=address.user,
            password=address.password,
            tls_context=address.tls,
            identifier=f"canopy-health-{secrets.token_hex(6)}",
            keepalive=KEEP_ALIVE_S,
            timeout=CONNECT_S,
            max_queued_incoming_messages=MAX_WAITING,
            logger=logging.getLogger(f"{__name__}.mqtt"),
        )
        async with client:
            await client.subscribe(self._topics, qos=1)
            _check_cancelled()
            self._was_connected = True
            self._on_link_change(LinkState.CONNECTED, self._clock())
            logger.info("listening at %s", address)
            handled = 0
            async for message in client.messages:
                self._handle(message)
                handled += 1
                if handled % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)

    def _handle(self, message: aiomqtt.Message) -> None:
        payload = message.payload if isinstance(message.payload, bytes) else b""
        now = self._clock()
        verdict = self._guard.accept(message.topic.value, payload, message.retain, now)
        match verdict:
            case AcceptedMessage():
                try:
                    self._on_message(verdict, now)
                except Exception as error:
                    logger.warning("a message of %s cannot be taken in", verdict.peer, exc_info=error)
            case _:
                logger.debug("%s: %s", message.topic.value[:200], verdict.reason)


def _check_cancelled() -> None:
    """Leave if this task was cancelled: `asyncio.wait_for` of Python 3.11 may lose that, and the library uses it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
