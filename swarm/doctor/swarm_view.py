"""One look at a swarm's directory, which several rungs share.

The directory is joined as a client, under a name that is thrown away: a node that runs here is not disturbed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from swarm.discovery.dht.about import About
from swarm.discovery.dht.addresses import OPEN_SWARM, SLOW, DhtConfig, Membership
from swarm.discovery.dht.child import NO_ANSWER
from swarm.discovery.dht.registry import DhtRegistry, PeerSurvey
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord
from swarm.errors import SwarmError
from swarm.ids import PeerId

JOIN_S: Final = 8.0
ASK_S: Final = 4.0
MODELS_READ: Final = 8
_LATE: Final = re.compile(rf"{SLOW}|{NO_ANSWER}|.*\(waited \d+ s\)")
"""Errors that say no more than that time ran out."""
_CLOCKS: Final = re.compile(r"local: (\d+\.\d+), peer: (\d+\.\d+)")
"""What hivemind says where clocks differ too much."""


@dataclass(frozen=True, slots=True)
class SwarmView:
    """A swarm as this machine sees it.

    Attributes:
        error: why the directory cannot be joined, or was not read; empty if it was.
        is_late: whether that is no more than a time-out.
        surveys: what peers say.
        relays: `host:port` of each relay that is lent.
        numeric_classes: of the nodes that serve, such as `cpu-float32`.
        versions: releases of those nodes.
        own_record: what is listed under this machine's identity.
    """

    error: str = ""
    is_late: bool = False
    surveys: tuple[PeerSurvey, ...] = ()
    relays: tuple[str, ...] = ()
    numeric_classes: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()
    own_record: NodeRecord | None = None

    @property
    def abouts(self) -> list[About]:
        """What those peers say of themselves who can."""
        return [survey.about for survey in self.surveys if survey.about is not None]

    @property
    def answering(self) -> int:
        """How many of the peers that were asked answer."""
        return sum(survey.ahead_s is not None for survey in self.surveys)

    @property
    def ahead_s(self) -> list[float]:
        """Seconds by which the peers' clocks are ahead of this machine's, sorted."""
        clocks = _CLOCKS.search(self.error)
        if clocks is not None:
            return [float(clocks[2]) - float(clocks[1])]
        return sorted(survey.ahead_s for survey in self.surveys if survey.ahead_s is not None)


async def look_at_swarm(join: Sequence[str], identity: Path, membership: Membership = OPEN_SWARM) -> SwarmView:
    """Look at the swarm that these peers are of.

    Args:
        join: multiaddresses of peers that answer; none gives a view of nothing.
        identity: file of this machine's key, for what is listed under it.
        membership: of the swarm that is meant.
    """
    view = SwarmView()
    if not join:
        return view
    registry = DhtRegistry.open(DhtConfig(join=tuple(join), client_mode=True, membership=membership))
    try:
        async with asyncio.timeout(JOIN_S):
            await registry
    except TimeoutError:
        return replace(view, error=f"it was not joined within {JOIN_S:.0f} s", is_late=True)
    except SwarmError as error:
        return replace(view, error=str(error), is_late=_LATE.match(str(error)) is not None)
    try:
        async with asyncio.timeout(ASK_S):
            return await _ask(registry, view, own_peer(identity))
    except (TimeoutError, SwarmError) as error:
        return replace(view, error=str(error) or f"it did not answer within {ASK_S:.0f} s", is_late=True)
    finally:
        await registry.aclose()


async def _ask(registry: DhtRegistry, view: SwarmView, own: PeerId | None) -> SwarmView:
    async with asyncio.TaskGroup() as group:
        surveys, relays = group.create_task(registry.survey()), group.create_task(registry.relays())
        records = group.create_task(_records(registry))
        mine = group.create_task(_record_of(registry, own))
    serving = records.result()
    return replace(
        view,
        surveys=tuple(surveys.result()),
        relays=tuple(offer.address for offer in relays.result()),
        numeric_classes=frozenset(record.numeric_class for record in serving),
        versions=frozenset(record.version for record in serving),
        own_record=mine.result(),
    )


async def _record_of(registry: DhtRegistry, own: PeerId | None) -> NodeRecord | None:
    return None if own is None else await registry.record_of(own)


async def _records(registry: DhtRegistry) -> list[NodeRecord]:
    models = (await registry.models())[:MODELS_READ]
    found = await asyncio.gather(*(registry.records(model.fingerprint, model.num_layers) for model in models))
    return [record for records in found for record in records]


def own_peer(identity: Path) -> PeerId | None:
    """Whose key lies in a file; None if there is none, or it cannot be read."""
    try:
        own = Identity.load(identity)
    except SwarmError:
        return None
    return None if own is None else own.peer_id
