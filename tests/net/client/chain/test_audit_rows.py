"""Audits and `swarm verify` by what nodes settle and show: nothing is read beside the protocol."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from rich.console import Console

import client.chain.audit
import client.chain.sent_rows
from client.base.options import GenerateOptions
from client.chain.audit import SILENT, Audit, AuditedText, Auditor, AuditOwner, Seat, Sender, _other, _Picked, _Redone
from client.chain.opening import PeerLatency
from client.chain.sent_rows import SettledRows
from client.chain.settle import Settler
from client.library.aio import make_auditor
from node.model.in_class import load_in_class
from node.session.hop_session import HopSession
from node.session.settle import HopCommitments
from node.session.sweep_run import AskedPicks, SweepRun
from swarm.base.errors import HopClosed
from swarm.base.files import state_folder
from swarm.base.ids import PeerId, TreeNodeId
from swarm.commands.verify import VerifyText, verify_text
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.demo import TARGET
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.link.successor import SuccessorLink
from swarm.protocol import wire
from swarm.protocol.journal import Journal
from swarm.protocol.messages import RouteHop, Rows, Snapshot, SweepFrame
from swarm.protocol.session import CommittedToken
from swarm.routing.route import RouteQuery
from swarm.status.messages import EventKind
from swarm.trust.bounds import Agrees, Bounds, Differs, Judgement, Unclear
from swarm.trust.claims import read_claims
from swarm.trust.commitment import Committed
from swarm.trust.hop_evidence import MAGIC, check_hop
from swarm.trust.settlement import Settlement, SettlingKey
from swarm.trust.verify import AGREES, DIFFERS
from tests.net.killable_nodes import KillableNodes
from tests.net.three_nodes import prompt, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 40)
TEXT: GenerateOptions = {"max_new_tokens": 24, "nodes": 8, "temperature": 0.8, "seed": 7}
WITH_ROWS: GenerateOptions = {**TEXT, "proof": "rows"}


def let_lie(nodes: KillableNodes, name: str, patch: pytest.MonkeyPatch) -> None:
    model, encode = nodes[name].sessions._context.model, SweepRun.encode

    def lying(run: SweepRun) -> None:
        encode(run)
        if run.model is model and run.rows is not None and run.rows.count:
            run.rows = encode_rows(decode_rows(run.rows, torch.float32) * 1.001, run.rows.codec)

    patch.setattr(SweepRun, "encode", lying)


def let_pick(nodes: KillableNodes, name: str, patch: pytest.MonkeyPatch) -> None:
    model, take = nodes[name].sessions._context.model, SweepRun.take_picks

    def lying(run: SweepRun, asked: AskedPicks, tokens: Sequence[int]) -> None:
        if run.model is model:
            tokens = [token if node % 5 else token + 1 for node, token in zip(asked.nodes, tokens, strict=True)]
        take(run, asked, tokens)

    patch.setattr(SweepRun, "take_picks", lying)


@pytest.fixture
async def auditing(nodes: KillableNodes) -> AsyncIterator[KillableNodes]:
    """A client that audits each text, and has no evidence yet."""
    shutil.rmtree(state_folder() / "evidence", ignore_errors=True)
    for node in nodes.nodes.values():
        node.sessions.refuter.done.clear()
        node.running.resources.machine.refuted._at.clear()
    opener = nodes.client._opener
    await nodes.announce("b0", "b1", "c1", "b2")
    for name in ("b0", "b1", "c1", "b2"):
        opener.nearby.failed(nodes[name].peer_id)
    auditor = make_auditor(opener.dialer, opener.nearby, nodes.client._scope, 1.0)
    nodes.client._opener = replace(opener, auditor=auditor)
    yield nodes
    nodes.client._opener = replace(nodes.client._opener, auditor=None)


async def audited(nodes: KillableNodes, place: int) -> Audit:
    auditor = nodes.client._opener.auditor
    assert auditor is not None
    auditor.draw = lambda hops: place
    before = len(auditor.done)
    await nodes.client.generate(IDS, **TEXT)

    async def done() -> bool:
        await asyncio.sleep(0.01)
        return len(auditor.done) > before

    await until(done, 20)
    return auditor.done[-1]


@pytest.mark.parametrize("place", range(3))
async def test_an_honest_hop_agrees(place: int, auditing: KillableNodes) -> None:
    audit = await audited(auditing, place)
    assert isinstance(audit.verdict, Agrees), audit


@pytest.mark.parametrize("how", ["refuses", "another class", "another day", "no rows", "too late", "other leaves"])
async def test_who_signs_nothing_or_what_nobody_can_recompute_is_left_after_three_audits(
    how: str, auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a liar would rather not sign: it would be named for nothing."""
    liar = auditing["a1"].peer_id
    settle, seal = HopSession.settle, SettlingKey.seal
    kinds: dict[str, dict[str, Any]] = {"another class": {"numeric_class": "cpu-float16"}, "another day": {"at": 5}}
    changes, rows, leaves = kinds.get(how, {}), SettledRows.sent, Settler.leaves

    async def refused(self: HopSession) -> bytes | None:
        if self._context.peer == liar and how == "too late":
            await asyncio.Event().wait()
        return None if self._context.peer == liar and how == "refuses" else await settle(self)

    async def others(self: Settler, hop: RouteHop, *given: Any, **more: Any) -> tuple[Committed, ...]:  # noqa: ANN401
        shown = await leaves(self, hop, *given, **more)
        return shown[:1] + shown[:-1] if hop.peer == liar and how == "other leaves" else shown

    async def dropped(self: SettledRows, sender: Sender, committed: Sequence[CommittedToken]) -> Rows | None:
        return None if sender.hop.peer == liar and how == "no rows" else await rows(self, sender, committed)

    def otherwise(self: SettlingKey, settlement: Settlement, signer: object) -> bytes:
        return seal(self, replace(settlement, **(changes if settlement.peer == liar else {})), signer)

    monkeypatch.setattr(HopSession, "settle", refused)
    monkeypatch.setattr(SettlingKey, "seal", otherwise)
    monkeypatch.setattr(SettledRows, "sent", dropped)
    monkeypatch.setattr(Settler, "leaves", others)
    monkeypatch.setattr(client.chain.sent_rows, "KEEP_S", 0.5 if how == "too late" else 5.0)
    for _ in range(SILENT):
        assert isinstance((await audited(auditing, 1)).verdict, Unclear)
        assert "a1" in auditing.route()
    found = await audited(auditing, 1)
    assert isinstance(found.verdict, Agrees)
    assert "a1" not in auditing.route()
    assert f"node {liar} left no evidence of what it computed, 3 times" in caplog.text


