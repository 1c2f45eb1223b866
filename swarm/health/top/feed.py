"""Where `swarm top` gets its state from: a health service's event stream, or the DHT alone. Draws nothing.

A connection that breaks or falls silent is opened again with back-off; `LatestState` holds the newest state meanwhile,
and its age.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx2

from swarm.base.errors import RegistryError, RemoteProtocolError
from swarm.directory.dht.addresses import Membership
from swarm.health.remote.client import MAX_ANSWER_BYTES, STATE, TIMEOUT, ask_bytes, reason
from swarm.health.remote.state import State, read_state

STREAM: Final = "api/v1/stream"
STALE_S: Final = 15.0
"""A state that was not renewed for so long is old: a working service makes a new one every 5 s."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 15.0
DHT_S: Final = 5.0


@dataclass(slots=True)
class LatestState:
    """The newest state, and how fresh it is.

    Attributes:
        changed: called after every change.
        clock: seconds, monotonic.
        trouble: what went wrong last; None while all is well.
        renewed_at: when a newer state last came, by `clock`.
    """

    changed: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    state: State | None = None
    trouble: str | None = None
    renewed_at: float = field(default=0.0)

    def take(self, state: State) -> None:
        """Take in a state; one that is not newer than the one shown renews nothing."""
        before = self.state
        if before is not None and before.started_at == state.started_at and state.at <= before.at:
            return
        self.state, self.trouble, self.renewed_at = state, None, self.clock()
        self.changed()

    def fail(self, reason: str) -> None:
        """Note that the connection broke, or brought something unreadable."""
        self.trouble = reason
        self.changed()

    @property
    def silent_s(self) -> float:
        """Seconds since the state was renewed."""
        return self.clock() - self.renewed_at

    @property
    def is_stale(self) -> bool:
        """Whether the state is too old to be trusted."""
        return self.state is not None and self.silent_s > STALE_S

    @property
    def now(self) -> float:
        """The service's clock now, whatever this machine's clock says."""
        return 0.0 if self.state is None else self.state.at + self.silent_s


async def ask(client: httpx2.AsyncClient, url: httpx2.URL) -> State:
    """The state, checked.

    Raises:
        RegistryError: nobody answers there, or it is no health service.
    """
    try:
        return read_state(await ask_bytes(client, url, STATE))
    except RemoteProtocolError as error:
        raise RegistryError(f"{url} is no health service of this version: {error}") from error


async def follow(client: httpx2.AsyncClient, url: httpx2.URL, watched: LatestState) -> None:
    rng = random.SystemRandom()
    pause_s = FIRST_PAUSE_S
    while True:
        before = watched.renewed_at
        try:
            async with client.stream("GET", url.join(STREAM), timeout=TIMEOUT) as answer:
                if answer.status_code != httpx2.codes.OK:
                    watched.fail(f"the service answered {answer.status_code}")
                else:
                    await _read(answer, watched)
                    watched.fail("the service ended the stream")
        except httpx2.RequestError as error:
            watched.fail(reason(error))
        pause_s = FIRST_PAUSE_S if watched.renewed_at != before else min(2 * pause_s, MAX_PAUSE_S)
        await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))


async def _read(answer: httpx2.Response, watched: LatestState) -> None:
    async for event in httpx2.EventSource(answer, MAX_ANSWER_BYTES):
        if event.event != "state":
            continue
        try:
            watched.take(read_state(event.data))
        except RemoteProtocolError as error:
            watched.fail(str(error))


async def poll_dht(join: Sequence[str], membership: Membership, watched: LatestState) -> None:
    """Poll the DHT, for ever: verdicts and machines without load, probes or history."""
    from swarm.directory.dht.registry import DhtConfig, DhtRegistry
    from swarm.health.state.directory import Directory
    from swarm.health.state.overview import Overview
    from swarm.health.state.verdict import LinkState

    overview = Overview(join, "DHT only", time.time())

    def changed(link: LinkState, now: float) -> None:
        overview.set_dht_state(link, now)
        if link is not LinkState.OK:
            watched.fail("the DHT does not answer")
            return
        watched.take(State.model_validate(overview.state(overview.assess(now), now)))

    config = DhtConfig(join=tuple(join), client_mode=True, membership=membership)
    knowledge = overview.knowledge
    await Directory(lambda: DhtRegistry.open(config), knowledge.apply_records, changed, knowledge.slots.choose).run(
        DHT_S
    )
