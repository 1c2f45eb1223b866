"""What a machine takes in a session whose token ids go to the ends alone (PROTOCOL P17), and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from node.life.serve import Node
from node.session import hop_session
from swarm.protocol import wire
from swarm.protocol.messages import (
    Attach,
    Close,
    Fault,
    FaultKind,
    Ready,
    Reroute,
    Sampling,
    Snapshot,
    Sweep,
    SweepFrame,
    Tell,
    Want,
)
from swarm.protocol.pick_rules import DraftDistribution
from tests.net.healthy_session import FIRST_SWEEP, WIDTH, random_rows, right_picks, until_sessions, valid_attach
from tests.net.raw_client import key_of, raw_link, raw_replies
from tests.net.three_nodes import refusal

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("other_session")]

TELL = Tell(1, FIRST_SWEEP.nodes, FIRST_SWEEP.tokens, FIRST_SWEEP.sampling)
GUESS = DraftDistribution(0, (1,), (1.0,), ())


def asking(nodes: tuple[Node, ...], index: int = 0) -> Attach:
    attach = valid_attach(nodes, index)
    return key_of(b"victim").command(replace(attach, open=replace(attach.open, ends_only=True)))


@pytest.mark.parametrize("is_told_first", [True, False])
async def test_the_tail_answers_when_it_has_both_halves(nodes: tuple[Node, ...], is_told_first: bool) -> None:
    attach = asking(nodes)
    async with raw_link(nodes[0], attach) as link:
        await link.until(Ready)
        async with raw_replies(nodes[2], attach.session) as replies:
            frame = SweepFrame(FIRST_SWEEP.without_settings())
            if is_told_first:
                await replies.call.write(wire.encode_replies_up(TELL))
            await link.send(frame)
            if not is_told_first:
                await replies.call.write(wire.encode_replies_up(TELL))
            assert [token for _, token in (await replies.read()).picks] == list(right_picks())
        await link.send(Close("done"))
        while await link.read() is not None:
            pass


@pytest.mark.parametrize(
    ("index", "change", "field"),
    [
        (0, lambda sweep: sweep.structure(), "tokens"),
        (0, lambda sweep: replace(sweep, sampling=Sampling(5)), "sampling"),
        (0, lambda sweep: replace(sweep, want=Want()), "sampling"),
        (0, lambda sweep: replace(sweep, guesses=(GUESS,)), "sampling"),
        (1, lambda sweep: sweep.without_settings(), "tokens"),
        (1, lambda sweep: replace(sweep.structure(), sampling=Sampling(5)), "sampling"),
        (2, lambda sweep: sweep.without_settings(), "tokens"),
        (2, lambda sweep: replace(sweep.structure(), want=Want()), "sampling"),
    ],
)
async def test_what_was_not_agreed_on_is_refused(
    index: int, change: Callable[[Sweep], Sweep], field: str, nodes: tuple[Node, ...]
) -> None:
    rows = random_rows(len(FIRST_SWEEP.tokens), WIDTH) if index else None
    async with raw_link(nodes[index], asking(nodes, index)) as link:
        await link.until(Ready)
        await link.send(SweepFrame(change(FIRST_SWEEP), None, rows))
        fault = await link.until(Fault)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, field, nodes[index].peer_id)
        await link.send(Close("done"))
        while await link.read() is not None:
            pass


@pytest.mark.parametrize("what", ["tokens", "sampling", "header"])
async def test_a_snapshot_that_says_too_much_is_refused(what: str, nodes: tuple[Node, ...]) -> None:
    node, next_node = FIRST_SWEEP.nodes[:2]
    header = replace(FIRST_SWEEP, tokens=FIRST_SWEEP.tokens[:1], parents=(None,), sampling=None, want=None)
    snapshot = Snapshot(
        *(0, 1, 0, next_node, Sampling(5) if what == "sampling" else Sampling(), (node,)),
        *(header.tokens if what == "tokens" else (), (1,), (None,)),
        (header if what == "header" else header.structure(),),
        rows=random_rows(1, WIDTH),
    )
    async with raw_link(nodes[1], asking(nodes, 1)) as link:
        await link.until(Ready)
        await link.send(snapshot)
        fault = await link.until(Fault)
        assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, "sampling" if what == "sampling" else "tokens")
        await link.send(Close("done"))
        while await link.read() is not None:
            pass


async def test_a_session_keeps_to_what_was_agreed_on(nodes: tuple[Node, ...]) -> None:
    attach = asking(nodes)
    other = key_of(b"victim").command(replace(attach, generation=1, open=replace(attach.open, ends_only=False)))
    async with raw_link(nodes[0], attach) as link:
        await link.until(Ready)
        await link.send(Reroute(1, other.route, other.open, signature=other.signature))
        assert (await refusal(link)).field == "ends_only"
    await until_sessions(nodes, 1)


async def test_a_tail_that_is_told_nothing_gives_up_and_names_itself(
    nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_session, "TELL_S", 0.05)
    async with raw_link(nodes[0], asking(nodes)) as link:
        await link.until(Ready)
        await link.send(SweepFrame(FIRST_SWEEP.without_settings()))
        fault = await link.until(Fault)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "tell", nodes[2].peer_id)
        assert fault.reporter == nodes[2].peer_id
        await link.send(Close("done"))
        while await link.read() is not None:
            pass
    await until_sessions(nodes, 1)


async def test_layers_that_read_ids_are_not_served_without_them(
    nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes[1].sessions._context.model, "needs_ids", True)
    async with raw_link(nodes[1], asking(nodes, 1)) as link:
        assert (await refusal(link)).field == "ends_only"


async def test_a_machine_that_is_told_unasked_reads_past_it(nodes: tuple[Node, ...]) -> None:
    attach = key_of(b"victim").command(valid_attach(nodes))
    async with raw_link(nodes[0], attach) as link:
        await link.until(Ready)
        async with raw_replies(nodes[2], attach.session) as replies:
            await replies.call.write(wire.encode_replies_up(replace(TELL, tokens=tuple(range(len(TELL.ids))))))
            await link.send(SweepFrame(FIRST_SWEEP))
            assert [token for _, token in (await replies.read()).picks] == list(right_picks())
        await link.send(Close("done"))
        while await link.read() is not None:
            pass
