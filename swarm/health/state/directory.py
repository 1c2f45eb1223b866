"""Reads every model and its records from the DHT, again and again; opens it anew when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from swarm.base.errors import SwarmError
from swarm.base.ids import ModelIdentity
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import Registry, name_models, read_models
from swarm.health.state.model import MISSES_UNTIL_GONE
from swarm.health.state.verdict import LinkState

logger = logging.getLogger(__name__)

POLL_S = 5.0
PAUSE_PER_LOOK = 20
"""The pause after a look-up is at least so many times as long as the look-up: checking 1,000 records is work."""
MAX_POLL_S = 20.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


class Directory:
    """Polls the DHT; `run` never ends by itself."""

    def __init__(
        self,
        open_registry: Callable[[], Registry],
        on_records: Callable[[str, Sequence[NodeRecord], float], None],
        on_state_change: Callable[[LinkState, float], None],
        choose: Callable[[Sequence[ModelIdentity], int], Sequence[ModelIdentity]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; asks nothing.

        Args:
            on_records: called per model with its fingerprint, its records and the time.
            on_state_change: called with the time when the DHT answers, or does not.
            choose: the models to look up, of all that there are, given the number of look-ups up to now.
            clock: Unix seconds.
        """
        self._open, self._choose, self._looks = open_registry, choose, 0
        self._on_records, self._on_state_change, self._clock = on_records, on_state_change, clock
        self._missed: dict[str, int] = {}
        self._failed: frozenset[str] = frozenset()

    async def run(self, poll_s: float = POLL_S) -> None:
        pause_s, is_reported = FIRST_PAUSE_S, False
        while True:
            try:
                async with self._open() as registry:
                    while True:
                        started = time.monotonic()
                        await self.look(registry)
                        pause_s, is_reported = FIRST_PAUSE_S, False
                        took_s = time.monotonic() - started
                        await asyncio.sleep(min(max(poll_s, PAUSE_PER_LOOK * took_s), max(poll_s, MAX_POLL_S)))
            except (SwarmError, OSError) as error:  # such as no file left to start the DHT's process with
                self._on_state_change(LinkState.DOWN, self._clock())
                if not is_reported:
                    logger.warning("the DHT cannot be asked (%s); trying again", error)
                    is_reported = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def look(self, registry: Registry) -> None:
        """Ask once for everything; a model that cannot be read keeps what was known of it, and hinders no other.

        Raises:
            RegistryError: the DHT did not answer.
        """
        models = {model.fingerprint: model for model in self._choose(await registry.models(), self._looks)}
        self._looks += 1
        listing = await read_models(registry, list(models.values()))
        for fingerprint, records in listing.records.items():
            self._on_records(fingerprint, records, self._clock())
        self._report_failed(listing.failed, models)
        present = dict.fromkeys(models, 0)
        absent = {
            one: count + 1 for one, count in self._missed.items() if one not in present and count < MISSES_UNTIL_GONE
        }
        for fingerprint in absent:
            self._on_records(fingerprint, [], self._clock())
        self._missed = present | absent
        self._on_state_change(LinkState.OK, self._clock())

    def _report_failed(self, failed: Mapping[str, str], models: Mapping[str, ModelIdentity]) -> None:
        """Log models that cannot be read when they begin to fail, in one line."""
        new = [models[one] for one in failed if one not in self._failed]
        self._failed = frozenset(failed)
        if new:
            reason = failed[new[0].fingerprint]
            logger.warning("records cannot be read of %s (%s); the page shows what was known", name_models(new), reason)
