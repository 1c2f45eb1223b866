"""Machines that are missed, come back or leave: the text is the undisturbed one, and nobody stops before he may.

Links are in memory; some of these tests run over gRPC too, in `test_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import cast

import grpc.aio
import pytest

import client.chain.blame
import client.chain.chain
import client.chain.repair_plan
import client.library.session
import node.session.hop_session
from client.base.options import GenerateOptions, Options
from client.base.stats import Repair
from client.chain.chain import Chain
from node.session.hop_session import HopSession
from node.session.sweep_run import SweepRun
from swarm.base.errors import GenerationInterrupted, LocalProtocolError, RouteError, SwarmError, Unreachable
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.directory.node_record import NodeState, seal
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import Dialer, plain_reason
from swarm.protocol import wire
from swarm.protocol.messages import RouteHop
from tests.net.killable_nodes import CHAIN, KillableNodes, reset_client
from tests.net.raw_client import Unary, info
from tests.net.three_nodes import prompt, until, until_freed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)
SPARES = ("b0", "b1", "b2")
GREEDY: GenerateOptions = {"max_new_tokens": 24, "nodes": 8}
SAMPLED: GenerateOptions = {"max_new_tokens": 24, "nodes": 8, "temperature": 1.0, "seed": 7}


# Nobody to take its place


async def test_nobody_takes_its_place(
    nodes: KillableNodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which layers are missing while it waits, and then keeps what was made. Who was held is free at once."""
    reset_client(nodes.client, 0.6)
    monkeypatch.setattr(client.chain.chain, "HOLD_TTL_S", 60.0)
    monkeypatch.setattr(client.chain.repair_plan, "RETRY_S", 0.05)
    plain = await nodes.undisturbed(IDS, **GREEDY)
    arrived = nodes.stall("a1", 5)
    with caplog.at_level(logging.WARNING, "client.chain.chain"):
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(_interrupted(nodes))
            await arrived.wait()
            await nodes.unlist("a1")
            await nodes.kill("a1")
    error = telling.result()
    assert "4-8" in caplog.text
    assert caplog.text.count("waiting up to") == 1
    assert isinstance(error.__cause__, RouteError)
    assert error.__cause__.missing == ((4, 8),)
    assert "4-8" in str(error)
    assert 0 < len(error.tokens) < len(plain)
    assert error.tokens == plain[: len(error.tokens)]
    assert error.text
    await until_freed([nodes["a0"], nodes["a2"]], timeout_s=3)


async def _interrupted(nodes: KillableNodes) -> GenerationInterrupted:
    with pytest.raises(GenerationInterrupted) as caught:
        await nodes.client.generate(IDS, **GREEDY)
    return caught.value


