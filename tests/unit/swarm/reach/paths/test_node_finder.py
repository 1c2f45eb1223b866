"""A TLS port leads to listed nodes that answer under their own name, and is no proxy to anything else."""

from __future__ import annotations

import pytest

from swarm.base.ids import PeerId
from swarm.directory.address_proof import hello_response
from swarm.directory.dialable import DialPolicy
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord
from swarm.link.certificate import ServerCertificate
from swarm.link.endpoint import Endpoint
from swarm.reach.paths.tls_offer import KNOWN_S, UNKNOWN_S, NodeFinder
from tests.sample_records import sample_record

NODE = Identity.ephemeral()
CERTIFICATE = ServerCertificate.fresh(NODE.peer_id)
PUBLIC = "9.9.9.9:31400"


class World:
    """A directory, a node, and a clock."""

    def __init__(self, address: str = PUBLIC, *, signs_as: Identity = NODE, only_public: bool = True) -> None:
        shown = CERTIFICATE.der
        self.record: NodeRecord | None = sample_record(NODE.peer_id, address=address, certificate=shown)
        self.signs_as = signs_as
        self.called: list[str] = []
        self.now = 0.0
        self.finder = NodeFinder(self.record_of, DialPolicy(only_public=only_public), self.call, lambda: self.now)

    async def record_of(self, _peer: PeerId) -> NodeRecord | None:
        return self.record

    async def call(self, endpoint: Endpoint, nonce: bytes) -> bytes:
        self.called.append(endpoint.address)
        return hello_response(self.signs_as, nonce, CERTIFICATE.digest)


async def test_a_node_that_answers_is_led_to_and_asked_again_only_later() -> None:
    world = World()
    assert [await world.finder.find(NODE.peer_id) for _ in range(3)] == [PUBLIC] * 3
    assert world.called == [PUBLIC]
    world.now, world.record = KNOWN_S + 1, None
    assert await world.finder.find(NODE.peer_id) == ""


async def test_who_signs_as_somebody_else_is_not_led_to() -> None:
    world = World(signs_as=Identity.ephemeral())
    assert await world.finder.find(NODE.peer_id) == ""
    world.signs_as = NODE
    assert await world.finder.find(NODE.peer_id) == "", "and is not asked at once again"
    world.now = UNKNOWN_S + 1
    assert await world.finder.find(NODE.peer_id) == PUBLIC


@pytest.mark.parametrize("address", ["192.168.1.1:22", "127.0.0.1:5432", "[fe80::1]:80", "Qm.via.10.0.0.1:25"])
async def test_a_public_machine_calls_no_private_address(address: str) -> None:
    world = World(address)
    assert await world.finder.find(NODE.peer_id) == ""
    assert not world.called


async def test_whatever_a_stranger_makes_it_raise_means_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def broken(_endpoint: Endpoint, _nonce: bytes) -> bytes:
        raise RuntimeError("gRPC")

    monkeypatch.setattr(world.finder, "_call", broken)
    assert await world.finder.find(NODE.peer_id) == ""


async def test_it_remembers_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.reach.paths.tls_offer.MAX_KNOWN", 3)
    world = World()
    world.record = None
    for number in range(9):
        await world.finder.find(PeerId(f"Qm{number}"))
    assert len(world.finder._known) == 3
