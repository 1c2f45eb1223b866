"""Python programs join with an invite too."""

from __future__ import annotations

import time

import pytest

from client.base.options import ConnectionOptions
from client.library.aio import AsyncSwarm, _swarm
from swarm.base.errors import ConfigError
from swarm.directory.dht.addresses import OPEN_SWARM
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import Invite, seal_invite
from swarm.link.network_key import NetworkKey

ME = Identity.ephemeral()
PEER = f"/ip4/203.0.113.1/tcp/31337/p2p/{ME.peer_id}"
KEY = NetworkKey(bytes(range(32)))


def test_an_invite_stands_for_peers_and_key() -> None:
    word = seal_invite(Invite((PEER,), int(time.time()) + 60, network=KEY), ME)
    peers, membership = _swarm(ConnectionOptions(peers=(word,)))
    assert (peers, membership.network) == ((PEER,), KEY)
    assert _swarm(ConnectionOptions(peers=(PEER,))) == ((PEER,), OPEN_SWARM)


async def test_a_damaged_one_is_said_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="this invite is damaged"):
        async with AsyncSwarm.connect("no-such-model", peers=["canopy://zzz"]):
            pass
