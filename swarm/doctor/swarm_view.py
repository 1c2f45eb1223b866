"""One look at a swarm, which several checks share: which of the named peers answer, then what the directory says.

The directory is joined as a client, under a name that is thrown away: a node that runs here is not disturbed.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from swarm.discovery.dht.about import About
from swarm.discovery.dht.addresses import DhtConfig, Membership, check_join_address
from swarm.discovery.dht.registry import DhtRegistry, PeerSurvey
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord
from swarm.doctor.network import CONNECT_S, ResolveName, is_address, resolve
from swarm.errors import ConfigError, SwarmError
from swarm.ids import PeerId
from swarm.transport.network_key import NetworkKey

JOIN_S: Final = 8.0
ASK_S: Final = 4.0
MODELS_READ: Final = 8
_GREETING: Final = b"\x13/multistream/1.0.0\n"
"""With which both ends of a libp2p connection begin."""
_CLOCKS: Final = re.compile(r"local: (\d+\.\d+), peer: (\d+\.\d+)")
"""What hivemind says where clocks differ too much."""


class JoinState(enum.Enum):
    """What became of one `--join`."""

    ANSWERS = "answers"
    MALFORMED = "malformed"
    NO_NAME = "no name"
    SILENT = "silent"
    OTHER = "other"
    """Something answers, and it is no libp2p peer."""


@dataclass(frozen=True, slots=True)
class SwarmView:
    """A swarm as this machine sees it.

    Attributes:
        joined: what became of each `--join`, in order.
        error: why the directory cannot be joined though a peer answers; empty if it can.
        surveys: what peers say.
        relays: `host:port` of each relay that is lent.
        numeric_classes: of the nodes that serve, such as `cpu-float32`.
        versions: releases of those nodes.
        own_record: what is listed under this machine's identity.
    """

    joined: tuple[JoinState, ...] = ()
    error: str = ""
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
    def ahead_s(self) -> list[float]:
        """Seconds by which the peers' clocks are ahead of this machine's, sorted."""
        clocks = _CLOCKS.search(self.error)
        if clocks is not None:
            return [float(clocks[2]) - float(clocks[1])]
        return sorted(survey.ahead_s for survey in self.surveys if survey.ahead_s is not None)


async def look_at_swarm(
    join: Sequence[str], identity: Path, network: NetworkKey | None = None, find: ResolveName = resolve
) -> SwarmView | None:
    """Look at the swarm that these peers are of.

    Args:
        join: multiaddresses.
        identity: file of this machine's key, for what is listed under it.
        network: of a private swarm.
        find: looks a name up.

    Returns:
        None where no peer is named.
    """
    if not join:
        return None
    joined = await asyncio.gather(*(greet(address, find) for address in join))
    view = SwarmView(tuple(joined))
    good = tuple(address for address, state in zip(join, joined, strict=True) if state is JoinState.ANSWERS)
    if not good:
        return view
    registry = DhtRegistry.open(DhtConfig(join=good, client_mode=True, membership=Membership(network)))
    try:
        async with asyncio.timeout(JOIN_S):
            await registry
    except TimeoutError:
        return replace(view, error=f"it was not joined within {JOIN_S:.0f} s")
    except SwarmError as error:
        return replace(view, error=str(error))
    try:
        async with asyncio.timeout(ASK_S):
            return await _ask(registry, view, own_peer(identity))
    except (TimeoutError, SwarmError) as error:
        return replace(view, error=str(error) or f"it did not answer within {ASK_S:.0f} s")
    finally:
        await registry.aclose()


async def greet(address: str, find: ResolveName = resolve) -> JoinState:
    """Whether a libp2p peer answers at a multiaddress."""
    try:
        check_join_address(address)
    except ConfigError:
        return JoinState.MALFORMED
    _, _, host, transport, port, *_ = address.split("/")
    if transport != "tcp":
        return JoinState.ANSWERS  # only the directory itself can tell
    found = [host] if is_address(host) else await find(host)
    if not found:
        return JoinState.NO_NAME
    answers = await asyncio.gather(*(_greet(ip, int(port)) for ip in found[:4]))
    return next((state for state in (JoinState.ANSWERS, JoinState.OTHER) if state in answers), JoinState.SILENT)


async def _greet(ip: str, port: int) -> JoinState:
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(ip, port)
    except OSError:
        return JoinState.SILENT
    try:
        writer.write(_GREETING)
        async with asyncio.timeout(CONNECT_S):
            answer = await reader.readexactly(len(_GREETING))
        return JoinState.ANSWERS if answer == _GREETING else JoinState.OTHER
    except (OSError, asyncio.IncompleteReadError):
        return JoinState.OTHER
    finally:
        writer.transport.abort()


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
    if not identity.exists():
        return None
    try:
        return Identity.load_or_create(identity).peer_id
    except SwarmError:
        return None
