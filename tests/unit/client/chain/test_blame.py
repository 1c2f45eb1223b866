"""Whom a reported fault counts against: who speaks, of whom, and whether it was he who spoke."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest

from client.chain.blame import advised, blamed
from client.chain.chain import Chain, ChainOwner
from client.chain.repair_plan import FindRoute
from swarm.base.errors import (
    Busy,
    ContextFull,
    HopClosed,
    HopError,
    HopLeaving,
    HopMisbehaved,
    HopRefused,
    HopTimeout,
    RemoteProtocolError,
    ReplicasDiffer,
    Unreachable,
)
from swarm.base.ids import SessionId
from swarm.base.layers import Span
from swarm.base.version import VERSION
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, seal
from swarm.directory.signed_faults import is_signed
from swarm.link.dial import Dialer
from swarm.protocol import wire
from swarm.protocol.faults import error_of, fault_of, sign_fault, statement
from swarm.protocol.messages import Codec, Fault, FaultKind, Hedge, Open, RouteHop
from swarm.routing.costs import RouteForecast
from swarm.routing.route import Route
from tests.sample_records import sample_record

SESSION = SessionId(b"s" * 16)
SPANS = (Span(0, 4), Span(4, 8), Span(8, 12), Span(4, 8))
MACHINES = dict(zip("ABCX", (Identity.ephemeral() for _ in SPANS), strict=True))
STRANGER = Identity.ephemeral()
NAMES = {identity.peer_id: name for name, identity in MACHINES.items()}


def record_of(identity: Identity, span: Span) -> NodeRecord:
    record = sample_record(identity.peer_id, span=span, expires_at=2e9)
    return replace(record, sealed=seal(record, identity))


RECORDS = [record_of(identity, span) for identity, span in zip(MACHINES.values(), SPANS, strict=True)]
HOPS = tuple(RouteHop(record.peer, record.span) for record in RECORDS[:3])
PLAIN = Route(HOPS, tuple(RECORDS[:3]), (), 0.0, cast("RouteForecast", None))
HEDGED = replace(PLAIN, hedge=Hedge(1, RECORDS[3].peer), replica=RECORDS[3])


def says(reporter: Identity, accused: str, kind: FaultKind) -> Fault:
    return sign_fault(
        Fault(0, MACHINES[accused].peer_id, kind, "", "so it is"), SESSION, reporter.peer_id, reporter.sign
    )


@dataclass(frozen=True, slots=True)
class Said:
    """Who says what of whom, and whom it counts against: a machine, and the other end of its link."""

    reporter: str
    accused: str
    kind: FaultKind
    peer: str
    other: str | None
    error: type[HopError]
    route: Route = PLAIN


@pytest.mark.parametrize(
    "said",
    [
        Said("A", "A", FaultKind.BUSY, "A", None, Busy),
        Said("C", "C", FaultKind.INTERNAL, "C", None, HopClosed),
        Said("B", "B", FaultKind.DRAINING, "B", None, HopLeaving),
        Said("C", "C", FaultKind.CONTEXT_FULL, "C", None, HopRefused),
        Said("A", "A", FaultKind.PROTOCOL, "A", None, HopRefused),
        Said("B", "B", FaultKind.PROTOCOL, "B", "A", HopRefused),
        Said("A", "B", FaultKind.UNREACHABLE, "B", "A", Unreachable),
        Said("B", "C", FaultKind.TIMEOUT, "C", "B", HopTimeout),
        Said("A", "X", FaultKind.CLOSED, "X", "A", HopClosed, HEDGED),
        Said("X", "C", FaultKind.CLOSED, "C", "X", HopClosed, HEDGED),
        Said("C", "X", FaultKind.DIFFERENT, "X", "C", ReplicasDiffer, HEDGED),
        Said("C", "B", FaultKind.CLOSED, "B", "C", HopClosed, HEDGED),
        # What it cannot know counts against who says it.
        Said("A", "C", FaultKind.UNREACHABLE, "A", None, HopMisbehaved),
        Said("C", "B", FaultKind.UNREACHABLE, "C", None, HopMisbehaved),
        Said("C", "A", FaultKind.CLOSED, "C", None, HopMisbehaved, HEDGED),
        Said("A", "B", FaultKind.MODEL_MISMATCH, "A", None, HopMisbehaved),
        Said("A", "B", FaultKind.CONTEXT_FULL, "A", None, HopMisbehaved),
        Said("A", "B", FaultKind.DRAINING, "A", None, HopMisbehaved),
        Said("C", "B", FaultKind.DIFFERENT, "C", None, HopMisbehaved),
        Said("A", "B", FaultKind.DIFFERENT, "A", None, HopMisbehaved, HEDGED),
        Said("A", "A", FaultKind.DIFFERENT, "A", None, HopMisbehaved, HEDGED),
        Said("B", "X", FaultKind.UNREACHABLE, "B", None, HopMisbehaved),
    ],
    ids=lambda said: f"{said.reporter} says {said.kind.value} of {said.accused}",
)
def test_who_says_what_of_whom(said: Said) -> None:
    error = blamed(says(MACHINES[said.reporter], said.accused, said.kind), HOPS[0], SESSION, said.route, is_signed)
    other = None if error.other is None else NAMES[error.other]  # type: ignore[index]
    assert (NAMES[error.peer], other, type(error)) == (said.peer, said.other, said.error)  # type: ignore[index]
    assert error.is_even == (said.kind is FaultKind.PROTOCOL and other is not None)
    if isinstance(error, HopRefused) and said.kind is FaultKind.CONTEXT_FULL:
        assert isinstance(error.cause, ContextFull)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0, MACHINES["C"].peer_id, FaultKind.MODEL_MISMATCH, "", "other"),
        replace(says(MACHINES["C"], "C", FaultKind.BUSY), kind=FaultKind.MODEL_MISMATCH),
        says(STRANGER, "C", FaultKind.UNREACHABLE),
    ],
    ids=["nobody signed", "altered on the way", "a stranger signed"],
)
def test_what_nobody_of_the_route_signed_counts_against_who_passed_it_on(fault: Fault) -> None:
    error = blamed(fault, HOPS[0], SESSION, PLAIN, is_signed)
    assert (NAMES[error.peer], error.other, type(error)) == ("A", None, HopMisbehaved)  # type: ignore[index]


def test_what_the_first_hop_says_of_itself_needs_no_signature() -> None:
    error = blamed(Fault(0, HOPS[0].peer, FaultKind.BUSY, "", "full"), HOPS[0], SESSION, PLAIN, is_signed)
    assert (error.peer, type(error)) == (HOPS[0].peer, Busy)


@pytest.mark.parametrize(
    ("release", "says"),
    [("9.0.0", "update this machine"), ("0.0.1", "that one is to be updated"), (VERSION, None), ("odd", None)],
)
def test_trouble_with_another_release_says_which_side_to_update(release: str, says: str | None) -> None:
    route = replace(PLAIN, records=(replace(RECORDS[0], version=release), *RECORDS[1:3]))
    peer, other = RECORDS[0].peer, RECORDS[1].peer
    cause = RemoteProtocolError("kind", "Frame of kind 9 is unknown")
    refused = advised(HopRefused(peer, "0-4", cause).on_link(other, is_even=True), route)
    broke = advised(HopMisbehaved(peer, "0-4", "a message of no kind"), route)
    for error, was in ((refused, "kind 9 is unknown"), (broke, "a message of no kind")):
        assert was in str(error)
        assert ("it runs release" in str(error)) == (says is not None)
        assert says is None or says in str(error)
    assert (refused.other, refused.is_even) == (other, True)
    assert isinstance(refused, HopRefused)
    assert says is None or says in str(refused.cause), "the user is told the cause"


def test_other_trouble_and_unknown_machines_get_no_such_advice() -> None:
    route = replace(PLAIN, records=(replace(RECORDS[0], version="9.0.0"), *RECORDS[1:3]))
    for error in (
        Busy(RECORDS[0].peer, "0-4", "full"),
        HopRefused(RECORDS[0].peer, "0-4", ContextFull("too long")),
        HopMisbehaved(STRANGER.peer_id, "0-4", "odd"),
    ):
        assert advised(error, route) is error


async def test_a_chain_adds_the_advice_to_whatever_troubles_it() -> None:
    heard: list[HopError] = []
    route = replace(PLAIN, records=(replace(RECORDS[0], version="9.0.0"), *RECORDS[1:3]))
    owner = ChainOwner(cast("FindRoute", None), heard.append, lambda _: None, is_signed, 4_000)
    chain = Chain(cast("Dialer", None), route, Open("f", 64, 4, 64, Codec.FP32), owner)
    chain.on_trouble(HopMisbehaved(RECORDS[0].peer, "0-4", "a message of no kind"))
    assert "update this machine" in str(heard[0])


def test_what_a_full_machine_says_of_the_wait_arrives() -> None:
    busy = Busy(RECORDS[0].peer, "0-4", "full").asking_again(1.5, 4, 12.0)
    fault = fault_of(busy, 0, RECORDS[0].peer)
    told = wire.decode_upstream(wire.encode_upstream(fault))
    assert isinstance(told, Fault)
    error = error_of(told, "0-4")
    assert isinstance(error, Busy)
    assert (error.retry_after_s, error.position, error.expected_s) == (1.5, 4, 12.0)
    assert statement(told, SESSION) == statement(replace(told, retry_after_s=None, position=None), SESSION), "unsigned"
