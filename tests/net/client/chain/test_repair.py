"""Chains whose machines die, over real nodes: the text is the undisturbed one, and each repair took the path it should.

Which path is said by the nodes' counters: who was given a snapshot (`restores`), who gave one (`replays`; the client's
own are not counted), and how many sweeps were sent again to a machine that had all before them (`catch_ups`).

Links are in memory; some of these tests run over gRPC too, in `test_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

import client.chain.answers
import client.chain.chain
import client.chain.repair_plan
import client.library.jobs
from client import Result
from client.base.options import GenerateOptions
from client.decode.loop import Generation
from client.decode.policy import SpeculationPlan
from client.draft.search.tree import DraftTree
from node.session.hop_session import HopSession
from node.session.tail import ReplyBuffer
from node.session.upstreams import UpstreamStream
from swarm.base.errors import RegistryError
from swarm.directory.node_record import NodeRecord
from swarm.link.successor import SessionLink, SuccessorLink
from swarm.protocol.messages import Ping, Reply, Reroute
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.raw_client import counters
from tests.net.three_nodes import grown, prompt, until, until_freed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)
SPARES = ("b0", "b1", "b2")
GREEDY: GenerateOptions = {"max_new_tokens": 24, "nodes": 8}
SAMPLED: GenerateOptions = {"max_new_tokens": 24, "nodes": 8, "temperature": 1.0, "seed": 7}


async def struck(
    nodes: KillableNodes, victims: Sequence[str], spares: Sequence[str], at: int = 5, options: GenerateOptions = GREEDY
) -> tuple[tuple[int, ...], Result]:
    """The tokens of an undisturbed text, and one whose victims die while sweep `at` waits in the first of them."""
    plain = await nodes.undisturbed(IDS, **options)
    arrived = nodes.stall(victims[0], at)
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **options))
        await arrived.wait()
        await nodes.announce(*spares)
        await nodes.kill(*victims)
    return plain, telling.result()


# One machine dies


@pytest.mark.parametrize(
    ("victim", "path", "options"),
    [
        pytest.param("a0", {"b0": {"restores": 1, "catch_ups": 1}}, GREEDY, id="a0 greedy"),
        pytest.param("a1", {"a0": {"replays": 1}, "b1": {"restores": 1, "catch_ups": 1}}, SAMPLED, id="a1 sampled"),
        pytest.param("a2", {"a1": {"replays": 1}, "b2": {"restores": 1}}, SAMPLED, id="a2 sampled"),
    ],
)
async def test_a_death_with_a_sweep_in_flight(
    victim: str, path: dict[str, dict[str, int]], options: GenerateOptions, nodes: KillableNodes
) -> None:
    """Its predecessor alone replays to its replacement, which sends the sweep on to a survivor that kept its KV."""
    with nodes.counted() as found:
        plain, result = await struck(nodes, (victim,), SPARES, 5, options)
    assert result.tokens == plain
    assert found == path
    assert nodes.route() == [victim.replace("a", "b") if name == victim else name for name in CHAIN]
    (repair,) = result.stats.repairs
    assert (repair.generation, repair.replaced, repair.is_move) == (1, (nodes[victim].peer_id,), False)


@pytest.mark.parametrize("others", [("c1",), ()], ids=["with another", "alone"])
async def test_a_processor_that_rounds_otherwise_goes_on_only_where_there_is_no_other(
    others: Sequence[str], nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The text is not called reproducible then, and a line says so."""
    monkeypatch.setattr(nodes["b1"].running.host, "rounding", "0123abcd")
    plain, result = await struck(nodes, ("a1",), ("b1", *others))
    assert result.tokens == plain, "in float32"
    assert nodes.route() == ["a0", *(others or ("b1",)), "a2"]
    assert result.stats.reproducible == bool(others)
    assert ("rounds otherwise" in caplog.text) == (not others)


@pytest.mark.parametrize(("victim", "at"), [("a0", 3), ("a1", 1), ("a2", 3)])
async def test_a_death_in_the_middle_of_a_prompt(
    victim: str, at: int, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.library.jobs, "PREFILL_CHUNK", 4)
    plain, result = await struck(nodes, (victim,), SPARES, at, SAMPLED)
    assert result.stats.prefill_sweeps == 6
    assert result.tokens == plain
    assert len(result.stats.repairs) == 1


