"""One session over real nodes, with links in memory: what travels, what is computed, what is refused.

Sessions over gRPC: tests/net/node/session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import is_progress_bar_enabled

from client.decode.goodput import Goodput
from swarm.base.ids import TreeNodeId
from swarm.compute.row_codec import encode_rows
from swarm.demo import DRAFT, TARGET
from swarm.link.link import WARM_UP_BYTES, WARM_UP_PINGS, Link
from swarm.protocol import wire
from swarm.protocol.messages import (
    Ack,
    Attached,
    Close,
    Codec,
    Downstream,
    Fault,
    FaultKind,
    Ping,
    Pong,
    Ready,
    RepliesRequest,
    Sweep,
    SweepFrame,
)
from swarm.routing.costs import DEFAULT_DELAY_MS, RouteForecast
from tests.in_process_swarm import in_process_swarm
from tests.memory_links import MemoryLinks
from tests.net.raw_client import (
    SweepNumbering,
    attach,
    counters,
    dial,
    introduced,
    key_of,
    opening,
    raw_link,
    raw_replies,
    route_of,
)
from tests.net.three_nodes import (
    SPANS,
    ThreeNodes,
    grown,
    prompt,
    raw_link_ready,
    refusal,
    thread_held,
    three_nodes,
    until_freed,
    until_received,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(links: MemoryLinks) -> AsyncIterator[ThreeNodes]:
    async with three_nodes() as three:
        yield three


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def every_session_is_freed(running: ThreeNodes) -> AsyncIterator[None]:
    yield
    await until_freed(running.nodes)


@pytest.fixture(scope="module")
def hugging_face() -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    return model


@torch.inference_mode()
def greedy_picks(model: PreTrainedModel, sweeps: Iterable[Sweep]) -> dict[int, int]:
    """Hugging Face's pick after each node of a session that never truncates, each from its own path alone."""
    paths: dict[int | None, list[int]] = {None: []}
    tip: int | None = None
    picks = {}
    for sweep in sweeps:
        tip = tip if sweep.commit_to is None else sweep.commit_to
        for offset, (token, parent) in enumerate(zip(sweep.tokens, sweep.parents, strict=True)):
            path = [*paths[tip if parent is None else parent], token]
            paths[sweep.first_id + offset] = path
            picks[sweep.first_id + offset] = int(cast("Any", model)(torch.tensor([path])).logits[0, -1].argmax())
    return picks


