"""Hedged chains over real nodes: the text is the plain one, both machines work, and either may lag, die or be wrong.

Every test puts two machines behind one hop and reads from the nodes' counters that both got the sweeps.

Links are in memory; some of these tests run over gRPC too, in `test_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import torch

import client.library.session
from client.base.options import GenerateOptions
from client.chain.chain import Chain
from node.session.hop_session import HopSession
from node.session.sweep_run import SweepRun
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.link.hedged_link import HedgedLink
from swarm.link.successor import SessionLink, SuccessorLink
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.raw_client import counters
from tests.net.three_nodes import grown, prompt, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)
GREEDY: GenerateOptions = {"max_new_tokens": 24, "nodes": 8}
SAMPLED: GenerateOptions = {"max_new_tokens": 24, "nodes": 8, "temperature": 1.0, "seed": 7}
MIXED = pytest.mark.parametrize(
    ("place", "options"), [(0, SAMPLED), (1, GREEDY), (2, SAMPLED)], ids=["a0 sampled", "a1 greedy", "a2 sampled"]
)
PLACES = pytest.mark.parametrize("place", range(3), ids=CHAIN)


@pytest.fixture
def nodes(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> KillableNodes:
    """With a client that hedges; the first chain is listed, and each test lists the second machines."""
    hedge(nodes, monkeypatch)
    return nodes


def hedge(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client hedge.

    No sweep is sent before both of two replicas are attached: to what comes later the rest is sent again, as it should.
    """
    nodes.client._opener = replace(nodes.client._opener, hedge=True)
    open_ = Chain.open

    async def opened(chain: Chain, scope: TaskScope) -> None:
        await open_(chain, scope)
        if chain.route.hedge is not None:
            await until(partial(has_both, nodes, chain, chain.route.hedge.index))

    monkeypatch.setattr(Chain, "open", opened)


async def has_both(nodes: KillableNodes, chain: Chain, place: int) -> bool:
    """Whether who sends to two replicas knows both to be attached, and each of them who comes behind it."""
    await asyncio.sleep(0)
    hops = chain.route.hops
    sessions = {node.peer_id: node.sessions._open.get(chain._key.session) for node in nodes.nodes.values()}
    behind = () if hops[place] == hops[-1] else (hops[place], *chain.route.replicas)
    senders = [sessions[PeerId(hop.peer)] for hop in (*hops[:place][-1:], *behind)]
    return all(map(is_followed, senders if place else (chain, *senders)))


def is_followed(sender: Chain | HopSession | None) -> bool:
    """Whether all whom it sends sweeps to are attached."""
    if sender is None or sender._next is None:
        return False
    link = sender._next
    links = (link._first, link._second) if isinstance(link, HedgedLink) else (link,)
    return all(is_attached(one) for one in links)


def is_attached(link: SessionLink) -> bool:
    """Whether the machine that a plain link leads to took the stream."""
    return isinstance(link, SuccessorLink) and link._stream is not None and link._stream.is_attached


def replica(nodes: KillableNodes) -> str:
    """The name of the newest session's second machine."""
    (hop,) = nodes.chains[-1].route.replicas
    return next(name for name, node in nodes.nodes.items() if node.peer_id == hop.peer)


@MIXED
async def test_both_machines_work_and_the_text_is_the_plain_one(
    place: int, options: GenerateOptions, nodes: KillableNodes
) -> None:
    plain = await nodes.undisturbed(IDS, **options)
    pair = [nodes[f"a{place}"], nodes[f"b{place}"]]
    behind = nodes[f"a{min(place + 1, 2)}"]
    before, before_behind = await counters(pair), await counters([behind])
    await nodes.announce(f"b{place}")
    result = await nodes.client.generate(IDS, **options)
    assert result.tokens == plain
    sweeps = result.stats.prefill_sweeps + len(result.stats.sweeps)
    assert len(result.stats.replicas) == 1
    assert (result.stats.repairs, result.stats.differences) == ((), ())
    for grew in grown(before, await counters(pair), "frames_in"):
        assert sweeps - 1 <= grew <= sweeps, "the slower one may be closed before its last sweep"
    if place < 2:
        (doubles,) = grown(before_behind, await counters([behind]), "doubles")
        assert sweeps - 2 <= doubles <= sweeps
    assert grown(before_behind, await counters([behind]), "differences") == [0]


async def test_without_a_second_holder_the_chain_is_an_ordinary_one(nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **GREEDY)
    await nodes.announce("b1")
    await nodes.unlist("b1")
    result = await nodes.client.generate(IDS, **GREEDY)
    assert result.tokens == plain
    assert result.stats.replicas == ()


@MIXED
async def test_one_that_stops_working_holds_nobody_up(
    place: int, options: GenerateOptions, nodes: KillableNodes
) -> None:
    """It executes nothing from some sweep on: the other one's rows or picks arrive. Nothing is rerouted or replayed."""
    few = options | {"max_new_tokens": 8}
    plain = await nodes.undisturbed(IDS, **few)
    await nodes.announce(f"b{place}")
    for lagging in (f"a{place}", f"b{place}"):
        with nodes.counted() as paths:
            nodes.stall(lagging, 4)
            result = await nodes.client.generate(IDS, **few)
            nodes.go_on(lagging)
        assert result.tokens == plain
        assert {nodes.route()[place], replica(nodes)} == {f"a{place}", f"b{place}"}
        assert (result.stats.repairs, paths) == ((), {})