@pytest.mark.parametrize(
    ("victim", "path"),
    [
        ("a0", {"b0": {"restores": 1, "catch_ups": 1}}),
        ("a1", {"a0": {"replays": 1}, "b1": {"restores": 1, "catch_ups": 1}}),
        ("a2", {"a1": {"replays": 1}, "b2": {"restores": 1}}),
    ],
)
async def test_a_death_while_the_client_drafts(
    victim: str, path: dict[str, dict[str, int]], nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is in flight: the next sweep goes over the repaired chain."""
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    draft, count = Generation._grow_tree, 0

    async def interrupted(generation: Generation, room: int) -> tuple[DraftTree, SpeculationPlan, float]:
        nonlocal count
        count += 1
        if count == 4:
            await nodes.announce(*SPARES)
            await nodes.kill(victim)
            await nodes.until_missed()
        return await draft(generation, room)

    monkeypatch.setattr(Generation, "_grow_tree", interrupted)
    with nodes.counted() as found:
        result = await nodes.client.generate(IDS, **SAMPLED)
    assert result.tokens == plain
    assert found == path
    assert len(result.stats.repairs) == 1


# Several machines die


@pytest.mark.parametrize(
    ("victims", "path"),
    [
        (("a0", "a1"), {"b0": {"restores": 1, "replays": 1}, "b1": {"restores": 1, "catch_ups": 1}}),
        (("a1", "a2"), {"a0": {"replays": 1}, "b1": {"restores": 1, "replays": 1}, "b2": {"restores": 1}}),
        (
            ("a0", "a2"),
            {"b0": {"restores": 1, "catch_ups": 1}, "a1": {"replays": 1}, "b2": {"restores": 1}},
        ),
        (
            ("a0", "a1", "a2"),
            {"b0": {"restores": 1, "replays": 1}, "b1": {"restores": 1, "replays": 1}, "b2": {"restores": 1}},
        ),
    ],
    ids=" ".join,
)
async def test_several_deaths_at_once(
    victims: tuple[str, ...], path: dict[str, dict[str, int]], nodes: KillableNodes
) -> None:
    with nodes.counted() as found:
        plain, result = await struck(nodes, victims, SPARES)
    assert result.tokens == plain
    assert nodes.route() == [name.replace("a", "b") if name in victims else name for name in CHAIN]
    assert found == path


@pytest.mark.parametrize(
    ("victims", "path"),
    [
        (("a1",), {"a0": {"replays": 1}, "b1": {"restores": 1, "catch_ups": 1}}),
        (("a1", "a2"), {"a0": {"replays": 1}, "b1": {"restores": 1, "replays": 1}, "b2": {"restores": 1}}),
    ],
    ids=" ".join,
)
async def test_the_replay_comes_after_all_are_attached(
    victims: tuple[str, ...], path: dict[str, dict[str, int]], nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement that has nothing yet, when the machine behind it asks, gives it what it lacks later."""
    sync = SuccessorLink.sync

    def is_attached(link: SessionLink | None) -> bool:
        return isinstance(link, SuccessorLink) and link._stream is not None and link._stream.is_attached

    def late(successor: SuccessorLink) -> None:
        behind = [hop._next for hop in nodes["b1"].sessions._open.values()]
        is_first = (
            isinstance(successor._listener, HopSession) and successor._listener._context.peer == nodes["a0"].peer_id
        )
        is_repair = bool(nodes.chains) and nodes.chains[-1].generation > 0
        if is_first and is_repair and not any(map(is_attached, behind)):
            asyncio.get_running_loop().call_later(0.01, late, successor)
        else:
            sync(successor)

    monkeypatch.setattr(SuccessorLink, "sync", late)
    with nodes.counted() as found:
        plain, result = await struck(nodes, victims, SPARES)
    assert result.tokens == plain
    assert found == path


async def test_no_hop_waits_for_the_directory(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client passes the signed records on; a DHT that has just lost a peer may take seconds to answer."""

    async def slow(*_: object, **__: object) -> list[NodeRecord]:
        raise RegistryError("nobody answers")

    with monkeypatch.context() as patch:
        for one in nodes.nodes.values():
            patch.setattr(one.registry, "records", slow)
        plain, result = await struck(nodes, ("a1",), SPARES)
    assert result.tokens == plain
    assert nodes.route()[1] == "b1"


async def test_the_replacement_dies_while_it_is_replayed(nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    arrived, restored = nodes.stall("a1", 5), nodes.stall_replay("b1")
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.announce("b1")
        await nodes.kill("a1")
        await restored.wait()
        await nodes.announce("c1")
        await nodes.kill("b1")
    result = telling.result()
    assert result.tokens == plain
    assert nodes.route() == ["a0", "c1", "a2"]
    assert result.stats.repairs[-1].generation == 2


async def test_another_hop_dies_while_a_replacement_is_replayed(nodes: KillableNodes) -> None:
    """The predecessor that replays is lost too: the client replays to a new one, and that one onwards."""
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    arrived, restored = nodes.stall("a1", 5), nodes.stall_replay("b1")
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.announce("b0", "b1")
        await nodes.kill("a1")
        await restored.wait()
        await nodes.kill("a0")
        await nodes.until_routed("b0", "b1", "a2")
        nodes.go_on("b1")
    assert telling.result().tokens == plain


async def test_a_machine_may_be_asked_in_the_moment_in_which_a_repair_leaves_it(nodes: KillableNodes) -> None:
    """Who asked all machines of the route how far they are found one of them in it no more, and the text ended."""
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    arrived, restored = nodes.stall("a1", 5), nodes.stall_replay("b1")
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        chain = nodes.chains[-1]
        before = chain.route
        await nodes.announce("b1")
        await nodes.kill("a1")
        await restored.wait()
        said = await chain._standings(before, 0)
        assert [one is None for one in said] == [False, True, False]
        nodes.go_on("b1")
    assert telling.result().tokens == plain


# Other borders


async def test_one_hop_is_replaced_by_two(nodes: KillableNodes) -> None:
    await nodes.unlist("a0", "a1")
    await nodes.announce("wide")
    with nodes.counted() as found:
        plain, result = await struck(nodes, ("wide",), ("b0", "b1"))
    assert result.tokens == plain
    assert nodes.route() == ["b0", "b1", "a2"]
    assert found == {"b0": {"restores": 1, "replays": 1}, "b1": {"restores": 1, "catch_ups": 1}}


async def test_two_hops_are_replaced_by_one(nodes: KillableNodes) -> None:
    """That the second is lost as well may be seen only when the replacement of the first attaches to it."""
    with nodes.counted() as found:
        plain, result = await struck(nodes, ("a0", "a1"), ("wide",))
    assert result.tokens == plain
    assert nodes.route() == ["wide", "a2"]
    assert found.keys() == {"wide"}
    assert found["wide"]["restores"] <= 2
    assert found["wide"]["catch_ups"] == 1


async def test_the_last_two_hops_are_replaced_by_one(nodes: KillableNodes) -> None:
    """Once for each of them where the second one's loss is seen only after the first was replaced."""
    with nodes.counted() as found:
        plain, result = await struck(nodes, ("a1", "a2"), ("rest",))
    assert result.tokens == plain
    assert nodes.route() == ["a0", "rest"]
    replays, restores = found["a0"]["replays"], found["rest"]["restores"]
    assert 1 <= restores <= replays <= 2, "a replay that a newer route overtakes restores nothing"
    assert found == {"a0": {"replays": replays}, "rest": {"restores": restores}}


async def test_a_wider_machine_takes_only_the_layers_that_are_missing(nodes: KillableNodes) -> None:
    with nodes.counted() as found:
        plain, result = await struck(nodes, ("a1",), ("overlapping",))
    assert result.tokens == plain
    assert nodes.route() == ["a0", "overlapping", "a2"]
    assert [str(hop.span) for hop in nodes.chains[-1].route.hops] == ["0-4", "4-8", "8-12"], "of its 2-10 (R12)"
    assert found == {"a0": {"replays": 1}, "overlapping": {"restores": 1, "catch_ups": 1}}


async def test_a_survivor_hands_layers_over_where_borders_must_move(nodes: KillableNodes) -> None:
    """Only layers 2-10 are left for the lost 4-12, so the tail-to-be begins elsewhere and the first hop goes on."""
    await nodes.unlist("a1", "a2")
    await nodes.announce("rest")
    with nodes.counted() as found:
        plain, result = await struck(nodes, ("rest",), ("overlapping", "b2"))
    assert result.tokens == plain
    assert nodes.route() == ["a0", "overlapping", "b2"]
    assert found == {
        "a0": {"replays": 1},
        "overlapping": {"restores": 1, "replays": 1},
        "b2": {"restores": 1},
    }


# Journals, messages, streams


@pytest.mark.parametrize(
    ("later_bytes", "replayer"), [(1 << 30, "a0"), (2_000, "b0")], ids=["room later", "never room"]
)
async def test_a_hop_without_its_journal_is_replayed_itself(
    later_bytes: int, replayer: str, nodes: KillableNodes
) -> None:
    """It says that it has nothing, the client replays it from ids, and it replays what comes next (R8).

    Where it has no room for that either, another machine takes its place too.
    """
    room = nodes["a0"].sessions._context.journals
    most = room.limit_bytes
    plain = await nodes.undisturbed(IDS, **GREEDY)
    room.limit_bytes = 2_000
    arrived = nodes.stall("a1", 5)
    try:
        with nodes.counted() as found:
            async with asyncio.timeout(10), asyncio.TaskGroup() as group:
                telling = group.create_task(nodes.client.generate(IDS, **GREEDY))
                await arrived.wait()
                await nodes.announce(*SPARES)
                room.limit_bytes = later_bytes
                await nodes.kill("a1")
    finally:
        room.limit_bytes = most
    assert telling.result().tokens == plain
    assert nodes.route() == [replayer, "b1", "a2"]
    assert found["a0"]["restores"] == 1
    assert found[replayer] == {"restores": 1, "replays": 1}
    assert found["b1"] == {"restores": 1, "catch_ups": 1}
    assert "a2" not in found

    async def is_empty() -> bool:
        return room.used_bytes == 0

    await until(is_empty)  # a session that ended holds no journal; its last hop may still be saying so


@pytest.mark.parametrize("lost", ["reply", "stream"])
async def test_a_broken_reply_stream_is_opened_again(
    lost: str, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail keeps what the client does not hold and sends it again (R6): nobody is replayed or replaced."""
    stream, broken = ReplyBuffer.stream, 0

    async def breaking(buffer: ReplyBuffer, acked: int) -> AsyncIterator[Reply | Ping]:
        nonlocal broken
        async for message in stream(buffer, acked):
            if isinstance(message, Reply) and message.sequence == 5 and not broken:
                broken += 1
                if lost == "stream":
                    yield message
                return
            yield message

    plain = await nodes.undisturbed(IDS, **SAMPLED)
    monkeypatch.setattr(ReplyBuffer, "stream", breaking)
    with nodes.counted() as found:
        result = await nodes.client.generate(IDS, **SAMPLED)
    assert broken == 1
    assert result.tokens == plain
    assert nodes.route() == list(CHAIN)
    assert found == {}
    assert len(result.stats.repairs) == 1


async def test_a_lost_reroute_is_followed_by_a_newer_one(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No route stands by the deadline: the next generation (R7)."""
    monkeypatch.setattr(client.chain.repair_plan, "READY_S", 0.5)
    reroute = HopSession.reroute
    lost: list[int] = []

    def losing(hop: HopSession, upstream: UpstreamStream, message: Reroute) -> None:
        if lost:
            reroute(hop, upstream, message)
        else:
            lost.append(message.generation)

    monkeypatch.setattr(HopSession, "reroute", losing)
    plain, result = await struck(nodes, ("a2",), SPARES)
    assert result.tokens == plain
    assert lost == [1]
    assert [repair.generation for repair in result.stats.repairs] == [2]


async def test_a_machine_wrongly_taken_for_dead_does_no_harm(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream was lost and it works on: what it sends to its old neighbour is not heard (R3), and it is released."""
    monkeypatch.setattr(client.chain.chain, "HOLD_TTL_S", 60.0)
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    before = await counters([nodes["a2"]])
    arrived = nodes.stall("a1", 5)
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        await arrived.wait()
        await nodes.announce("b1")
        (hop,) = nodes["a1"].sessions._open.values()
        (upstream,) = hop._upstreams._by_sender.values()
        upstream.end()
        await nodes.until_routed("a0", "b1", "a2")
        await nodes.stall("a2", 6).wait()
        nodes.go_on("a1")
        await until_freed([nodes["a1"]], timeout_s=3)
        nodes.go_on("a2")
    result = telling.result()
    assert result.tokens == plain
    sweeps = result.stats.prefill_sweeps + len(result.stats.sweeps)
    assert grown(before, await counters([nodes["a2"]]), "frames_in") == [sweeps]
