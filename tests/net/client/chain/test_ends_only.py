"""No token id, seed or other setting passes a machine between the ends of a chain (PROTOCOL P17).

Each test lets something happen to a chain, and looks through all that was said in it.

Links are in memory; texts under a grammar are told over gRPC, in `test_repair_rules.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from client.base.options import GenerateOptions, make_options
from client.base.stats import Result
from client.chain.answers import ReplyStream
from client.chain.opening import PeerLatency
from client.library.session import Session
from node.life.announcer import Announcer
from node.session.hop_session import TELL_S
from swarm.base.errors import GenerationInterrupted, HopError
from swarm.demo import TARGET
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.protocol.messages import RepliesUp, Snapshot, Tell
from tests.memory_links import MemoryLinks
from tests.model.published_eagle3 import publish_eagle3
from tests.net.client.chain.overheard import BIAS, BIASED, SEED, Overheard, overheard
from tests.net.client.chain.test_hedge import hedge
from tests.net.client.chain.test_prefix import HELD, hold, opened, run
from tests.net.client.chain.test_prefix import IDS as HELD_IDS
from tests.net.client.chain.test_silence import machine
from tests.net.client.decode.test_aux_rows import drafting_client
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.three_nodes import prompt

__all__ = ["overheard"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)
LONG_IDS = prompt(4, 120)
GREEDY: GenerateOptions = {"max_new_tokens": 24, "nodes": 8}
SAMPLED: GenerateOptions = {**GREEDY, "temperature": 0.9, "seed": SEED}
RULED: GenerateOptions = {
    **SAMPLED,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {BIASED: BIAS},
    "log_probs": 2,
}
DRAWN: GenerateOptions = {**SAMPLED, "multistep": True}


@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLED, RULED, DRAWN], ids=["greedy", "sampled", "penalties", "multistep"]
)
async def test_a_text(options: GenerateOptions, nodes: KillableNodes, overheard: Overheard) -> None:
    result = await nodes.client.generate(LONG_IDS, **options)
    assert len(result.tokens) == options["max_new_tokens"]
    assert not result.stats.ids_travel
    assert any(tell.guesses for tell in overheard.tells) == ("multistep" in options)
    overheard.check((*LONG_IDS, *result.tokens))


@pytest.mark.parametrize("options", [SAMPLED, RULED], ids=["sampled", "penalties"])
@pytest.mark.parametrize("victim", CHAIN)
async def test_a_death_in_mid_text(
    victim: str, options: GenerateOptions, nodes: KillableNodes, overheard: Overheard
) -> None:
    """A new first machine, middle and tail: snapshots, and sweeps that are caught up with."""
    plain = (await nodes.client.generate(IDS, **options)).tokens
    overheard.tells.clear()
    arrived = nodes.stall(victim, 4)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        text = group.create_task(nodes.client.generate(IDS, **options))
        await arrived.wait()
        await nodes.announce("b0", "b1", "b2")
        await nodes.kill(victim)
    result = text.result()
    assert result.tokens == plain
    assert len(result.stats.repairs) == 1
    assert any(isinstance(frame, Snapshot) for frame in overheard.frames) == (victim != "a0")
    overheard.check((*IDS, *result.tokens))


async def test_other_cuts_and_all_machines_anew(nodes: KillableNodes, overheard: Overheard) -> None:
    """All of three die; then two machines have the layers, and there is nothing between the ends."""
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    overheard.tells.clear()
    arrived = nodes.stall("a2", 4)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        text = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.announce("b0", "rest")
        await nodes.kill(*CHAIN)
    assert text.result().tokens == plain
    assert nodes.route() == ["b0", "rest"]
    overheard.check((*IDS, *plain))


async def spoken(nodes: KillableNodes, session: Session, ids: Sequence[int]) -> Result:
    """The next text of a session."""
    state = nodes.client.factory.make(ids, make_options(SAMPLED))
    result = [piece.result async for piece in session.run(state)][-1]
    assert result is not None
    return result


@pytest.mark.parametrize("victims", [("a2",), ("a1", "a2")], ids="+".join)
async def test_a_tail_dies_where_a_text_is_cut_back(
    victims: tuple[str, ...], nodes: KillableNodes, overheard: Overheard
) -> None:
    """The next prompt of a session begins like the last one; who gives the new tail rows may not have cut yet."""
    other = (*IDS[:18], *prompt(5, 12))
    plain = [(await nodes.client.generate(ids, **SAMPLED)).tokens for ids in (IDS, other)]
    async with nodes.client._opener.open(200, 16) as session:
        first = await spoken(nodes, session, IDS)
        arrived = nodes.stall("a2", nodes.chains[-1]._answers._last_sent + 1)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            text = group.create_task(spoken(nodes, session, other))
            await arrived.wait()
            await nodes.announce("b0", "b1", "b2")
            await nodes.kill(*victims)
        assert [first.tokens, text.result().tokens] == plain
    assert text.result().stats.reused_tokens > 10
    assert len(text.result().stats.repairs) == 1
    overheard.check((*other, *plain[1]))


@pytest.mark.parametrize("place", range(3), ids=CHAIN)
async def test_a_hedged_hop(
    place: int, nodes: KillableNodes, overheard: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    overheard.tells.clear()
    hedge(nodes, monkeypatch)
    await nodes.announce(f"b{place}")
    result = await nodes.client.generate(IDS, **SAMPLED)
    assert (result.tokens, len(result.stats.replicas)) == (plain, 1)
    overheard.check((*IDS, *result.tokens))
    nodes.client._opener = replace(nodes.client._opener, hedge=False)


async def test_a_text_that_begins_with_kept_tokens(nodes: KillableNodes, overheard: Overheard) -> None:
    """Blocks of a middle machine have no ids either."""
    await hold(nodes)
    async with opened(nodes, HELD_IDS) as session:
        result = await run(nodes, session, HELD_IDS)
    assert result.stats.reused_tokens >= HELD
    overheard.check((*HELD_IDS, *result.tokens))
    blocks = {name: [one.block.tokens for one in nodes[name].sessions.pool._blocks.values()] for name in CHAIN}
    assert all(tokens is None for tokens in blocks["a1"])
    assert blocks["a1"]
    assert all(tokens is not None for name in ("a0", "a2") for tokens in blocks[name])


async def test_rows_of_several_layers(nodes: KillableNodes, overheard: Overheard, tmp_path: Path) -> None:
    """A head drafts; what it wants beside picks is told to the tail, and rows come as ever."""
    plain = await nodes.undisturbed(IDS, **GREEDY)
    overheard.tells.clear()
    async with drafting_client(nodes, publish_eagle3(tmp_path / "head", TARGET)) as client:
        result = await client.generate(IDS, **GREEDY)
    assert result.tokens == plain
    assert any(tell.want is not None and tell.want.hidden_rows for tell in overheard.tells)
    overheard.check((*IDS, *result.tokens))


@pytest.mark.parametrize("tree", [0, 8])
async def test_nobody_waits_for_what_is_told(
    tree: int, nodes: KillableNodes, links: MemoryLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over links of 25 ms, on a clock that computing does not move, a text takes what it takes where ids travel."""
    for name in CHAIN:
        machine(nodes, name).delay_s = 0.025
    took: dict[bool, float] = {}
    options: GenerateOptions = {**SAMPLED, "nodes": tree}
    record = Announcer.record
    for travel in (True, False, True):
        monkeypatch.setattr(
            Announcer, "record", lambda *asked, told=not travel: replace(record(*asked), ends_only=told)
        )
        await nodes.announce(*CHAIN)
        result = await nodes.client.generate(IDS, **options)
        assert result.stats.ids_travel == travel
        took[travel] = sum(sweep.total_ms for sweep in result.stats.sweeps) / len(result.stats.sweeps)
    for name in CHAIN:
        machine(nodes, name).delay_s = links.delay_s
    assert took[False] == pytest.approx(took[True], rel=0.02)
    assert took[False] > 100, "four links"


