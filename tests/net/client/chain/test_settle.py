"""Texts that prove what their machines signed, over real nodes: plain ones, repaired ones, and machines that do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import client.chain.chain
from client import Result
from client.base.options import GenerateOptions
from client.chain.audit import Sender
from client.chain.sent_rows import SettledRows
from client.chain.settle import differing_link
from node.session.hop_session import HopSession
from node.session.settle import HopCommitments
from swarm.base.ids import TreeNodeId
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import Reply, Rows, Snapshot, SweepFrame
from swarm.protocol.session import CommittedToken
from swarm.trust.evidence import Checked, load, spans_in, verify_signatures
from swarm.trust.settlement import Settlement, SettlingKey
from tests.net.client.chain.test_repair import IDS, SAMPLED, SPARES, struck
from tests.net.killable_nodes import CHAIN, KillableNodes

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

SIGNED: GenerateOptions = {**SAMPLED, "proof": "signed"}
WITH_ROWS: GenerateOptions = {**SAMPLED, "proof": "rows"}


def checked(result: Result) -> Checked:
    assert result.proof is not None
    assert result.proof.data, result.proof.problems
    return verify_signatures(load(result.proof.data))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each reply that was checked, how many links were compared while the text ran."""
    found: list[int] = []

    def noted(times: Any) -> int | None:  # noqa: ANN401
        heads = [time.heads for time in times]
        found.append(sum(None not in (a, b) and a.sequence == b.sequence for a, b in pairwise(heads)))
        return differing_link(times)

    monkeypatch.setattr(client.chain.chain, "differing_link", noted)
    return found


async def test_a_text_proves_who_picked_each_of_its_tokens(nodes: KillableNodes, compared: list[int]) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    compared.clear()
    result = await nodes.client.generate(IDS, **SIGNED)
    assert result.tokens == plain
    found = checked(result)
    assert [one.peer for one in found.settlements] == [nodes[name].peer_id for name in CHAIN]
    assert found.signed_picks == len(plain)
    assert not any((found.unsigned, found.unsigned_picks, found.differing, found.apart))
    assert result.proof is not None
    assert (result.proof.signed_tokens, result.proof.problems) == (len(plain), ())
    assert compared[0] == 0  # nothing was hashed before the first sweep left
    assert all(links == 2 for links in compared[1:]), "every later reply compares both links between hops"


async def test_with_rows_every_span_can_be_checked_by_itself(nodes: KillableNodes) -> None:
    result = await nodes.client.generate(IDS, **WITH_ROWS)
    assert result.proof is not None
    evidence = load(result.proof.data)
    found = verify_signatures(evidence)
    for part in evidence.rows:  # all nodes of the text: those that were sent
        assert part.nodes == found.path
    assert [part.settlement for part in evidence.rows] == [0, 1]
    assert [span.missing for span in spans_in(evidence, found)] == ["", "", ""]


async def test_what_was_settled_stays_for_a_while_after_the_session(nodes: KillableNodes) -> None:
    """Its client, and nobody else, may have the rows that were sent."""
    result = await nodes.client.generate(IDS, **WITH_ROWS)
    assert result.proof is not None
    sent = load(result.proof.data).rows[1]
    ids = [CommittedToken(TreeNodeId(node), None, 0) for node in sent.nodes]
    chain, found = nodes.chains[-1], SettledRows()
    hop = chain.route.hops[1]
    sender = Sender(chain._connection(hop), hop, chain._key, chain._want.codec, "cpu-float32")
    rows = await found.sent(sender, ids)
    assert rows is not None
    assert bytes(rows.data) == sent.data
    stranger = replace(sender, key=SessionKey.fresh())
    assert await found.sent(stranger, ids) is None
    for node in nodes.nodes.values():
        while node.sessions.settled.give_way():
            pass
    assert await found.sent(sender, ids) is None


