"""The health service's look at the DHT: every model and its records, again and again; opened anew when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from swarm.discovery.node_record import NodeRecord
from swarm.discovery.registry import Registry
from swarm.errors import SwarmError
from swarm.health.state.assessment import LinkState
from swarm.health.state.model import MISSES
from swarm.ids import ModelIdentity

logger = logging.getLogger(__name__)

POLL_S = 5.0
SHARE = 20
"""A look that took so long is followed by a pause this many times as long: checking 1,000 records is work."""
LONGEST_POLL_S = 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Directory:
    """Looks at the DHT; `run` never ends by itself.

    listed: called per model with its records and the time. changed: called when the DHT answers, or does not. choose:
    the models at which to look, of all that there are, given how many looks there were.
    """

    def __init__(
        self,
        open_registry: Callable[[], Registry],
        listed: Callable[[str, Sequence[NodeRecord], float], None],
        changed: Callable[[LinkState, float], None],
        choose: Callable[[Sequence[ModelIdentity], int], Sequence[ModelIdentity]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._open, self._choose, self._looks = open_registry, choose, 0
        self._listed, self._changed, self._clock = listed, changed, clock
        self._missed: dict[str, int] = {}

    async def run(self, poll_s: float = POLL_S) -> None:
        """Look for ever."""
        pause_s, is_told = FIRST_PAUSE_S, False
        while True:
            try:
                async with self._open() as registry:
                    while True:
                        started = time.monotonic()
                        await self.look(registry)
                        pause_s, is_told = FIRST_PAUSE_S, False
                        took_s = time.monotonic() - started
                        await asyncio.sleep(min(max(poll_s, SHARE * took_s), max(poll_s, LONGEST_POLL_S)))
            except SwarmError as error:
                self._changed(LinkState.DOWN, self._clock())
                if not is_told:
                    logger.warning("the DHT cannot be asked (%s); trying again", error)
                    is_told = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def look(self, registry: Registry) -> None:
        """Ask once for everything.

        Raises:
            RegistryError: the DHT did not answer.
        """
        models = self._choose(await registry.models(), self._looks)
        self._looks += 1
        for model in models:
            records = await registry.records(model.fingerprint, model.num_layers, within_s=0.0)
            self._listed(model.fingerprint, records, self._clock())
        present = {model.fingerprint: 0 for model in models}
        absent = {one: count + 1 for one, count in self._missed.items() if one not in present and count < MISSES}
        for fingerprint in absent:
            self._listed(fingerprint, [], self._clock())
        self._missed = present | absent
        self._changed(LinkState.OK, self._clock())