async def test_where_an_older_machine_is_needed_ids_travel_and_somebody_says_so(
    nodes: KillableNodes, overheard: Overheard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And then they are found, as they would be if they slipped through."""
    plain, record = await nodes.undisturbed(IDS, **SAMPLED), Announcer.record

    def older(announcer: Announcer, state: NodeState) -> NodeRecord:
        made = record(announcer, state)
        return replace(made, ends_only=made.peer != nodes["a1"].peer_id)

    monkeypatch.setattr(Announcer, "record", older)
    await nodes.announce("a1")
    overheard.parts.clear()
    nodes.client._opener._notes.clear()  # of what it has said already
    with caplog.at_level(logging.WARNING):
        result = await nodes.client.generate(IDS, **SAMPLED)
    assert (result.tokens, result.stats.ids_travel) == (plain, True)
    assert overheard.found((*IDS, *plain)) == {"seed", "ids"}
    assert "token ids are sent through all machines of the chain: some are of an older release" in caplog.text
    await nodes.announce("b1")
    result = await nodes.client.generate(IDS, **SAMPLED)
    assert (result.tokens, result.stats.ids_travel, nodes.route()[1]) == (plain, False, "b1")


async def test_a_client_that_does_not_tell_the_tail_is_to_blame_itself(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail says so of itself; no machine before it is named."""
    say = ReplyStream.say
    blamed: list[HopError] = []

    def mute(stream: ReplyStream, message: RepliesUp) -> None:
        if not (isinstance(message, Tell) and message.sequence > 1):
            say(stream, message)

    monkeypatch.setattr(ReplyStream, "say", mute)
    monkeypatch.setattr(PeerLatency, "blame", lambda _, error: blamed.append(error))
    with pytest.raises(GenerationInterrupted, match=f"did not say within {TELL_S:.0f} s what sweep 2 holds"):
        await nodes.client.generate(IDS, **GREEDY)
    assert {error.peer for error in blamed} == {nodes["a2"].peer_id}