async def test_the_library_shows_no_bars(
    running: ThreeNodes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    async with running.swarm.client(draft=DRAFT):
        pass
    assert "Loading weights" not in capfd.readouterr().err
    assert is_progress_bar_enabled(), "another program's own ones are not ours to hide"


# What travels and what is computed


@pytest.mark.parametrize("nodes", [0, 16])
async def test_each_hop_sees_each_sweep_once_and_only_its_new_nodes(nodes: int, running: ThreeNodes) -> None:
    before = await counters(running.nodes)
    result = await running.client.generate(prompt(0), max_new_tokens=16, nodes=nodes)
    after = await counters(running.nodes)
    stats = result.stats
    sweeps = stats.prefill_sweeps + len(stats.sweeps)
    sent = stats.prompt_tokens - 1 + sum(1 + sweep.nodes for sweep in stats.sweeps)
    assert sent > 16 + nodes
    for field, expected in {
        "sweeps": sweeps,
        "frames_in": sweeps,
        "frames_out": sweeps,
        "forwards": sweeps,
        "tree_nodes": sent,
        "rows_in_forwards": sent,
        "pruned_nodes": 0,
        "errors": 0,
    }.items():
        assert grown(before, after, field) == [expected] * 3, field
    assert all(len(sweep.hops) == 3 for sweep in stats.sweeps), "every hop reports its time"


async def test_goodput_begins_with_what_routing_promises(running: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RouteForecast] = []
    monkeypatch.setattr(Goodput, "expect", lambda _, __, forecast: told.append(forecast))
    await running.client.generate(prompt(0), max_new_tokens=2)
    (forecast,) = told
    assert forecast.hops == 3
    assert forecast.compute_ms > 0
    assert 0 < forecast.links_ms < 4 * DEFAULT_DELAY_MS, "delays were measured"


async def test_replies_come_from_the_tail_and_from_no_other_hop(
    running: ThreeNodes, hugging_face: PreTrainedModel
) -> None:
    first, middle, tail = running.nodes
    opened = attach(running.route, opening(first), b"direct")
    async with raw_link(first, opened) as link:
        await link.until(Ready)
        for node in (first, middle):
            request = wire.encode_replies_up(RepliesRequest(opened.session))
            metadata = introduced(node, wire.REPLIES, key_of(b"direct"), request)
            async with dial(node, wire.REPLIES, metadata=metadata) as call:
                await call.write(request)
                assert await call.code() is grpc.StatusCode.NOT_FOUND
        async with raw_replies(tail, opened.session) as replies:
            sweep = SweepNumbering().chain(prompt(0, 4))
            await link.send(SweepFrame(sweep))
            reply = await replies.read()
        assert dict(reply.picks) == greedy_picks(hugging_face, [sweep])
        assert len(reply.times) == 3
        await link.until(Ack)  # receipts gather a while
        await link.send(Ping(5), Close("done"))
        while await link.read() is not None:
            pass
        kinds = {type(answer) for answer in link.heard}
        assert kinds <= {Attached, Ready, Ack, Pong}
        assert kinds >= {Attached, Ack, Pong}


async def test_an_unknown_session_has_no_reply_stream(running: ThreeNodes) -> None:
    node, key = running.nodes[2], key_of(b"not opened")
    request = wire.encode_replies_up(RepliesRequest(key.session))
    async with dial(node, wire.REPLIES, metadata=introduced(node, wire.REPLIES, key, request)) as call:
        await call.write(request)
        assert await call.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("held", [0, 1, 2])
async def test_sweeps_sent_ahead_of_replies_and_pruned_in_the_queue(
    held: int, running: ThreeNodes, hugging_face: PreTrainedModel
) -> None:
    """Parents are in flight; a later commit kills a branch that waits in the held hop's queue (P6, P7)."""
    first, _, tail = running.nodes
    ids = prompt(1, 8)
    said = SweepNumbering()
    sweeps = [
        said.chain(ids[:3]),  # 0, 1, 2
        said.next(ids[3:7], [2, 2, 3, 4]),  # 3 and 4 under 2, 5 under 3, 6 under 4
        said.next(ids[:3], [5, 4, 6]),  # 7 under 5, 8 under 4, 9 under 6: all in flight
        said.next(ids[:1], [6], commit=[0, 1, 2, 4]),  # kills 3, 5, 7; 10 under 6
    ]
    dead, alive = {3, 5, 7}, {0, 1, 2, 4, 6, 8, 9, 10}
    opened = attach(running.route, opening(first), b"ahead")
    before = await counters(running.nodes)
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        async with thread_held(running.nodes[held]):
            for sweep in sweeps:
                await link.send(SweepFrame(sweep))
                await until_received(running.nodes[held], before[held].frames_in + sweep.sequence)
        answers = [await replies.read() for _ in sweeps]
        await link.send(Close("done"))
    after = await counters(running.nodes)
    assert [answer.sequence for answer in answers] == [1, 2, 3, 4]
    picks = dict(pick for answer in answers for pick in answer.picks)
    assert picks.keys() == alive, "no pick for a node that was pruned, one for every other"
    expected = greedy_picks(hugging_face, sweeps)
    assert picks == {node: expected[node] for node in alive}
    assert grown(before, after, "pruned_nodes") == [0] * held + [len(dead)] * (3 - held), "`kept` holds further on"
    assert grown(before, after, "rows_in_forwards") == [11] * held + [len(alive)] * (3 - held)
    assert grown(before, after, "frames_in") == grown(before, after, "frames_out") == [4, 4, 4]


# Repetition and refusal


async def test_a_repeated_sweep_is_not_run_again(running: ThreeNodes) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first), b"twice")
    before = await counters(running.nodes)
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        said = SweepNumbering()
        one = SweepFrame(said.chain(prompt(2, 3)))
        await link.send(one, one)
        assert (await link.receipt(3)).sequence == 1
        await link.send(SweepFrame(said.next((7,), (None,), commit=(0, 1, 2))))
        assert [(await replies.read()).sequence, (await replies.read()).sequence] == [1, 2]
        await link.send(Close("done"))
    after = await counters(running.nodes)
    assert grown(before, after, "frames_in") == [3, 2, 2], "hop 0 drops it (P9)"
    assert grown(before, after, "rows_in_forwards") == [4, 4, 4]


