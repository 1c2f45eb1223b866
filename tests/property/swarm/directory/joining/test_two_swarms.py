"""Two open swarms and a machine that knows both: whatever happens in an hour, it never mixes their peers.

The memory and the finder are real, and so is the decision whom to join; peers are numbers that say which swarm they are
of while they are alive. Broken once: with `RememberedSwarm.is_same` by peers in common, this fails within a few steps.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import base58
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId
from swarm.directory.dht.addresses import DhtConfig, MetSwarm, listen_addresses
from swarm.directory.dht.meeting import OtherSwarm, meet
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import Invite, seal_invite
from swarm.directory.joining.remembered import SwarmMemory, peer_of
from swarm.directory.joining.resolve import SwarmFinder, SwarmRequest
from tests.frozen.reading import NOW

SIGNER = Identity.ephemeral()
IDS = [base58.b58encode(b"\x12\x20" + bytes([number]) * 32).decode() for number in range(8)]
ME, OTHERS = IDS[0], IDS[1:]
BEGUN = SwarmId(bytes([9] * 16))
"""The swarm that begins on this machine."""
SWARMS = [SwarmId(bytes([number] * 16)) for number in (1, 2)]
HOUR_S = 3_600
peers, swarms, seconds = st.sampled_from(OTHERS), st.sampled_from(SWARMS), st.integers(1, 600)


def address_of(peer: str) -> str:
    return f"/ip4/203.0.113.{IDS.index(peer) + 1}/tcp/31337/p2p/{peer}"


class TwoSwarms(RuleBasedStateMachine):
    """One machine's hour."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.memory = SwarmMemory(Path(self.folder.name) / "swarms.json", lambda: NOW + self.passed_s)
        self.passed_s = 0
        self.swarm_of = {peer: SWARMS[number % 2] for number, peer in enumerate(OTHERS)}
        self.alive = set(OTHERS)
        self.heard: dict[str, SwarmId] = {}
        self.joined: SwarmId | None = None

    def teardown(self) -> None:
        """Leave nothing behind."""
        self.folder.cleanup()

    @initialize(mixed=st.lists(peers, unique=True, max_size=5), own=st.booleans())
    def remember_as_release_0_2_did(self, mixed: list[str], own: bool) -> None:
        """Perhaps both swarms stand in one entry, this machine among their peers."""
        known = [address_of(peer) for peer in [*mixed, *([ME] if own else [])]]
        if known and self.memory.path is not None:
            swarm = {"peers": known, "joined_at": 1}
            self.memory.path.write_text(json.dumps({"format": 1, "swarms": [swarm]}))

    @rule(peer=peers, after_s=seconds)
    def a_peer_dies_or_comes_back(self, peer: str, after_s: int) -> None:
        self.alive ^= {peer}
        self.passed_s += after_s

    @rule(peer=peers, swarm=swarms)
    def a_peer_leaves_for_the_other_swarm(self, peer: str, swarm: SwarmId) -> None:
        self.swarm_of[peer] = swarm

    @rule()
    def start_with_nothing(self) -> None:
        self.start(SwarmRequest())

    @rule(peer=peers)
    def start_with_an_address(self, peer: str) -> None:
        self.start(SwarmRequest((address_of(peer),)))

    @rule(peer=peers)
    def start_with_an_address_in_the_environment(self, peer: str) -> None:
        self.start(SwarmRequest(), CANOPY_JOIN=address_of(peer))

    @rule(swarm=swarms, around=st.none() | peers, life_s=st.integers(-HOUR_S, HOUR_S))
    def start_with_an_invite(self, swarm: SwarmId, around: str | None, life_s: int) -> None:
        """It may name this machine too, as the one that it was made on may have met it."""
        invited = [peer for peer in OTHERS if self.swarm_of[peer] == swarm][:2]
        if not invited:
            return
        said = Invite(tuple(map(address_of, [*invited, ME])), int(NOW) + life_s, swarm=swarm)
        environment = {} if around is None else {"CANOPY_JOIN": address_of(around)}
        self.start(SwarmRequest((seal_invite(said, SIGNER),)), **environment)

    @precondition(lambda self: self.memory.swarms())
    @rule()
    def forget_the_last(self) -> None:
        self.memory.forget(self.memory.swarms()[:1])

    def start(self, request: SwarmRequest, **environment: str) -> None:
        """One start: find whom to join, ask them, join, and meet the swarm's peers that are alive."""
        try:
            choice = SwarmFinder(self.memory, environment, [ME]).find(request)
        except ConfigError as error:
            assert "expired" in str(error)  # noqa: PT017 - any other one is a fault
            return
        membership = choice.membership
        asked = [one for one in choice.join if peer_of(one) in self.alive]
        said = {one: self.swarm_of[peer_of(one)] for one in asked}
        listen = listen_addresses(DhtConfig(choice.join, "127.0.0.1", client_mode=True, membership=membership))
        try:
            found = meet(listen, membership.swarm, dict(said), is_certain=membership.is_certain)
        except OtherSwarm:
            return
        if choice.join and not said:
            return  # nobody answers
        self.joined = found.swarm or (None if choice.join else BEGUN)
        assert self.joined is not None
        through = [one for one in found.listen.join if one in said]
        assert {said[one] for one in through} <= {self.joined}
        there = [peer for peer in OTHERS if peer in self.alive and self.swarm_of[peer] == self.joined]
        self.heard |= dict.fromkeys(there, self.joined) | {peer_of(one): swarm for one, swarm in said.items()}
        assert membership.note_peers is not None
        met = tuple(map(address_of, there if through else []))
        membership.note_peers(MetSwarm(self.joined, met, (address_of(ME),), found.others))

    @invariant()
    def every_peer_stands_where_it_said_that_it_is(self) -> None:
        known = self.memory.swarms()
        stand = [peer for one in known for peer in one.peer_ids]
        assert len(stand) == len(set(stand))
        assert all(self.heard.get(peer, one.swarm_id) == one.swarm_id for one in known for peer in one.peer_ids)

    @invariant()
    def this_machine_is_nobodys_peer(self) -> None:
        known = self.memory.swarms()
        assert self.joined is None or all(ME not in one.peer_ids for one in known)
        assert sum(ME in one.own_ids for one in known) <= 1

    @invariant()
    def each_swarm_stands_once(self) -> None:
        named = [one.swarm for one in self.memory.swarms() if one.swarm is not None]
        assert len(named) == len(set(named))


TestTwoSwarms = TwoSwarms.TestCase
TestTwoSwarms.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
