"""What `node install` leaves to the service of an invite: the swarm, whose remembered peers stand in for a dead one."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.cli import _as_service
from node.model.config import ServeConfig
from swarm.base.ids import SwarmId
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import Invite, seal_invite
from swarm.directory.joining.remembered import RememberedSwarm, SwarmMemory
from swarm.directory.joining.resolve import SwarmFinder, SwarmRequest
from swarm.link.network_key import NetworkKey

A, B = Identity.ephemeral(), Identity.ephemeral()
SWARM = SwarmId(bytes(range(16)))


def peer(identity: Identity) -> str:
    return f"/ip4/203.0.113.1/tcp/31337/p2p/{identity.peer_id}"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwarmMemory:
    monkeypatch.setenv("CANOPY_SWARMS", str(tmp_path / "swarms.json"))
    return SwarmMemory.of_user()


def test_a_service_comes_back_although_the_invites_one_peer_is_dead(memory: SwarmMemory) -> None:
    word = seal_invite(Invite((peer(A),), 2**32 - 1, "org/model", swarm=SWARM), A)
    config, environment = _as_service(ServeConfig(layers="auto", model=word), keeps=True)
    assert (config.join, config.model, environment) == ((), "org/model", {"CANOPY_JOIN": word})
    memory.remember(RememberedSwarm((peer(B),), swarm=SWARM.hex()))  # the invite's peer is long forgotten
    choice = SwarmFinder(memory, environment).find(SwarmRequest(model=config.model))
    assert choice.join == (peer(A), peer(B))
    assert (choice.membership.swarm, choice.membership.is_certain) == (SWARM, True)


def test_a_private_swarms_key_is_kept_in_a_file_and_tells_its_peers(memory: SwarmMemory) -> None:
    key = NetworkKey(bytes(32))
    word = seal_invite(Invite((peer(A),), 2**32 - 1, "org/model", network=key), A)
    config, environment = _as_service(ServeConfig(layers="auto", model=word), keeps=True)
    assert (config.join, environment) == ((peer(A),), {})
    assert config.network_key is not None
    memory.remember(RememberedSwarm((peer(B),), network=key.name))
    request = SwarmRequest(config.join, config.model, network_key=config.network_key)
    assert SwarmFinder(memory, {}).find(request).join == (peer(A), peer(B))