async def test_the_tail_sends_its_kept_reply_again(running: ThreeNodes) -> None:
    tail = running.nodes[2]
    opened = attach(running.route, opening(tail), b"again", index=2)
    rows = encode_rows(torch.randn(3, 192, generator=torch.Generator().manual_seed(1)), Codec.FP32)
    said = SweepNumbering()
    one = SweepFrame(said.chain(prompt(2, 3)), None, rows)
    before = await counters([tail])
    async with raw_link(tail, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        await link.send(one)
        reply = await replies.read()
        await link.send(one)
        assert await replies.read() == reply
        acking = said.next((), (), acked=1)
        await link.send(SweepFrame(acking, None, replace(rows, count=0, data=b"")))
        assert (await replies.read()).sequence == 2
        await link.send(one, SweepFrame(said.next((), (), acked=2), None, replace(rows, count=0, data=b"")))
        assert (await replies.read()).sequence == 3, "the client holds reply 1: it is not sent again"
        await link.send(Close("done"))
    assert grown(before, await counters([tail]), "rows_in_forwards") == [3]


async def test_a_refused_sweep_consumes_no_sequence(running: ThreeNodes, hugging_face: PreTrainedModel) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first), b"refused")
    good = SweepNumbering().chain(prompt(3, 3))
    bad = replace(good, parents=(None, TreeNodeId(0), TreeNodeId(9)))
    later = replace(SweepNumbering().chain((1,)), sequence=2, first_id=TreeNodeId(3), picks_from=TreeNodeId(3))
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        await link.send(SweepFrame(bad), SweepFrame(later))
        assert [(await link.until(Fault)).field, (await link.until(Fault)).field] == ["parents", "sequence"]
        await link.send(SweepFrame(good))
        assert dict((await replies.read()).picks) == greedy_picks(hugging_face, [good])
        await link.send(Close("done"))


@pytest.mark.parametrize(
    ("sizes", "field"),
    [((1, 1, 1), "sequence"), ((5, 6), "tokens")],
    ids=["sweeps", "nodes"],
)
async def test_more_than_the_credits_is_refused(sizes: tuple[int, ...], field: str, running: ThreeNodes) -> None:
    first = running.nodes[0]
    opened = attach(running.route, opening(first, sweeps=2, nodes=10), b"credits")
    async with raw_link(first, opened) as link:
        ready = await link.until(Ready)
        assert (ready.credits.sweeps, ready.credits.nodes) == (2, 10)
        said = SweepNumbering()
        for number, size in enumerate(sizes):
            await link.send(SweepFrame(said.chain(range(number, number + size))))
        fault = await link.until(Fault)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, field, first.peer_id)
        assert (await link.receipt(1 + len(sizes))).sequence == len(sizes) - 1
        await link.send(Close("done"))


async def test_a_full_window_is_refused_and_the_session_goes_on(running: ThreeNodes) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first, window=8), b"window")
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        await link.send(SweepFrame(SweepNumbering().chain(range(9))))
        assert (await link.until(Fault)).kind is FaultKind.CONTEXT_FULL
        await link.send(SweepFrame(SweepNumbering().chain(range(8))))
        assert len((await replies.read()).picks) == 8
        await link.send(Close("done"))


async def test_attaches_that_do_not_fit_are_refused_by_kind(running: ThreeNodes) -> None:
    first, middle, tail = running.nodes
    fits = attach(running.route, opening(first), b"misfit")
    stranger = replace(running.route[1], peer=running.client._opener.registry.peer_id)
    cases = [
        (replace(fits, open=replace(fits.open, fingerprint="other")), FaultKind.MODEL_MISMATCH, "", first.peer_id),
        (replace(fits, index=1), FaultKind.PROTOCOL, "route", first.peer_id),
        (
            replace(fits, route=route_of((first, middle, tail), ["0-5", "5-8", "8-12"])),
            FaultKind.PROTOCOL,
            "route",
            first.peer_id,
        ),
        (replace(fits, route=fits.route[:2]), FaultKind.PROTOCOL, "route", first.peer_id),
        (replace(fits, open=replace(fits.open, window_tokens=100_000)), FaultKind.CONTEXT_FULL, "", first.peer_id),
        (replace(fits, route=(fits.route[0], stranger, fits.route[2])), FaultKind.UNREACHABLE, "", stranger.peer),
    ]
    for number, (bad, kind, field, about) in enumerate(cases):
        async with raw_link(first, replace(bad, session=attach((), fits.open, b"%d" % number).session)) as link:
            waits = kind is FaultKind.UNREACHABLE  # for the client, who may know another way
            fault = await (link.until(Fault) if waits else refusal(link))
            assert (fault.kind, fault.field, fault.peer) == (kind, field, about), number
            assert not any(isinstance(answer, Ready) for answer in link.heard)


async def test_a_cold_link_is_warmed_up_once_and_only_where_rows_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    padded: list[tuple[str, int]] = []
    ping = Link.send

    def noted(link: Link, message: Downstream) -> None:
        if isinstance(message, Ping) and message.padding:
            padded.append((link.hop.peer, len(message.padding)))
        ping(link, message)

    monkeypatch.setattr(Link, "send", noted)
    async with in_process_swarm(TARGET, SPANS) as here, here.client() as swarm:
        for _ in range(2):
            await swarm.generate("It was", max_new_tokens=2)
        _, middle, tail = (node.peer_id for node in here.nodes)
        assert Counter(peer for peer, _ in padded) == {middle: WARM_UP_PINGS, tail: WARM_UP_PINGS}
        assert {size for _, size in padded} == {WARM_UP_BYTES}