async def test_a_machine_that_takes_sessions_and_always_fails_is_waited_for_no_longer(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the chain stands again meanwhile."""
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 0.2)
    reset_client(nodes.client, 0.5)
    run, finish, stood = HopSession.next_run, Chain._finish, 0

    def idle(hop: HopSession) -> SweepRun | None:
        if hop._context.peer != nodes["a1"].peer_id:
            return run(hop)
        if hop.log._queue and nodes.chains[-1].generation == 0:
            hop.fail(RuntimeError("out of order"))
        return None

    async def then_fails(chain: Chain, repair: Repair, scope: TaskScope) -> None:
        nonlocal stood
        stood += 1
        for hop in nodes["a1"].sessions._open.values():
            hop.fail(RuntimeError("out of order"))
        await finish(chain, repair, scope)

    monkeypatch.setattr(HopSession, "next_run", idle)
    monkeypatch.setattr(Chain, "_finish", then_fails)
    async with asyncio.timeout(10):
        error = await _interrupted(nodes)
    assert "--layers 4-8" in str(error)
    assert stood > 1


async def test_what_the_wire_cannot_hold_is_no_machines_failure(
    nodes: KillableNodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 0.2)
    with caplog.at_level(logging.WARNING, "client"):
        async with asyncio.timeout(10):
            with pytest.raises(LocalProtocolError, match="Attach: does not fit the wire"):
                async with nodes.client._opener.open(cast("int", 3.5), 4):
                    pass
            session = nodes.client._opener.open(100, 4)
            job = nodes.client._factory.make(IDS, Options(seed=7))
            job.sampling = replace(job.sampling, seed=cast("int", 1.5))
            async with session as one:
                with pytest.raises(GenerationInterrupted, match="does not fit the wire"):
                    async for _ in one.run(job):
                        pass
    assert not caplog.text


async def test_whoever_is_gone_before_a_text_begins_is_missed_once_and_in_plain_words(
    nodes: KillableNodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is still listed, so it is asked again and again meanwhile."""
    reset_client(nodes.client, 0.6)
    for module in (client.chain.blame, client.library.session):
        monkeypatch.setattr(module, "RETRY_S", 0.05)
    await nodes.kill("a2")
    says = "this fills the gap: node serve demo-target --layers 8-12"
    with caplog.at_level(logging.WARNING, "client"), pytest.raises(RouteError, match=says) as caught:
        await nodes.client.generate(IDS, **GREEDY)
    assert caught.value.missing == ((8, 12),)
    (said,) = caplog.messages
    assert said == f"waiting up to 1 s: {caught.value}"


@pytest.mark.parametrize("victim", CHAIN)
async def test_survivors_wait_for_a_replacement(
    victim: str, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than an orphan lives by itself: the client holds those whose upstream is lost (R9)."""
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 0.2)
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    arrived, loop = nodes.stall(victim, 5), asyncio.get_running_loop()
    survivors = [nodes[name] for name in CHAIN if name != victim]
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.unlist(victim)
        await nodes.kill(victim)
        due = loop.time() + 0.6

        async def outlived() -> bool:
            assert [(await info(one)).sessions for one in survivors] == [1, 1]
            await asyncio.sleep(0.02)
            return loop.time() > due

        await until(outlived)
        with nodes.counted() as found:
            await nodes.announce(victim.replace("a", "b"))
            result = await telling
    assert result.tokens == plain
    assert [name for name, counts in found.items() if counts.get("restores")] == [victim.replace("a", "b")]


async def test_the_lost_machine_itself_comes_back(
    nodes: KillableNodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its name and layers and without the session: it is replayed like any other, and nobody is alarmed."""
    monkeypatch.setattr(client.chain.repair_plan, "RETRY_S", 2.0)
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    arrived = nodes.stall("a1", 5)
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.kill("a1")
        nodes.go_on("a1")
        with nodes.counted() as found:
            await nodes.revive("a1")
            await telling
    assert telling.result().tokens == plain
    assert nodes.route() == list(CHAIN)
    assert found == {"a0": {"replays": 1}, "a1": {"restores": 1, "catch_ups": 1}}
    assert "waiting up to" not in caplog.text


# Leaving politely


@pytest.mark.parametrize("leaver", CHAIN)
async def test_a_machine_that_leaves_serves_until_its_sessions_have_moved(leaver: str, nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    arrived = nodes.stall(leaver, 5)
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.announce(*SPARES)
        nodes.go_on(leaver)
        assert await nodes[leaver].sessions.drain(5.0)
    result = telling.result()
    await nodes.kill(leaver)
    assert result.tokens == plain
    assert nodes.route() == [leaver.replace("a", "b") if name == leaver else name for name in CHAIN]
    (repair,) = result.stats.repairs
    assert repair.is_move
    assert repair.replaced == (nodes[leaver].peer_id,)


async def test_a_machine_that_leaves_dies_before_its_sessions_have_moved(nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    arrived, restored = nodes.stall("a1", 5), nodes.stall_replay("b1")
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.announce("b1")
        draining = group.create_task(nodes["a1"].sessions.drain(5.0))
        await restored.wait()
        await nodes.kill("a1")
        nodes.go_on("b1")
    assert telling.result().tokens == plain
    assert nodes.route() == ["a0", "b1", "a2"]
    assert draining.result()


async def test_a_machine_that_nobody_can_replace_is_not_left(nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **GREEDY)
    arrived = nodes.stall("a1", 5)
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **GREEDY))
        await arrived.wait()
        assert not await nodes["a1"].sessions.drain(0.2)
        nodes.go_on("a1")
    await nodes.kill("a1")
    assert telling.result().tokens == plain
    assert telling.result().stats.repairs == ()


# Certificates that changed, or are missing


@pytest.mark.over_grpc
async def test_a_machine_that_started_again_answers_with_another_certificate(nodes: KillableNodes) -> None:
    """Nobody else has its layers: the text goes on there, once its new record is read."""
    plain = await nodes.undisturbed(IDS, **GREEDY)
    known = nodes["a1"].endpoint
    arrived = nodes.stall("a1", 5)
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **GREEDY))
        await arrived.wait()
        await nodes.kill("a1")
        nodes.go_on("a1")
        await nodes.revive("a1", ServerCertificate.fresh(known.peer))
        await nodes.announce("a1")
    assert telling.result().tokens == plain
    assert telling.result().stats.repairs, "it was noticed"
    assert nodes["a1"].endpoint == replace(known, certificate=nodes["a1"].endpoint.certificate)
    async with Dialer() as dialer:
        call: Unary = dialer.channel(known).unary_unary(wire.INFO)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=5)
    assert "another machine answers there" in plain_reason(caught.value)


async def test_a_machine_without_a_certificate_is_dialled_by_nobody(nodes: KillableNodes) -> None:
    reset_client(nodes.client, 0.0)
    node = nodes["a1"]
    record = replace(node.running.announcer.record(NodeState.SERVING), certificate=b"")
    dial, hop = nodes["a0"].sessions._context.dials("owner"), RouteHop(node.peer_id, Span(4, 8))
    with pytest.raises(SwarmError, match="announces no certificate") as refused:
        await dial(hop, [seal(record, node.registry.identity)], None)
    assert "\n" not in str(refused.value)
    await node.registry.announce(record)
    with pytest.raises(SwarmError) as caught:
        await nodes.client.generate(IDS, **GREEDY)
    assert isinstance(caught.value.__cause__, Unreachable)
    await nodes.announce("b1")
    await nodes.client.generate(IDS, **GREEDY)
    assert nodes.route() == ["a0", "b1", "a2"]