@PLACES
async def test_one_that_falls_too_far_behind_is_left(
    place: int, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is bounded: it leaves, and the chain goes on with the other one, nothing replayed."""
    monkeypatch.setattr(client.library.session, "SWEEPS_IN_FLIGHT", 4)  # twice as many may wait
    long = SAMPLED | {"max_new_tokens": 32, "nodes": 1}
    plain = await nodes.undisturbed(IDS, **long)
    await nodes.announce(f"b{place}")
    with nodes.counted() as paths:
        nodes.stall(f"a{place}", 4)
        arrived = nodes.stall(f"b{place}", 14)
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(nodes.client.generate(IDS, **long))
            await arrived.wait()
            await until(partial(is_repaired, nodes.chains[-1]))
            nodes.go_on(f"b{place}")
    result = telling.result()
    nodes.go_on(f"a{place}")  # what it tries when it wakes up is another matter
    assert result.tokens == plain
    assert nodes.route()[place] == f"b{place}"
    assert result.stats.replicas == ()
    assert len(result.stats.repairs) == 1
    assert paths == {}


async def is_repaired(chain: Chain) -> bool:
    """Whether a chain was repaired."""
    await asyncio.sleep(0)
    return bool(chain.repairs)


@PLACES
@pytest.mark.parametrize("victim", ["in the route", "replica"])
async def test_when_one_dies_the_other_goes_on_without_a_replay(victim: str, place: int, nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    await nodes.announce(f"b{place}")
    stalled = nodes.stall(f"a{place}", 4)  # whoever dies has not done all: that it lives on matters
    held = f"a{(place + 1) % 3}"
    nodes.stall(held, 5)  # or the text might be over before the death is seen
    with nodes.counted() as paths:
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
            await stalled.wait()
            dying = nodes.route()[place] if victim == "in the route" else replica(nodes)
            nodes.go_on(f"a{place}")
            await nodes.kill(dying)
            await until(partial(is_repaired, nodes.chains[-1]))
            nodes.go_on(held)
    result = telling.result()
    assert result.tokens == plain
    assert dying not in nodes.route()
    assert result.stats.replicas == ()
    assert [repair.replaced for repair in result.stats.repairs] == [(nodes[dying].peer_id,)]
    assert paths == {}


async def test_a_third_machine_takes_the_place_of_a_dead_replica(nodes: KillableNodes) -> None:
    long = SAMPLED | {"max_new_tokens": 60}
    plain = await nodes.undisturbed(IDS, **long)
    await nodes.announce("b1")
    stalled = nodes.stall("a2", 4)
    with nodes.counted() as paths:
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(nodes.client.generate(IDS, **long))
            await stalled.wait()
            dying = nodes.route()[1]
            await nodes.announce("c1")
            await nodes.kill(dying)
            await nodes.until_routed("a0", "b1" if dying == "a1" else "a1", "a2")
            await until(lambda: restored(nodes, "c1"))
            nodes.go_on("a2")
    result = telling.result()
    assert result.tokens == plain
    assert replica(nodes) == "c1"
    assert paths["c1"]["restores"] == 1
    assert "a2" not in {name for name, path in paths.items() if "restores" in path}, "it has all already"


async def restored(nodes: KillableNodes, name: str) -> bool:
    """Whether a node was given a snapshot since it started."""
    await asyncio.sleep(0)
    return nodes[name].sessions.info().counters.restores > 0


@pytest.mark.parametrize("place", [0, 1])
async def test_when_the_machine_behind_both_dies_each_may_replay(place: int, nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    await nodes.announce(f"b{place}")
    stalled = nodes.stall(f"a{place + 1}", 4)
    with nodes.counted() as paths:
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
            await stalled.wait()
            await nodes.announce(f"b{place + 1}")
            await nodes.kill(f"a{place + 1}")
    result = telling.result()
    assert result.tokens == plain
    assert nodes.route()[place + 1] == f"b{place + 1}"
    assert paths[f"b{place + 1}"]["restores"] >= 1
    assert len(result.stats.replicas) == 1


async def test_rows_that_differ_are_reported(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine's rows are off by a little more than rounding: the one that came later is named, once."""
    await nodes.undisturbed(IDS, **GREEDY)
    await nodes.announce("b1")
    finish = HopSession.finish

    def wrong(hop: HopSession, run: SweepRun) -> None:
        if hop._context.peer == nodes["b1"].peer_id and run.rows is not None and run.rows.count:
            rows = decode_rows(run.rows, torch.float32).clone()
            rows[-1, 0] += 0.05 * rows.abs().max()
            run.rows = encode_rows(rows, run.rows.codec)
        finish(hop, run)

    monkeypatch.setattr(HopSession, "finish", wrong)
    before = await counters([nodes["a2"]])
    result = await nodes.client.generate(IDS, **GREEDY)
    (line,) = result.stats.differences
    assert "differ from its replica's by" in line
    assert any(nodes[name].peer_id in line for name in ("a1", "b1"))
    (differences,) = grown(before, await counters([nodes["a2"]]), "differences")
    assert differences > 1, "reported once, counted each time"


async def test_picks_that_differ_are_reported(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    await nodes.undisturbed(IDS, **GREEDY)
    await nodes.announce("b2")
    finish = HopSession.finish

    def wrong(hop: HopSession, run: SweepRun) -> None:
        if hop._context.peer == nodes["b2"].peer_id and run.work.frame.sweep.sequence == 4:
            run.picks = [(one, token + 1) for one, token in run.picks]
        finish(hop, run)

    monkeypatch.setattr(HopSession, "finish", wrong)
    result = await nodes.client.generate(IDS, **GREEDY)
    (line,) = result.stats.differences
    assert "picked token" in line
