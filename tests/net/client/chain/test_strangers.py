"""Machines that list themselves as the fastest, are chosen by all, and then do what they like: the text is the same.

A stranger is a real node of which a part is replaced. Every text is compared with that of the honest chain alone.

Links are in memory; some of these tests run over gRPC too, in `test_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import client.chain.chain
import client.chain.progress
import swarm.link.link
import swarm.link.successor
from client.base.options import GenerateOptions
from client.base.stats import Stats
from node.life.serve import Node
from node.session.hop_session import HopSession
from node.session.service import NodeService
from node.session.sweep_run import SweepRun
from node.session.tail import ReplyBuffer, Tail
from node.session.upstreams import UpstreamSet
from swarm.base.errors import (
    Busy,
    ContextFull,
    GenerationInterrupted,
    HopClosed,
    ModelMismatch,
    RemoteProtocolError,
    SwarmError,
    Unreachable,
)
from swarm.base.ids import PeerId, TreeNodeId
from swarm.directory.identity import Identity
from swarm.link.endpoint import Endpoint
from swarm.link.link import Metadata, Signer, introduce
from swarm.link.successor import SuccessorLink
from swarm.protocol.messages import Codec, Credits, Fault, FaultKind, Ping, Ready, Reply, Rows, SweepFrame
from tests.in_process_swarm import SPEED
from tests.memory_links import MemoryLinks
from tests.net.killable_nodes import CHAIN, KillableNodes, reset_client
from tests.net.three_nodes import prompt

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

IDS = prompt(4, 24)
OPTIONS: GenerateOptions = {"max_new_tokens": 12, "nodes": 4}
FASTEST = tuple((nodes, 0.01) for nodes, _ in SPEED)


@pytest.fixture(autouse=True)
def hasty(links: MemoryLinks | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gRPC, tests do not wait as long as users may."""
    if links is not None:
        return
    monkeypatch.setattr(client.chain.progress, "LATE_S", 0.25)
    monkeypatch.setattr(client.chain.progress, "CONFIRM_S", 0.2)
    monkeypatch.setattr(client.chain.progress, "ATTACH_S", 0.5)
    monkeypatch.setattr(client.chain.chain, "PROGRESS_S", 0.05)


async def listed(nodes: KillableNodes, *names: str) -> None:
    """List strangers that claim to be the fastest."""
    for name in names:
        host = nodes[name].running.host
        host.sweep_ms = FASTEST
        try:
            await nodes.announce(name)
        finally:
            host.sweep_ms = SPEED


async def tells_the_honest_text(nodes: KillableNodes, *strangers: str) -> Stats:
    """With strangers that are listed, the text is that of the honest chain, and ends without them."""
    plain = await nodes.undisturbed(IDS, **OPTIONS)
    reset_client(nodes.client, 20.0)
    await listed(nodes, *strangers)
    chosen = {hop.peer for hop in (await nodes.client.route()).hops}
    assert chosen & {nodes[name].peer_id for name in strangers}, "it was chosen at first"
    result = await nodes.client.generate(IDS, **OPTIONS)
    assert result.tokens == plain
    assert not set(nodes.route()) & set(strangers), "it was gone around"
    assert set(nodes.route()) <= set(CHAIN)
    return result.stats


def of(node: Node, hop: HopSession) -> bool:
    return hop._context.peer == node.peer_id


# Before a session is open


MISMATCH, FULL, BROKEN = ModelMismatch("other weights"), ContextFull("no room"), RemoteProtocolError("route", "is none")
BUSY, LEAVING, INTERNAL = Busy("?", "0-4", "is full"), HopClosed("?", "0-4", "is leaving"), ArithmeticError("internal")


def of_itself(error: Exception, peer: PeerId) -> Exception:
    return type(error)(peer, "0-4", error.reason) if isinstance(error, Busy | HopClosed) else error


def refusing(error: Exception) -> Callable[..., HopSession]:
    def refuse(*attach: object) -> HopSession:
        raise error

    return refuse