async def test_a_text_that_asks_for_no_proof_settles_nothing(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(HopSession, "settle", lambda self: asked.append(b""))
    result = await nodes.client.generate(IDS, **SAMPLED)
    assert (result.proof, asked) == (None, [])


@pytest.mark.parametrize("victim", CHAIN)
async def test_a_death_leaves_a_gap_and_no_more(victim: str, nodes: KillableNodes) -> None:
    """The machine that died signs nothing; who came in its place, and all others, cover the rest."""
    plain, result = await struck(nodes, (victim,), SPARES, 5, WITH_ROWS)
    assert result.tokens == plain
    found = checked(result)
    spare = victim.replace("a", "b")
    route = [spare if name == victim else name for name in CHAIN]
    assert [one.peer for one in found.settlements] == [nodes[name].peer_id for name in route]
    assert found.unsigned == ((0, nodes[victim].peer_id),)
    assert found.differing == found.apart == ()
    if victim == "a2":  # picks that died with it
        assert 0 < len(found.unsigned_picks) < len(plain)
    else:
        assert found.unsigned_picks == ()
    newcomer = found.settlements[route.index(spare)]
    assert [stream.since for stream in newcomer.received] == [1]


async def test_a_machine_that_is_left_alive_signs_as_it_goes(nodes: KillableNodes) -> None:
    """It leaves the swarm, and the text moves: its part is signed too."""
    arrived = nodes.stall("a1", 5)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SIGNED))
        await arrived.wait()
        await nodes.announce("b1")
        for hop in nodes["a1"].sessions._open.values():
            hop.warn("leaves")
        await nodes.until_routed("a0", "b1", "a2")
        nodes.go_on("a1")
    found = checked(telling.result())
    assert {one.peer for one in found.settlements} == {nodes[name].peer_id for name in ("a0", "a1", "b1", "a2")}
    assert found.unsigned == ()


async def test_a_link_that_alters_rows_is_noticed_and_left(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a1 takes in is not what a0 sent: one of the two does not say the truth, and the text goes around."""
    receive, victim = HopCommitments.received, nodes["a1"].peer_id

    def altered(self: HopCommitments, message: SweepFrame | Snapshot, state: Any) -> None:  # noqa: ANN401
        rows = message.rows
        if self._peer == victim and rows is not None and isinstance(message, SweepFrame):
            data = bytes([rows.data[0] ^ 1]) + bytes(rows.data)[1:]
            message = replace(message, rows=Rows(rows.codec, rows.count, rows.width, data))
        receive(self, message, state)

    monkeypatch.setattr(HopCommitments, "received", altered)
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    result = await nodes.client.generate(IDS, **SIGNED)
    assert result.tokens == plain  # nobody else has its layers, and nothing shows that its rows are wrong
    (line,) = result.stats.differences
    assert victim in line
    assert nodes["a0"].peer_id in line
    (link,) = checked(result).differing
    assert (link.sender, link.receiver) == (nodes["a0"].peer_id, victim)
    await nodes.announce("b1")
    again = await nodes.client.generate(IDS, **SIGNED)
    assert nodes.route() == ["a0", "b1", "a2"]
    assert checked(again).differing == ()


@pytest.mark.parametrize("dated_s", [None, -300, 300])
async def test_a_machine_that_refuses_to_sign_or_to_date_is_named_and_avoided(
    dated_s: int | None, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old date would make a proved lie look like one that nobody need hear of."""
    victim = nodes["a1"].peer_id
    settle, seal = HopSession.settle, SettlingKey.seal

    async def refused(self: HopSession) -> bytes | None:
        return None if self._context.peer == victim and dated_s is None else await settle(self)

    def dated(self: SettlingKey, settlement: Settlement, signer: object) -> bytes:
        shift = (dated_s or 0) if settlement.peer == victim else 0
        return seal(self, replace(settlement, at=settlement.at + shift), signer)

    monkeypatch.setattr(HopSession, "settle", refused)
    monkeypatch.setattr(SettlingKey, "seal", dated)
    result = await nodes.client.generate(IDS, **SIGNED)
    found = checked(result)
    assert found.unsigned == ((0, victim),)
    assert found.unsigned_picks == ()
    assert result.proof is not None
    assert [line.startswith(f"node {victim}") for line in result.proof.problems] == [True]
    await nodes.announce("b1")
    again = await nodes.client.generate(IDS, **SIGNED)
    assert victim not in {one.peer for one in checked(again).settlements}
    assert checked(again).unsigned == ()


async def test_a_tail_that_signs_other_picks_proves_nothing(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered one token and signed another: the client sees that at once, and shows no proof."""
    replied = HopCommitments.replied

    def other(self: HopCommitments, since: int, reply: Reply, state: Any) -> None:  # noqa: ANN401
        picks = tuple((node, token ^ 1) for node, token in reply.picks)
        replied(self, since, replace(reply, picks=picks), state)

    monkeypatch.setattr(HopCommitments, "replied", other)
    result = await nodes.client.generate(IDS, **SIGNED)
    assert result.proof is not None
    assert result.proof.data == b""
    assert "another token" in result.proof.problems[0]
