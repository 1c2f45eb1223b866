"""Audits and `swarm verify` by what nodes settle and show: nothing is read beside the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from client.base.options import GenerateOptions
from client.chain.audit import Audit
from client.library.aio import _auditor
from node.session.hop_session import HopSession
from node.session.settle import HopCommitments
from node.session.sweep_run import SweepRun
from swarm.base.ids import TreeNodeId
from swarm.commands.verify import VerifyText, load_plain, verify_text
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.demo import TARGET
from swarm.link.successor import SuccessorLink
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Rows, Snapshot, SweepFrame
from swarm.trust.bounds import Agrees, Differs, Unclear
from swarm.trust.claims import read_claims
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


@pytest.fixture
async def auditing(nodes: KillableNodes) -> AsyncIterator[KillableNodes]:
    """A client that audits each text."""
    opener = nodes.client._opener
    await nodes.announce("b0", "b1", "c1", "b2")
    for name in ("b0", "b1", "c1", "b2"):
        opener.nearby.failed(nodes[name].peer_id)
    auditor = _auditor(opener.dialer, opener.nearby, nodes.client._scope, 1.0)
    nodes.client._opener = replace(opener, auditor=auditor)
    yield nodes
    nodes.client._opener = replace(nodes.client._opener, auditor=None)


async def audited(nodes: KillableNodes, place: int) -> Audit:
    auditor = nodes.client._opener.auditor
    assert auditor is not None
    auditor._draw = lambda hops: place
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


async def test_a_liar_is_named_and_gone_around(auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    let_lie(auditing, "a1", monkeypatch)
    audit = await audited(auditing, 1)
    assert isinstance(audit.verdict, Differs), audit
    assert audit.named == auditing["a1"].peer_id
    again = await audited(auditing, 1)
    assert "a1" not in auditing.route()
    assert again.named is None


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
    status = verify_text(VerifyText(file, str(TARGET)), console, read_claims, load_plain)
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


async def test_who_sends_other_rows_than_it_signs_is_a_matter_of_its_link(
    auditing: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = SuccessorLink.push
    liar = auditing["a1"].peer_id

    def lying(link: SuccessorLink, frame: SweepFrame) -> None:
        own = getattr(getattr(link._listener, "_context", None), "peer", None)
        if own == liar and frame.rows is not None and frame.rows.count:
            values = decode_rows(frame.rows, torch.float32) * 1.01
            frame = replace(frame, rows=encode_rows(values, frame.rows.codec))
        push(link, frame)

    monkeypatch.setattr(SuccessorLink, "push", lying)
    committed = HopCommitments.sent

    def honest(self: HopCommitments, receiver: str, since: int, message: SweepFrame | Snapshot, state: Any) -> None:  # noqa: ANN401
        if self._peer == liar and isinstance(message, SweepFrame) and message.rows is not None and message.rows.count:
            values = decode_rows(message.rows, torch.float32) / 1.01
            message = replace(message, rows=encode_rows(values, message.rows.codec))
        committed(self, receiver, since, message, state)

    monkeypatch.setattr(HopCommitments, "sent", honest)
    result = await auditing.client.generate(IDS, **TEXT)
    assert result.stats.repairs, "the two that signed different heads carry it while the text runs"
    auditor = auditing.client._opener.auditor
    assert auditor is not None
    assert not any(audit.named for audit in auditor.done)