@pytest.mark.parametrize(
    "errors",
    [
        pytest.param({"b0": MISMATCH, "b2": BUSY}, id="both ends"),
        pytest.param({"b0": FULL, "wide": BROKEN}, id="hop 0, twice"),
        pytest.param({"b1": BUSY, "c1": BUSY, "b2": BUSY}, id="three are full"),
        pytest.param({"b1": BROKEN, "c1": INTERNAL, "b2": FULL}, id="three behind one honest hop"),
        pytest.param({"b1": LEAVING, "rest": MISMATCH}, id="two behind"),
    ],
)
async def test_who_refuses_is_gone_around(
    errors: dict[str, Exception], nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, error in errors.items():
        monkeypatch.setattr(nodes[name].sessions, "attach", refusing(of_itself(error, nodes[name].peer_id)))
    await tells_the_honest_text(nodes, *errors)


async def test_one_machine_alone_is_believed_at_once(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swarm of one chain says what is wrong, and nobody waits."""

    monkeypatch.setattr(nodes["a1"].sessions, "attach", refusing(ContextFull("no room for so many tokens")))
    with pytest.raises(ContextFull, match="no room for so many tokens"):
        await nodes.client.generate(IDS, **OPTIONS)


async def test_all_machines_together_are_believed(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    await nodes.announce("b0", "b1", "b2")
    for name in ("a0", "b0"):
        monkeypatch.setattr(nodes[name].sessions, "attach", refusing(ModelMismatch("other weights")))
    with pytest.raises(ModelMismatch, match="other weights"):
        await nodes.client.generate(IDS, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "credits"),
    [("b0", Credits(1_000, 1, 1_000)), ("b2", Credits(36, 64, 1)), ("b1", Credits(0, 0, 0))],
)
async def test_who_grants_too_little_is_gone_around(
    name: str, credits: Credits, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_ready = UpstreamSet.be_ready

    def stingy(streams: UpstreamSet, granted: Credits) -> None:
        be_ready(streams, credits if streams._peer == nodes[name].peer_id else granted)

    monkeypatch.setattr(UpstreamSet, "be_ready", stingy)
    await tells_the_honest_text(nodes, name)


async def test_who_never_gets_ready_is_gone_around(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    be_ready = UpstreamSet.be_ready

    def stubborn(streams: UpstreamSet, granted: Credits) -> None:
        if streams._peer != nodes["b1"].peer_id:
            be_ready(streams, granted)

    monkeypatch.setattr(UpstreamSet, "be_ready", stubborn)
    await tells_the_honest_text(nodes, "b1")


async def test_who_says_nothing_to_an_attach_is_left_sooner_where_others_are(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the hop before it nor the client has to be certain that it never will."""
    monkeypatch.setattr(client.chain.progress, "HASTE_S", 0.2)
    monkeypatch.setattr(client.chain.progress, "TAKE_S", 600.0)
    monkeypatch.setattr(swarm.link.successor, "ATTACH_S", 600.0)
    monkeypatch.setattr(swarm.link.successor, "FIRST_TRY_S", 600.0)
    read = NodeService._read

    async def deaf(service: NodeService, requests: AsyncIterator[bytes], *others: Any) -> None:  # noqa: ANN401
        if service._context.peer != nodes["b1"].peer_id:
            return await read(service, requests, *others)
        async for _ in requests:
            pass
        return None

    monkeypatch.setattr(NodeService, "_read", deaf)
    await tells_the_honest_text(nodes, "b1")


@pytest.mark.parametrize("away_s", [0.0, 3_600.0], ids=["another's signature", "another clock"])
async def test_who_spoils_what_it_signs_cannot_accuse_the_next_one(
    away_s: float, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The honest hop behind refuses its introduction; nobody else has that one's layers, and it stays."""
    mine = nodes["b0"].registry.identity

    def spoilt(signer: Signer, endpoint: Endpoint, method: str, subject: bytes) -> Metadata:
        if signer is not mine:
            return introduce(signer, endpoint, method, subject)
        signer = signer if away_s else Identity.ephemeral()
        return introduce(signer, endpoint, method, subject, lambda: time.time() + away_s)

    monkeypatch.setattr(swarm.link.link, "introduce", spoilt)
    await tells_the_honest_text(nodes, "b0")


async def test_classes_that_nobody_can_read_are_passed_over_with_one_note(
    nodes: KillableNodes, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await nodes.undisturbed(IDS, **OPTIONS)
    for name, kind in (("b0", "cpu-int64"), ("b1", "cpu-int64"), ("b2", "cpu-int64"), ("wide", "cpu-float8_e5m2")):
        host = nodes[name].running.host
        known, host.numeric_class = host.numeric_class, kind
        try:
            await listed(nodes, name)
        finally:
            host.numeric_class = known
    for _ in range(2):
        assert (await nodes.client.generate(IDS, **OPTIONS)).tokens == plain
    assert len([one for one in caplog.messages if "are passed over" in one]) == 1


# In a running session


def after(sweeps: int, node: Node, act: Callable[[HopSession], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node do something each time that it has run so many sweeps, in place of passing the sweep on."""
    finish = HopSession.finish

    def acting(hop: HopSession, run: SweepRun) -> None:
        sweep = run.work.frame.sweep
        if of(node, hop) and not run.work.is_replay and sweep.sequence >= sweeps:
            hop._running = None
            act(hop)
        else:
            finish(hop, run)

    monkeypatch.setattr(HopSession, "finish", acting)


@pytest.mark.parametrize(
    ("name", "error"),
    [("b2", FULL), ("b0", BROKEN), ("b2", INTERNAL)],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else one,
)
async def test_who_refuses_midway_is_gone_around(
    name: str, error: Exception, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = of_itself(error, nodes[name].peer_id)
    after(3, nodes[name], lambda hop: hop._upstreams.report(said), monkeypatch)
    await tells_the_honest_text(nodes, name)


@pytest.mark.parametrize(("name", "every"), [("b0", 2), ("b2", 1)])
async def test_who_swallows_sweeps_is_found(
    every: int, name: str, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, answers pings and receipts everything."""
    finish = HopSession.finish

    def swallowing(hop: HopSession, run: SweepRun) -> None:
        sequence = run.work.frame.sweep.sequence
        if of(nodes[name], hop) and not run.work.is_replay and sequence >= 3 and sequence % every == 0:
            hop._running = None
        else:
            finish(hop, run)

    monkeypatch.setattr(HopSession, "finish", swallowing)
    await tells_the_honest_text(nodes, name)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is found not to move: whoever is left is left because it is slow."""
    monkeypatch.setattr(client.chain.progress, "LATE_S", 600.0)
    monkeypatch.setattr(client.chain.progress, "EARLY_S", 0.1)
    monkeypatch.setattr(client.chain.progress, "AGAIN_S", 0.1)
    monkeypatch.setattr(client.chain.progress, "AGAIN_S", 0.1)


async def moves_once_and_remembers(nodes: KillableNodes, slow: str) -> None:
    """The session moves away from a machine in mid-text, and the next one does not begin there."""
    stats = await tells_the_honest_text(nodes, slow)
    assert [(repair.replaced, repair.is_move) for repair in stats.repairs] == [((nodes[slow].peer_id,), True)]
    assert nodes[slow].peer_id not in {hop.peer for hop in (await nodes.client.route()).hops}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("late_s", [0.8, None], ids=["late", "mute"])
async def test_a_tail_that_holds_its_replies_back_is_left_in_mid_text(
    late_s: float | None, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, stranger = ReplyBuffer.put, nodes["b2"]

    def late(replies: ReplyBuffer, reply: Reply, acked: int) -> None:
        if replies not in {hop.replies for hop in stranger.sessions._open.values()}:
            put(replies, reply, acked)
        elif late_s is not None:
            asyncio.get_running_loop().call_later(late_s, put, replies, reply, acked)

    monkeypatch.setattr(ReplyBuffer, "put", late)
    await moves_once_and_remembers(nodes, "b2")


@pytest.mark.usefixtures("patient")
async def test_a_hop_that_holds_sweeps_back_is_left_in_mid_text(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = SuccessorLink.push

    def late(link: SuccessorLink, frame: SweepFrame) -> None:
        if isinstance(link._listener, HopSession) and of(nodes["b1"], link._listener):
            asyncio.get_running_loop().call_later(0.5, push, link, frame)
        else:
            push(link, frame)

    monkeypatch.setattr(SuccessorLink, "push", late)
    await moves_once_and_remembers(nodes, "b1")


@pytest.mark.usefixtures("patient")
async def test_a_slow_machine_that_nobody_can_replace_goes_on(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, plain = ReplyBuffer.put, await nodes.undisturbed(IDS, **OPTIONS)
    monkeypatch.setattr(ReplyBuffer, "put", lambda *reply: asyncio.get_running_loop().call_later(0.3, put, *reply))
    result = await nodes.client.generate(IDS, **OPTIONS)
    assert result.tokens == plain
    assert not result.stats.repairs


async def test_who_says_that_it_passed_a_sweep_on_and_did_not_is_found(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hop behind says that it never came: one of the two lies, and both can be replaced."""
    standing = HopSession.standing

    def lying(hop: HopSession) -> object:
        said = standing(hop)
        return replace(said, passed=said.received, working=0) if of(nodes["b1"], hop) else said

    monkeypatch.setattr(HopSession, "standing", lying)
    after(3, nodes["b1"], lambda hop: None, monkeypatch)
    await tells_the_honest_text(nodes, "b1")


async def test_who_blames_honest_machines_again_and_again_is_dropped(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the layers behind it there is one machine only, which stays."""
    on_ready = HopSession.on_ready

    def blaming(hop: HopSession, ready: Ready) -> None:
        if of(nodes["b0"], hop):
            behind = hop._attach.route[1]
            hop._upstreams.report(Unreachable(behind.peer, str(behind.span), "cannot be dialled"))
        else:
            on_ready(hop, ready)

    monkeypatch.setattr(HopSession, "on_ready", blaming)
    await tells_the_honest_text(nodes, "b0")


@pytest.mark.parametrize("kind", [FaultKind.UNREACHABLE, FaultKind.MODEL_MISMATCH, FaultKind.DIFFERENT])
async def test_who_blames_honest_machines_midway_is_dropped(
    kind: FaultKind, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blame(hop: HopSession) -> None:
        behind = hop._attach.route[1]
        fault = Fault(hop._upstreams.heard, behind.peer, kind, "", "is no good")
        hop._upstreams.send(hop._sign(fault))

    after(3, nodes["b0"], blame, monkeypatch)
    await tells_the_honest_text(nodes, "b0")


@pytest.mark.parametrize("name", ["b0", "b1"])
async def test_who_forges_what_others_say_is_gone_around(
    name: str, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hop before it passes nothing on that nobody signed."""

    def forge(hop: HopSession) -> None:
        behind = hop._attach.route[-1]
        fault = Fault(hop._upstreams.heard, behind.peer, FaultKind.MODEL_MISMATCH, "", "other weights", behind.peer)
        for signature in (b"", bytes(256)):
            hop._upstreams.send(replace(fault, signature=signature))

    after(3, nodes[name], forge, monkeypatch)
    stats = await tells_the_honest_text(nodes, name)
    assert [repair.replaced for repair in stats.repairs] == [(nodes[name].peer_id,)], "and nobody else"


HALF = Rows(Codec.FP32, 1, 96, bytes(96 * 4))
REPLIES: dict[str, Callable[[Reply], Reply]] = {
    "another node's pick": lambda one: replace(one, picks=((TreeNodeId(1_000), 5),)),
    "no pick": lambda one: replace(one, picks=()),
    "outside the vocabulary": lambda one: replace(one, picks=tuple((node, 1 << 20) for node, _ in one.picks)),
    "wrong sequence": lambda one: replace(one, sequence=one.sequence + 1_000),
    "rows of half the width": lambda one: replace(one, row_ids=(TreeNodeId(0),), rows=HALF),
}


@pytest.mark.parametrize("spoil", REPLIES.values(), ids=REPLIES)
async def test_a_tail_whose_replies_answer_nothing_is_gone_around(
    spoil: Callable[[Reply], Reply], nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, stranger = Tail.reply, nodes["b2"]

    def spoiling(tail: Tail, run: SweepRun, times: Sequence[object]) -> Reply:
        made = reply(tail, run, times)  # type: ignore[arg-type]
        hops = [hop for hop in stranger.sessions._open.values() if hop._tail is tail]
        return spoil(made) if hops and made.picks else made

    monkeypatch.setattr(Tail, "reply", spoiling)
    await tells_the_honest_text(nodes, "b2")


async def test_a_tail_that_sends_what_nobody_can_read_is_gone_around(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, stranger = ReplyBuffer.put, nodes["b2"]

    def spoilt(replies: ReplyBuffer, reply: Reply, acked: int) -> None:
        is_stranger = any(hop.replies is replies for hop in stranger.sessions._open.values())
        put(replies, replace(reply, picks=((TreeNodeId(1 << 63), 5),)) if is_stranger else reply, acked)

    monkeypatch.setattr(ReplyBuffer, "put", spoilt)
    await tells_the_honest_text(nodes, "b2")


async def test_a_tail_that_answers_twice_with_other_picks_is_gone_around(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, stranger = ReplyBuffer.stream, nodes["b2"]

    async def doubling(replies: ReplyBuffer, acked: int) -> AsyncIterator[Reply | Ping]:
        async for message in stream(replies, acked):
            yield message
            if isinstance(message, Reply) and replies in {hop.replies for hop in stranger.sessions._open.values()}:
                yield replace(message, picks=tuple((node, (token + 1) % 4_000) for node, token in message.picks))

    monkeypatch.setattr(ReplyBuffer, "stream", doubling)
    await tells_the_honest_text(nodes, "b2")


async def test_rows_that_break_the_protocol_count_against_their_link(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The honest hop behind refuses them; nothing tells which of the two is at fault, and both can be replaced."""

    finish = HopSession.finish

    def halving(hop: HopSession, run: SweepRun) -> None:
        if of(nodes["b0"], hop) and not run.work.is_replay and run.rows is not None and run.rows.count:
            run.rows = Rows(run.rows.codec, run.rows.count, 96, bytes(96 * 4 * run.rows.count))
        finish(hop, run)

    monkeypatch.setattr(HopSession, "finish", halving)
    await tells_the_honest_text(nodes, "b0")


async def test_made_up_differences_are_not_shown_without_a_hedge(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flood(hop: HopSession) -> None:
        pair = hop._attach.route[-1].peer
        for number in range(2_000):
            fault = Fault(hop._upstreams.heard, pair, FaultKind.DIFFERENT, "", f"differs {number}")
            hop._upstreams.send(hop._sign(fault) if number < 3 else fault)

    after(3, nodes["b0"], flood, monkeypatch)
    with caplog.at_level(logging.WARNING):
        await tells_the_honest_text(nodes, "b0")
    assert not [one for one in caplog.messages if "differs " in one]


async def test_nobody_to_take_a_liars_place(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tail alone that answers nothing right: it is asked again for as long as the user waits, and named."""
    nodes.client._opener = replace(nodes.client._opener, wait_s=0.3)
    reply = Tail.reply
    monkeypatch.setattr(Tail, "reply", lambda tail, run, times: replace(reply(tail, run, times), picks=()))
    with pytest.raises(GenerationInterrupted) as caught:
        await nodes.client.generate(IDS, **OPTIONS)
    assert isinstance(caught.value.__cause__, SwarmError)
    assert nodes["a2"].peer_id in str(caught.value)
