"""Which swarm the doctor looks at: an invite's, the one that a variable names, the one joined last; or none."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from swarm.directory.identity import Identity
from swarm.directory.joining.invite import Invite, seal_invite
from swarm.directory.joining.remembered import RememberedSwarm, SwarmMemory
from swarm.doctor.command import meant, named_peers
from swarm.doctor.directory import SwarmView, look_at_directory, look_at_peers
from swarm.doctor.network import Outside
from swarm.doctor.options import Doctor
from swarm.link.network_key import NetworkKey
from tests.one_diagnosis import assert_trouble

NOW = 1_790_000_000
ME = Identity.ephemeral()
PEER = f"/ip4/203.0.113.5/tcp/31337/p2p/{ME.peer_id}"
INVITE = Invite((PEER,), NOW + 3_600, "Qwen/Qwen3-8B", broker="mqtts://broker.example", network=NetworkKey.fresh())


def nothing_remembered() -> SwarmMemory:
    return SwarmMemory(None, lambda: NOW)


def test_an_invite_brings_peers_model_broker_and_key() -> None:
    word = seal_invite(INVITE, ME)
    for options in (Doctor(join=(word,)), Doctor(model=word)):
        found, refusal = meant(options, {}, nothing_remembered())
        assert (found.join, found.model, found.mqtt, refusal) == ((PEER,), INVITE.model, INVITE.broker, "")
        assert found.membership.network == INVITE.network
        assert found.membership.note_peers is None, "a look remembers nothing"


def test_variables_and_the_swarm_joined_last_serve_too(tmp_path: Path) -> None:
    environment = {"CANOPY_JOIN": PEER, "CANOPY_MODEL": "org/model", "CANOPY_MQTT": "mqtt://broker.example"}
    found, _ = meant(Doctor(), environment, nothing_remembered())
    assert (found.join, found.model, found.mqtt) == ((PEER,), "org/model", "mqtt://broker.example")
    memory = SwarmMemory(tmp_path / "swarms.json", lambda: NOW)
    memory.remember(RememberedSwarm(peers=(PEER,), model="org/model"))
    found, _ = meant(Doctor(), {}, memory)
    assert (found.join, found.model) == ((PEER,), "org/model")


async def test_an_invite_that_ran_out_is_a_trouble() -> None:
    word = seal_invite(replace(INVITE, expires_at=NOW - 60), ME)
    found, refusal = meant(Doctor(join=(word,), model=word), {}, nothing_remembered())
    assert (found.join, found.model) == ((), None)
    await assert_trouble(look_at_peers((), Outside(), refusal), "swarm-unclear", refusal, "`swarm invite`")
    assert word not in refusal


async def test_a_private_swarm_without_its_key_is_a_trouble() -> None:
    view = SwarmView("this is a private swarm: its key is needed")
    await assert_trouble(look_at_directory(view), "private-swarm", "has not its key", "--network-key FILE")


def test_each_address_is_called_by_who_named_it(tmp_path: Path) -> None:
    other, third = (f"/ip4/203.0.113.{last}/tcp/31337/p2p/{ME.peer_id}" for last in (6, 7))
    word = seal_invite(INVITE, ME)
    memory = SwarmMemory(tmp_path / "swarms.json", lambda: NOW)
    memory.remember(RememberedSwarm(peers=(third,)))

    def origins(options: Doctor, **environment: str) -> list[str]:
        found, _ = meant(options, environment, memory)
        return [peer.origin for peer in named_peers(found)]

    assert origins(Doctor(join=(word,)))[:1] == ["the peer from the invite"]
    both = ["the peer from --join (1 of 2)", "the peer from --join (2 of 2)"]
    assert origins(Doctor(join=(PEER, other)))[:2] == both
    assert origins(Doctor(), CANOPY_JOIN=PEER)[:1] == ["the peer from CANOPY_JOIN"]
    assert origins(Doctor(), CANOPY_JOIN=word)[:1] == ["the peer from the invite in CANOPY_JOIN"]
    assert origins(Doctor()) == [f"the peer remembered since {time.strftime('%Y-%m-%d', time.localtime(NOW))}"]
