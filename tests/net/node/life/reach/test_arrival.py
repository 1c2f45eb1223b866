"""A machine arrives in a real DHT on loopback: as a client where nobody can dial it, as a server where somebody can."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import node.life.arrival
from node.life.arrival import Arrival, Arrived, BoundServer
from node.life.span_host import bind
from node.model.config import ServeConfig
from swarm.base.errors import IdentityError
from swarm.base.ids import PeerId
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.node_record import Reach
from swarm.directory.registry import RECORD_TTL_S
from swarm.link.certificate import ServerCertificate
from tests.net.lent_relay import lent_relay
from tests.sample_records import sample_record

LOCAL = DhtConfig(host="127.0.0.1")


@dataclass
class Swarm:
    """A bootstrap peer that lends a relay; what a test has its machine believe of the world."""

    bootstrap: DhtRegistry
    relay: str
    folder: Path
    said: list[str] = field(default_factory=list)

    def config(self) -> ServeConfig:
        join = tuple(self.bootstrap.join_addresses())
        identity = self.folder / "node.key"
        return ServeConfig("0-4", host="127.0.0.1", join=join, identity=identity, allow_private=True)

    @asynccontextmanager
    async def arrive(self) -> AsyncIterator[Arrived]:
        config = self.config()
        registry = DhtRegistry.open(config.dht())
        certificate = ServerCertificate.fresh(registry.peer_id)
        server, port = bind(config.host, 0, certificate)
        async with AsyncExitStack() as stack:
            arrival = Arrival(config, self.said.append, stack, BoundServer(server, port, certificate))
            yield await arrival.run(registry)

    async def lists(self, peer: PeerId) -> list[tuple[str, Reach]]:
        model = sample_record(peer).model
        records = await self.bootstrap.records(model.fingerprint, model.num_layers, within_s=0.0)
        return [(record.address, record.reach) for record in records if record.peer == peer]


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    async with DhtRegistry.open(LOCAL) as bootstrap, lent_relay(identity=bootstrap.identity) as offer:
        await bootstrap.offer_relay(offer.address)
        yield Swarm(bootstrap, offer.address, tmp_path)


def unreachable(patch: pytest.MonkeyPatch) -> None:
    """Its own addresses lead nowhere, as behind a router."""
    patch.setattr(Arrival, "_own", lambda _: [])


@pytest.mark.parametrize("looks_public", [False, True])
async def test_who_cannot_be_dialled_is_a_client_of_the_dht_and_listed_all_the_same(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, *, looks_public: bool
) -> None:
    """Whether it joined as a client from the start or found out later."""

    async def is_public_swarm(_: object) -> bool:
        return looks_public

    monkeypatch.setattr(node.life.arrival, "is_public_swarm", is_public_swarm)
    unreachable(monkeypatch)
    async with swarm.arrive() as arrived:
        reached, registry = arrived.whereabouts.now, arrived.registry
        peer = registry.peer_id
        assert (reached.address, reached.reach) == (f"{peer}.via.{swarm.relay}", Reach.RELAYED)
        assert registry.join_addresses() == [], "nobody waits for it"
        record = sample_record(
            peer, address=reached.address, reach=reached.reach, expires_at=time.time() + RECORD_TTL_S
        )
        await registry.announce(record)
        assert await swarm.lists(peer) == [(reached.address, Reach.RELAYED)]
        assert await registry.mine() == record
        assert await registry.models() == [record.model]
        with pytest.raises(IdentityError):
            async with DhtRegistry.open(swarm.config().dht()):
                pass
        await registry.withdraw(record)
        assert await swarm.lists(peer) == []


async def test_who_can_be_dialled_is_a_server_though_it_did_not_expect_it(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arrival, "_expects_no_caller", lambda _: True)
    async with swarm.arrive() as arrived:
        assert swarm.said[0].startswith("joining: ")
        assert swarm.said[1].startswith("joined ")
        assert arrived.whereabouts.now.reach is Reach.DIRECT
        assert arrived.registry.join_addresses(), "others may join through it"
        async with DhtRegistry.open(DhtConfig(tuple(arrived.registry.join_addresses()), "127.0.0.1")):
            pass
