"""Receipts that clients sign, over real nodes: each machine has one for what it computed, also where a chain broke."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from node.session.admission import OwnerClass
from swarm.base.quota import Preferred
from swarm.trust.receipt import Receipt, opened
from tests.net.client.chain.test_repair import GREEDY, IDS, SPARES, struck
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.three_nodes import until
from tests.telemetry_messages import identity

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]


def signed(nodes: KillableNodes, name: str) -> int:
    """Layer-tokens that clients signed for at a node."""
    return nodes[name].running.resources.receipts.layer_tokens


async def newest(nodes: KillableNodes, name: str) -> Receipt:
    """The receipt of the client's newest session at a node, once it is there."""
    waiting, session = nodes[name].running.resources.receipts.waiting, nodes.chains[-1].key.session

    async def came() -> bool:
        await asyncio.sleep(0)
        return session in waiting

    await until(came)
    return opened(waiting[session])


async def test_all_machines_of_a_chain_have_one_receipt_for_what_they_computed(nodes: KillableNodes) -> None:
    counted = {name: nodes[name].running.resources.counters.layer_tokens for name in CHAIN}
    before = {name: signed(nodes, name) for name in CHAIN}
    result = await nodes.client.generate(IDS, **GREEDY)
    receipts = [await newest(nodes, name) for name in CHAIN]
    assert receipts == receipts[:1] * 3
    assert [hop.peer for hop in receipts[0].route] == [nodes[name].peer_id for name in CHAIN]
    assert receipts[0].since == 0
    # The last tokens are committed by no sweep: nobody computed anything with them.
    assert len(IDS) <= receipts[0].tokens <= len(IDS) + len(result.tokens)
    for name in CHAIN:
        grown = signed(nodes, name) - before[name]
        assert grown == 4 * receipts[0].tokens
        assert grown <= nodes[name].running.resources.counters.layer_tokens - counted[name]


async def test_a_conversation_has_one_receipt_that_grows(nodes: KillableNodes) -> None:
    before = signed(nodes, "a1")
    async with nodes.client.chat(max_new_tokens=8, nodes=4) as chat:
        await chat.say("It was a dark night")
        first = await newest(nodes, "a1")
        await chat.say("and the old man")
        book = nodes["a1"].running.resources.receipts

        async def grew() -> bool:
            await asyncio.sleep(0)
            return opened(book.waiting[first.session]).tokens > first.tokens

        await until(grew)
        second = opened(book.waiting[first.session])
    assert (second.session, second.began_at) == (first.session, first.began_at)
    assert signed(nodes, "a1") - before == 4 * second.tokens


@pytest.mark.parametrize("victim", CHAIN)
async def test_who_comes_in_the_place_of_a_machine_has_what_came_after(victim: str, nodes: KillableNodes) -> None:
    spare = victim.replace("a", "b")
    before = {spare: signed(nodes, spare)}
    plain, result = await struck(nodes, (victim,), SPARES)
    assert result.tokens == plain
    route = [spare if name == victim else name for name in CHAIN]
    receipts = [await newest(nodes, name) for name in route]
    assert receipts == receipts[:1] * 3
    assert 0 < receipts[0].since < receipts[0].tokens
    assert signed(nodes, spare) - before[spare] == 4 * (receipts[0].tokens - receipts[0].since)


@pytest.mark.parametrize(
    ("preferred", "contributors", "kind"),
    [(True, False, OwnerClass.PREFERRED), (False, True, OwnerClass.CONTRIBUTOR), (False, False, None)],
)
async def test_all_machines_know_whose_session_it_is_where_its_client_says_so(
    *,
    preferred: bool,
    contributors: bool,
    kind: OwnerClass | None,
    nodes: KillableNodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = identity(0)
    monkeypatch.setattr(nodes.client, "_opener", replace(nodes.client._opener, owner=owner))
    for name in CHAIN:
        admission = nodes[name].running.resources.machine.admission
        monkeypatch.setattr(admission, "preferred", Preferred(peers=frozenset({owner.peer_id} if preferred else ())))
        monkeypatch.setattr(admission, "contributors", {owner.peer_id: 4} if contributors else {})
    rows = {name: nodes[name].running.resources.counters.rows_by_class.copy() for name in CHAIN}
    await nodes.client.generate(IDS, **GREEDY)
    for name in CHAIN:
        grown = nodes[name].running.resources.counters.rows_by_class - rows[name]
        firsts = {OwnerClass.PREFERRED, OwnerClass.CONTRIBUTOR}
        assert (set(grown) == {kind}) if kind is not None else firsts.isdisjoint(grown)


async def test_who_comes_in_the_place_of_a_machine_knows_the_owner_too(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = identity(0)
    monkeypatch.setattr(nodes.client, "_opener", replace(nodes.client._opener, owner=owner))
    for node in nodes.nodes.values():
        monkeypatch.setattr(node.running.resources.machine.admission, "contributors", {owner.peer_id: 4})
    await struck(nodes, ("a1",), SPARES)
    assert nodes["b1"].running.resources.counters.rows_by_class[OwnerClass.CONTRIBUTOR] > 0


async def test_who_wants_to_sign_for_nothing_does_not(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.client, "_opener", replace(nodes.client._opener, signs=False))
    before = [signed(nodes, name) for name in CHAIN]
    await nodes.client.generate(IDS, **GREEDY)
    assert nodes.chains[-1]._signing is None
    assert [signed(nodes, name) for name in CHAIN] == before