async def test_a_friend_that_computes_nothing_hinders_no_audit(
    auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_lie(auditing, "a1", monkeypatch)
    recomputed, asked = client.chain.audit._recomputed, list[PeerId]()

    async def refused(owner: AuditOwner, seat: Seat, text: AuditedText, entering: Rows | None) -> _Redone:
        asked.append(seat.hop.peer)
        if len(asked) == 1:
            raise HopClosed(seat.hop.peer, str(seat.hop.span), "does not want to")
        return await recomputed(owner, seat, text, entering)

    monkeypatch.setattr(client.chain.audit, "_recomputed", refused)
    audit = await audited(auditing, 1)
    assert audit.named == auditing["a1"].peer_id
    assert audit.asked == (asked[1], asked[2])
    assert asked[1] != asked[0]


async def test_a_liar_is_named_and_gone_around(
    auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the evidence of it is a file of the user's alone, which `swarm verify` finds out, with the weights alone."""
    let_lie(auditing, "a1", monkeypatch)
    audit = await audited(auditing, 1)
    assert isinstance(audit.verdict, Differs), audit
    assert audit.named == auditing["a1"].peer_id
    (file,) = (state_folder() / "evidence").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"swarm verify {file} --model " in caplog.text
    assert "--layers 4-8" in caplog.text
    assert len(check_hop(file.read_bytes()).evidence.nodes) == 16, "not cut behind the first place"
    console = Console(record=True, width=200)
    assert verify_text(VerifyText(file, str(TARGET), "4-8"), console, read_claims, load_in_class) == DIFFERS
    shown = console.export_text()
    assert auditing["a1"].peer_id[-8:] in shown
    assert "DIFFERS: rows at 0, 1" in shown
    again = await audited(auditing, 1)
    assert "a1" not in auditing.route()
    assert again.named is None


async def reported(nodes: KillableNodes, *names: str) -> list[Judgement]:
    """What nodes found of the newest report, once they have computed it again."""

    async def done() -> bool:
        await asyncio.sleep(0.01)
        return all(nodes[name].sessions.refuter.done for name in names)

    await until(done, 20)
    return [next(reversed(nodes[name].sessions.refuter.done.values())) for name in names]


async def told_by(nodes: KillableNodes, name: str) -> list[NodeRecord]:
    """All records, once a node has renewed its own."""
    announcer = nodes[name].running.announcer
    await announcer._measure_delays()
    await announcer.announce(NodeState.SERVING)
    identity = nodes.client.identity
    return await nodes.client._opener.registry.records(identity.fingerprint, identity.num_layers)


async def test_who_recomputes_it_says_so_and_other_clients_audit_the_liar(
    auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two that were asked recompute the evidence, and tell of it by an event and in their records."""
    let_lie(auditing, "a1", monkeypatch)
    liar = auditing["a1"].peer_id
    await audited(auditing, 1)
    verdicts = await reported(auditing, "b1", "c1")
    assert [type(one) for one in verdicts] == [Differs, Differs]
    events = [one for one in auditing["b1"].running.resources.outbox._events if one.event is EventKind.REFUTED]
    (file,) = (state_folder() / "evidence").glob("*")
    assert events[-1].refuted is not None
    assert (events[-1].refuted.peer, str(events[-1].refuted.span)) == (liar, "4-8")
    assert events[-1].refuted.evidence == hashlib.sha256(file.read_bytes()).hexdigest()
    records = await told_by(auditing, "b1")
    assert [peer for record in records for peer, _ in record.refuted] == [liar]
    other = PeerLatency(probe=nobody_near)
    await other.measure(records, 12)
    assert other.refuted(liar) == 0.5
    assert [peer for peer, _ in other.query(RouteQuery("x", 12, 16)).failures if peer == liar] == [liar]
    other.agreed(liar)
    assert other.refuted(liar) == 0.0, "an own audit says more"


async def nobody_near(records: Sequence[NodeRecord]) -> dict[PeerId, float]:
    return {record.peer: 1.0 for record in records}


@pytest.mark.parametrize("is_lying", [False, True], ids=["honest", "lying"])
@pytest.mark.parametrize("place", range(3))
async def test_evidence_refutes_who_lies_and_nobody_else(
    place: int, is_lying: bool, auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends what a machine signed, as if an audit had named it: of an honest one, that is slander."""
    if is_lying:
        (let_pick if place == 2 else let_lie)(auditing, f"a{place}", monkeypatch)
    audit = Auditor.audit

    async def naming(auditor: Auditor, text: AuditedText, at: int) -> Audit:
        found = await audit(auditor, text, at)
        entering, cut = await auditor._entering(text, at)
        sender = auditor._sender(text, at)
        leaving = None if at == 2 else await auditor._sent(cut, at)
        seat = Seat(text.route, at)
        first = await _other(text, seat)
        found = replace(found, asked=(first.hop.peer,))
        liar = _Redone(leaving or _Picked.of_text(cut), sender, cut.committed)
        bounds = Bounds(text.route.numeric_class, text.route.numeric_class)
        await auditor._name(liar, entering, cut, Differs("rows", (48,), 1, 1.0, bounds.row), (first,))
        return found

    monkeypatch.setattr(Auditor, "audit", naming)
    found = await audited(auditing, place)
    wanted = Differs if is_lying else Agrees
    assert isinstance(found.verdict, wanted)
    other = next(name for name, node in auditing.nodes.items() if node.peer_id == found.asked[0])
    (verdict,) = await reported(auditing, other)
    assert isinstance(verdict, wanted), verdict
    peers = [peer for peer, _ in auditing[other].running.resources.machine.refuted._at.items()]
    assert (auditing[f"a{place}"].peer_id in peers) == is_lying
    newest = max((state_folder() / "evidence").iterdir(), key=lambda file: file.stat().st_mtime)
    console = Console(record=True, width=200)
    status = verify_text(VerifyText(newest, str(TARGET)), console, read_claims, load_in_class)
    assert status == (DIFFERS if is_lying else AGREES), console.export_text()


@pytest.mark.parametrize("is_lying", [False, True])
async def test_a_text_with_rows_is_verified(
    is_lying: bool, nodes: KillableNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_lying:
        let_lie(nodes, "a1", monkeypatch)
    result = await nodes.client.generate(IDS, **WITH_ROWS)
    file = tmp_path / "proof"
    assert result.proof is not None
    file.write_bytes(result.proof.data)
    console = Console(record=True, width=200)
    status = verify_text(VerifyText(file, str(TARGET)), console, read_claims, load_in_class)
    shown = console.export_text()
    assert status == (DIFFERS if is_lying else AGREES), shown
    if is_lying:
        lines = [line for line in shown.splitlines() if "DIFFERS" in line]
        assert any(nodes["a1"].peer_id[-8:] in line and "4-8" in line for line in lines), shown
        assert not any("0-4" in line or "8-12" in line for line in lines if "0-12" not in line), shown


async def test_who_shows_other_rows_than_it_sent_frames_nobody(
    auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hop before shows the client rows that it never sent: the honest one behind it is not named."""
    journal_find, sent = Journal.find, auditing["a0"].sessions

    def framing(journal: Journal, nodes: Sequence[TreeNodeId]) -> Rows | None:
        rows = journal_find(journal, nodes)
        is_own = any(hop.journal is journal for hop in sent._open.values()) or journal in hop_journals
        if rows is None or not is_own:
            return rows
        return encode_rows(decode_rows(rows, torch.float32) * 1.01, rows.codec)

    hop_journals: list[Journal] = []
    begin = HopSession.__init__

    def noted(hop: HopSession, context: Any, *given: Any) -> None:  # noqa: ANN401
        begin(hop, context, *given)
        if context.peer == auditing["a0"].peer_id:
            hop_journals.append(hop.journal)

    monkeypatch.setattr(HopSession, "__init__", noted)
    monkeypatch.setattr(Journal, "find", framing)
    audit = await audited(auditing, 1)
    assert isinstance(audit.verdict, Unclear), audit
    assert audit.named is None


def let_send_otherwise(liar: str, patch: pytest.MonkeyPatch) -> None:
    """Let a machine send other rows than it signs."""
    push = SuccessorLink.push

    def lying(link: SuccessorLink, frame: SweepFrame) -> None:
        own = getattr(getattr(link._listener, "_context", None), "peer", None)
        if own == liar and frame.rows is not None and frame.rows.count:
            values = decode_rows(frame.rows, torch.float32) * 2
            frame = replace(frame, rows=encode_rows(values, frame.rows.codec))
        push(link, frame)

    patch.setattr(SuccessorLink, "push", lying)
    committed = HopCommitments.sent

    def honest(self: HopCommitments, receiver: str, since: int, message: SweepFrame | Snapshot, state: Any) -> None:  # noqa: ANN401
        if self._peer == liar and isinstance(message, SweepFrame) and message.rows is not None and message.rows.count:
            values = decode_rows(message.rows, torch.float32) / 2
            message = replace(message, rows=encode_rows(values, message.rows.codec))
        committed(self, receiver, since, message, state)

    patch.setattr(HopCommitments, "sent", honest)


async def test_who_sends_other_rows_than_it_signs_is_a_matter_of_its_link(
    auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_send_otherwise(auditing["a1"].peer_id, monkeypatch)
    result = await auditing.client.generate(IDS, **TEXT)
    assert result.stats.repairs, "the two that signed different heads carry it while the text runs"
    auditor = auditing.client._opener.auditor
    assert auditor is not None
    assert not any(audit.named for audit in auditor.done)


async def test_who_covers_for_the_hop_before_answers_for_its_lie(
    auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It signs that it received what that one signed, not what came: so its own rows do not follow from it."""
    let_send_otherwise(auditing["a0"].peer_id, monkeypatch)
    received, accomplice = HopCommitments.received, auditing["a1"].peer_id

    def covering(self: HopCommitments, message: SweepFrame | Snapshot, state: Any) -> None:  # noqa: ANN401
        if self._peer == accomplice and message.rows is not None and message.rows.count:
            values = decode_rows(message.rows, torch.float32) / 2
            message = replace(message, rows=encode_rows(values, message.rows.codec))
        received(self, message, state)

    monkeypatch.setattr(HopCommitments, "received", covering)
    audit = await audited(auditing, 1)
    assert audit.named == accomplice, audit


async def answer(nodes: KillableNodes, *pieces: bytes) -> str:
    """What a node says to a report: the status of the call."""
    dialer, route = nodes.client._opener.dialer, await nodes.client.route()
    channel: Any = dialer.channel(route.endpoint(nodes["a0"].peer_id))
    call = channel.stream_stream(wire.REPORT)()
    try:
        for piece in pieces:
            await call.write(piece)
        await call.done_writing()
        await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    return str((await call.code()).name)


async def test_garbage_and_floods_of_reports_are_refused_and_texts_go_on(nodes: KillableNodes) -> None:
    junk = random.Random(1).randbytes(1 << 20)
    assert await answer(nodes, junk) == "INVALID_ARGUMENT"
    assert await answer(nodes, *[junk] * 17) == "INVALID_ARGUMENT"
    assert await answer(nodes, MAGIC + junk[:99]) == "INVALID_ARGUMENT"
    assert await answer(nodes) == "INVALID_ARGUMENT"
    codes = [await answer(nodes, b"x") for _ in range(80)]
    assert codes[-1] == "RESOURCE_EXHAUSTED", "four an hour, sixteen times as many for a private address"
    assert (await nodes.client.generate(IDS, **TEXT)).tokens


async def test_who_begins_with_kept_tokens_is_audited_as_often_and_suspects_nobody(auditing: KillableNodes) -> None:
    """Machines sign nothing of rows that they held before, so a text that is to be audited begins without them."""
    auditor, suspected = auditing.client._opener.auditor, list[PeerId]()
    assert auditor is not None
    auditor._owner = replace(auditor._owner, suspected=suspected.append)
    auditor._share, auditor.draw, long = 0.0, lambda hops: 1, [*IDS, *range(40, 240)]
    await auditing.client.generate(long, **TEXT)
    auditor._share, before = 1.0, list(auditor.done)
    flips = iter([False])  # tails, and asked no more
    auditor._toss = lambda share: next(flips)
    kept = await auditing.client.generate(long, **TEXT)
    assert kept.stats.reused_tokens >= 192
    auditor._toss = lambda share: share > 0
    text = await auditing.client.generate(long, **TEXT)
    assert (text.stats.reused_tokens, text.tokens) == (0, kept.tokens)
    audit = await auditor.newest()
    assert audit is not None
    assert list(auditor.done) == [*before, audit], "the one before began with kept tokens"
    assert isinstance(audit.verdict, Agrees), audit
    assert not suspected
