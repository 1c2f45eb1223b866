"""The health service's ear at the broker: subscribes, lets the guard judge, comes back after every outage."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable

import aiomqtt

from swarm.health.state.assessment import LinkState
from swarm.telemetry.broker_address import BrokerAddress
from swarm.telemetry.guard import AcceptedMessage, TelemetryGuard

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 10
CONNECT_S = 10.0
MAX_WAITING = 8_192
"""Messages that wait to be judged; more are dropped, the broker's own queue being no place for them either."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
AT_ONCE = 64
"""Messages judged before the loop may do other things."""


class Feed:
    """One subscription; `run` never ends by itself.

    heard: called with what is believed and the time. changed: called when the connection comes or goes.
    """

    def __init__(
        self,
        guard: TelemetryGuard,
        prefix: str,
        heard: Callable[[AcceptedMessage, float], None],
        changed: Callable[[LinkState, float], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._guard, self._topics = guard, f"{prefix}/v1/+/+/+"
        self._heard, self._changed, self._clock = heard, changed, clock
        self._rng = random.SystemRandom()
        self._was_connected = False

    async def run(self, address: Callable[[], BrokerAddress]) -> None:
        """Listen, and come back after every outage; `address` is asked each time."""
        pause_s, is_told = FIRST_PAUSE_S, False
        while True:
            try:
                await self._listen(address())
            except (aiomqtt.MqttError, OSError) as error:
                self._changed(LinkState.DOWN, self._clock())
                if not is_told or self._was_connected:
                    logger.warning("the MQTT broker does not answer (%s); trying again", error)
                    is_told = True
            if self._was_connected:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

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
            self._changed(LinkState.CONNECTED, self._clock())
            logger.info("listening at %s", address)
            judged = 0
            async for message in client.messages:
                self._judge(message)
                judged += 1
                if judged % AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _judge(self, message: aiomqtt.Message) -> None:
        payload = message.payload if isinstance(message.payload, bytes) else b""
        now = self._clock()
        verdict = self._guard.accept(message.topic.value, payload, message.retain, now)
        match verdict:
            case AcceptedMessage():
                self._heard(verdict, now)
            case _:
                logger.debug("%s: %s", message.topic.value[:200], verdict.reason)


def _check_cancelled() -> None:
    """Leave if this task was cancelled: `asyncio.wait_for` of Python 3.11 may lose that, and the library uses it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
