"""Audits over real nodes: a liar is named and gone around, an honest machine never, whichever of three it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from client.base.options import GenerateOptions
from client.chain.audit import Audit, Auditor, AuditOwner, HopClaim, Sender
from node.session.hop_session import HopSession
from node.session.sweep_run import AskedPicks, SweepRun
from node.session.upstreams import UpstreamStream
from swarm.base.errors import HopMisbehaved
from swarm.base.ids import PeerId, SessionId
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.directory.identity import Identity
from swarm.link.link import Signer
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Attach, Rows
from swarm.protocol.session import CommittedToken
from swarm.trust.bounds import Agrees, Differs, Unclear
from tests.net.client.chain.test_repair import IDS as OTHER_IDS
from tests.net.client.chain.test_repair import struck
from tests.net.killable_nodes import KillableNodes
from tests.net.three_nodes import prompt, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 40)
GREEDY: GenerateOptions = {"max_new_tokens": 24, "nodes": 8}
SAMPLED: GenerateOptions = {"max_new_tokens": 24, "nodes": 8, "temperature": 0.8, "seed": 7}
HOLDERS = {0: ("b0",), 1: ("b1", "c1"), 2: ("b2",)}
"""Who has the layers of each hop beside it."""
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class JournalRows:
    """Gives what nodes of this process sent, from their journals.

    Attributes:
        hops: sessions by machine and name.
        silent: machines that give nothing.
    """

    hops: dict[tuple[str, SessionId], HopSession] = field(default_factory=dict)
    silent: set[PeerId] = field(default_factory=set)

    async def keep(self, senders: Sequence[Sender]) -> None:
        """Journals of this test are always kept."""

    def evidence(self, sender: Sender, claim: HopClaim) -> None:
        """Nothing is signed in this test."""

    async def sent(self, sender: Sender, committed: Sequence[CommittedToken]) -> Rows | None:
        peer, nodes = sender.hop.peer, [token.id for token in committed]
        return None if peer in self.silent else self.hops[peer, sender.key.session].journal._rows(nodes)


@dataclass(slots=True)
class Audited:
    """Nodes, and a client that audits every text at one place of its chain.

    Attributes:
        suspected: machines of which nothing is proven.
    """

    nodes: KillableNodes
    auditor: Auditor
    rows: JournalRows
    patch: pytest.MonkeyPatch
    place: int = 1
    suspected: list[PeerId] = field(default_factory=list)

    def peer(self, name: str) -> PeerId:
        return self.nodes[name].peer_id

    async def text(self, place: int, options: GenerateOptions = GREEDY) -> Audit:
        """Generate a text and wait for its audit."""
        self.place, before = place, len(self.auditor.done)
        await self.nodes.client.generate(IDS, **options)
        await until(partial(self._is_done, before + 1), timeout_s=20)
        return self.auditor.done[-1]

    async def _is_done(self, count: int) -> bool:
        import asyncio

        await asyncio.sleep(0.01)
        return len(self.auditor.done) >= count

    def let_lie(self, name: str, change: Change, is_due: Callable[[], bool] = lambda: True) -> None:
        """Let a node send other rows than it computed, where that is due."""
        model, encode = self.nodes[name].sessions._context.model, SweepRun.encode

        def lying(run: SweepRun) -> None:
            encode(run)
            if run.model is model and run.rows is not None and run.rows.count and is_due():
                run.rows = encode_rows(change(decode_rows(run.rows, torch.float32)), run.rows.codec)

        self.patch.setattr(SweepRun, "encode", lying)

    def let_pick(self, name: str, every: int) -> None:
        """Let a tail name another token after each so many."""
        model, take = self.nodes[name].sessions._context.model, SweepRun.take_picks

        def lying(run: SweepRun, asked: AskedPicks, tokens: Sequence[int]) -> None:
            if run.model is model:
                tokens = [token if node % every else token + 1 for node, token in zip(asked.nodes, tokens, strict=True)]
            take(run, asked, tokens)

        self.patch.setattr(SweepRun, "take_picks", lying)


@contextmanager
def auditing(nodes: KillableNodes, patch: pytest.MonkeyPatch, share: float = 1.0) -> Iterator[Audited]:
    client, rows, attach = nodes.client, JournalRows(), HopSession.attach

    def noted(hop: HopSession, upstream: UpstreamStream, attached: Attach, sender: str) -> None:
        rows.hops[hop._context.peer, attached.session] = hop
        attach(hop, upstream, attached, sender)

    async def make_key() -> Signer:
        return Identity.ephemeral()

    nearby = client._opener.nearby
    found = Audited(nodes, None, rows, patch)  # type: ignore[arg-type]
    owner = AuditOwner(
        client._opener.dialer, rows, make_key, named=_lied(nearby.lied), suspected=found.suspected.append
    )
    found.auditor = Auditor(owner, client._scope, share, draw=lambda hops: found.place)
    patch.setattr(HopSession, "attach", noted)
    patch.setattr(Journal, "drop", lambda journal: None)  # a node keeps what it sent for a while
    client._opener = replace(client._opener, auditor=found.auditor)
    for names in HOLDERS.values():
        for name in names:
            nearby.failed(nodes[name].peer_id)  # so that texts go over the chain
    yield found
    client._opener = replace(client._opener, auditor=None)


def _lied(note: Callable[[str], None]) -> Callable[[HopMisbehaved], None]:
    return lambda error: note(error.peer)


@pytest.fixture
async def audited(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Audited]:
    await nodes.announce("b0", "b1", "c1", "b2")
    with auditing(nodes, monkeypatch) as found:
        yield found


def scaled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 1.001


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("place", range(3))
async def test_an_honest_hop_agrees_with_another_machine(
    place: int, options: GenerateOptions, audited: Audited
) -> None:
    audit = await audited.text(place, options)
    assert audited.nodes.route() == ["a0", "a1", "a2"]
    assert audit.hop.peer == audited.peer(f"a{place}")
    assert isinstance(audit.verdict, Agrees), audit.verdict
    assert audit.verdict.count >= (40 if place < 2 else 16)
    assert len(audit.asked) == 1
    assert audit.asked[0] in {audited.peer(name) for name in HOLDERS[place]}
    assert audit.named is None
    assert audited.suspected == []


async def test_a_liar_is_named_and_gone_around(audited: Audited) -> None:
    audited.let_lie("a1", scaled)
    audit = await audited.text(1)
    assert isinstance(audit.verdict, Differs)
    assert {*audit.asked} == {audited.peer("b1"), audited.peer("c1")}
    assert audit.named == audited.peer("a1")
    again = await audited.text(1)
    assert again.hop.peer != audited.peer("a1")
    assert isinstance(again.verdict, Agrees | Unclear | Differs)
    assert again.named is None, "an honest machine was named"


async def test_who_lies_only_about_others_texts_names_itself(audited: Audited) -> None:
    """The machine that recomputes lies, and only there: the third one says so."""
    honest = await audited.text(1)
    liar = next(name for name in ("b1", "c1") if audited.peer(name) == honest.asked[0])
    audited.let_lie(liar, scaled)
    audit = await audited.text(1)
    assert audit.hop.peer == audited.peer("a1")
    assert audit.asked[0] == audited.peer(liar)
    assert audit.named == audited.peer(liar), "not whom it accuses"
    assert "a1" in audited.nodes.route()


async def judges(audited: Audited) -> tuple[str, str]:
    """Of the two other holders of the middle, the one that is asked first, and the one that decides."""
    first = (await audited.text(1)).asked[0]
    return ("b1", "c1") if audited.peer("b1") == first else ("c1", "b1")


async def test_a_third_machine_that_agrees_with_neither_decides_nothing(audited: Audited) -> None:
    _, third = await judges(audited)
    audited.let_lie("a1", scaled)
    audited.let_lie(third, lambda rows: rows * 0.99)
    audit = await audited.text(1)
    assert isinstance(audit.verdict, Differs)
    assert audited.peer(third) in audit.asked
    assert audit.named is None


async def test_two_judges_that_lie_alike_turn_a_client_away_from_an_honest_machine(audited: Audited) -> None:
    """The limit of a majority: it convicts nobody before `swarm verify`, which recomputes."""
    for judge in await judges(audited):
        audited.let_lie(judge, scaled)
    audit = await audited.text(1)
    assert audit.named == audited.peer("a1")


async def test_who_lies_in_some_texts_is_named_after_one_of_those(audited: Audited) -> None:
    count = 0
    audited.let_lie("a1", scaled, lambda: count == 2)
    for count in range(3):
        audit = await audited.text(1)
        assert audit.hop.peer == audited.peer("a1")
        assert audit.named == (audited.peer("a1") if count == 2 else None)


async def test_who_lies_to_strangers_alone_names_itself_where_it_judges(audited: Audited) -> None:
    """It is honest in texts of machines that the swarm lists. Nobody lists the client, which sends it an audit."""
    liar, _ = await judges(audited)
    model = audited.nodes[liar].sessions._context.model
    listed = {node.peer_id for node in audited.nodes.nodes.values()}
    senders: dict[int, str] = {}
    attach, encode = HopSession.attach, SweepRun.encode

    def noted(hop: HopSession, upstream: UpstreamStream, attached: Attach, sender: str) -> None:
        senders[id(hop)] = sender
        attach(hop, upstream, attached, sender)

    def lying(run: SweepRun) -> None:
        encode(run)
        stranger = any(senders.get(id(hop)) not in listed for hop in audited.nodes[liar].sessions._open.values())
        if run.model is model and stranger and run.rows is not None and run.rows.count:
            run.rows = encode_rows(scaled(decode_rows(run.rows, torch.float32)), run.rows.codec)

    audited.patch.setattr(HopSession, "attach", noted)
    audited.patch.setattr(SweepRun, "encode", lying)
    audit = await audited.text(1)
    assert audit.named == audited.peer(liar)


async def test_where_nobody_decides_nobody_is_named(audited: Audited) -> None:
    audited.let_lie("a0", scaled)
    audit = await audited.text(0)
    assert isinstance(audit.verdict, Differs)
    assert audit.named is None
    assert {*audited.suspected} == {audited.peer("a0"), audited.peer("b0")}


async def test_a_tail_that_names_other_tokens_differs(audited: Audited) -> None:
    audited.let_pick("a2", 5)
    audit = await audited.text(2)
    assert isinstance(audit.verdict, Differs)
    assert audit.verdict.what == "picks"


async def test_who_keeps_no_rows_is_suspected_and_no_more(audited: Audited) -> None:
    audited.rows.silent.add(audited.peer("a1"))
    audit = await audited.text(1)
    assert isinstance(audit.verdict, Unclear)
    assert audited.suspected == [audited.peer("a1")]


async def test_without_another_holder_nothing_is_said(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with auditing(nodes, monkeypatch) as found:
        audit = await found.text(1)
    assert isinstance(audit.verdict, Unclear)
    assert "nobody" in audit.verdict.reason
    assert found.suspected == []


async def test_a_machine_that_is_asked_sees_a_session_as_after_a_repair(audited: Audited) -> None:
    """Its attach and its snapshot are those of a machine that takes a lost one's place; nothing names an audit."""
    audit = await audited.text(1)
    first = next(hop for (peer, _), hop in audited.rows.hops.items() if peer == audit.asked[0])
    assert first._attach.generation == 1
    assert first._attach.index == 1
    assert [hop.span.start for hop in first._attach.route] == [0, 4, 8]
    assert first._attach.route[2].peer == audited.peer("a2")


async def test_a_text_that_was_repaired_is_not_audited(audited: Audited) -> None:
    audited.auditor._share = 0.0
    await audited.nodes.undisturbed(OTHER_IDS, **SAMPLED)
    audited.auditor._share = 1.0
    _, result = await struck(audited.nodes, ("a1",), ("b1",), 5, SAMPLED)
    assert result.stats.repairs
    assert not audited.auditor._is_busy
    assert not audited.auditor.done
