"""What a hop commits to, without a chain: order, memory, and what is kept when a session is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgpack
import pytest

import node.session.settle
from node.session.context import JournalBudget
from node.session.settle import SETTLE_S, HopCommitments, SettledTexts, show
from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.compute.compute_thread import ComputeThread
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Codec, Rows, Show, Shown, Sweep, SweepFrame
from swarm.protocol.session import Limits, SessionState

SESSION, ME = SessionId(b"s" * 16), PeerId("me")
WIDTH = 4
LEAVES, ROWS = Show(SESSION, sent=True), Show(SESSION, sent=True, nodes=(0, 1))


@pytest.fixture
def thread() -> Iterator[ComputeThread]:
    made = ComputeThread("hashing")
    yield made
    made.close()


class Hop:
    """A middle hop that takes a sweep and sends it on."""

    def __init__(self, thread: ComputeThread) -> None:
        self.state = SessionState(Limits(100, 64, 8, 64))
        self.journal = Journal(self.state)
        self.commitments = HopCommitments(SESSION, ME, thread)
        self.commitments.listen(0, "before")

    def sweep(self, number: int) -> None:
        node = TreeNodeId(2 * (number - 1))
        parents = (None, node)
        sweep = Sweep(number, node, node, (1, 2), parents, node, commit_to=TreeNodeId(node - 1) if number > 1 else None)
        applied = self.state.apply(sweep)
        rows = Rows(Codec.FP32, 2, WIDTH, bytes(range(2 * 4 * WIDTH)))
        frame = SweepFrame(sweep, None, rows)
        self.commitments.received(frame, self.state)
        self.journal.keep(applied, applied.appended, rows)
        self.journal.note(sweep)
        self.commitments.sent("behind", 0, frame, self.state)


async def test_heads_are_of_the_last_sweep_that_both_sides_have(thread: ComputeThread) -> None:
    hop = Hop(thread)
    assert hop.commitments.heads() is None
    for number in (1, 2, 3):
        hop.sweep(number)
    received, sent = await hop.commitments.settle()
    heads = hop.commitments.heads()
    assert heads is not None
    assert (heads.sequence, heads.received, heads.sent) == (3, received[0].head, sent[0].head)
    assert (received[0].other, sent[0].other, received[0].count) == ("before", "behind", 3)


async def test_a_new_stream_begins_with_each_machine_that_is_attached(thread: ComputeThread) -> None:
    hop = Hop(thread)
    hop.sweep(1)
    hop.commitments.listen(1, "another")
    hop.sweep(2)
    received, sent = await hop.commitments.settle()
    assert [(one.since, one.other, one.count) for one in received] == [(0, "before", 1), (1, "another", 1)]
    assert [one.count for one in sent] == [2]


async def test_a_message_without_its_place_breaks_its_stream(thread: ComputeThread) -> None:
    hop = Hop(thread)
    hop.sweep(1)
    hop.commitments.refused()
    hop.sweep(2)
    (received,), (sent,) = await hop.commitments.settle()
    assert (received.is_broken, received.count, sent.is_broken, sent.count) == (True, 1, False, 2)


async def test_a_tail_shows_final_rows_of_its_newest_picks_while_there_is_room(
    thread: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    hop = Hop(thread)
    row = Rows(Codec.FP32, 1, WIDTH, bytes(4 * WIDTH))
    monkeypatch.setattr(node.session.settle, "PICKED_BYTES", 3 * row.size_bytes)
    for number in range(5):
        hop.commitments.computed({TreeNodeId(number): replace(row, data=bytes([number]) * 4 * WIDTH)})
        hop.commitments.answered()
    asked = Show(SESSION, sent=True, nodes=(4, 2))
    shown = show(asked, hop.commitments, hop.journal)
    assert msgpack.unpackb(shown.data) == [Codec.FP32.value, 2, WIDTH, bytes([4] * 4 * WIDTH + [2] * 4 * WIDTH)]
    assert show(replace(asked, nodes=(1,)), hop.commitments, hop.journal).state is Shown.UNKNOWN
    JournalBudget(0).settle(0, hop.journal, hop.commitments)
    assert show(asked, hop.commitments, hop.journal).state is Shown.UNKNOWN


async def test_nothing_is_said_of_a_session_that_was_hedged(thread: ComputeThread) -> None:
    hop = Hop(thread)
    hop.sweep(1)
    hop.commitments.stop()
    hop.sweep(2)
    assert await hop.commitments.settle() == ((), ())
    assert hop.commitments.heads() is None


async def test_leaves_and_rows_are_shown_once_they_are_settled(thread: ComputeThread) -> None:
    hop = Hop(thread)
    hop.sweep(1)
    assert show(LEAVES, hop.commitments, hop.journal).state is Shown.UNKNOWN
    await hop.commitments.settle()
    (message,) = msgpack.unpackb(show(LEAVES, hop.commitments, hop.journal).data)
    assert message[0] == 1
    codec, count, width, data = msgpack.unpackb(show(ROWS, hop.commitments, hop.journal).data)
    assert (codec, count, width, data) == ("fp32", 2, WIDTH, bytes(range(2 * 4 * WIDTH)))
    unknown = Show(SESSION, sent=True, stream=3)
    assert show(unknown, hop.commitments, hop.journal).state is Shown.UNKNOWN
    assert show(Show(SESSION, sent=True, nodes=(60,)), hop.commitments, hop.journal).state is Shown.UNKNOWN
    hop.commitments.drop()
    hop.journal.drop()
    assert show(LEAVES, hop.commitments, hop.journal).state is Shown.DROPPED
    assert show(ROWS, hop.commitments, hop.journal).state is Shown.DROPPED


async def test_what_is_over_stays_for_a_while(thread: ComputeThread) -> None:
    now_s, hop = [0.0], Hop(thread)
    hop.sweep(1)
    await hop.commitments.settle()
    texts = SettledTexts(lambda: now_s[0])
    texts.keep(SESSION, b"sealed", hop.commitments, hop.journal)
    now_s[0] = SETTLE_S - 1
    assert texts.sealed(SESSION) == b"sealed"
    assert texts.show(ROWS).state is Shown.HERE
    now_s[0] = SETTLE_S
    assert texts.show(ROWS).state is Shown.UNKNOWN
    assert (texts.sealed(SESSION), len(texts)) == (None, 0)


async def test_sessions_that_run_have_the_room_of_those_that_are_over(thread: ComputeThread) -> None:
    """What was settled goes first, then leaves of the session that grows, and its journal last."""
    over, running = Hop(thread), Hop(thread)
    over.sweep(1)
    await over.commitments.settle()
    row_bytes, leaf_bytes = 4 * WIDTH, 40
    budget = JournalBudget(4 * row_bytes + 2 * 2 * leaf_bytes)
    budget.settled.keep(SESSION, b"sealed", over.commitments, over.journal)
    running.sweep(1)
    await running.commitments.settle()
    paid = budget.settle(0, running.journal, running.commitments)
    assert paid == 2 * row_bytes + 4 * leaf_bytes
    assert budget.settled.show(ROWS).state is Shown.DROPPED
    assert budget.settled.sealed(SESSION) == b"sealed"
    running.sweep(2)
    await running.commitments.settle()
    paid = budget.settle(paid, running.journal, running.commitments)
    assert (paid, running.journal.is_dropped) == (4 * row_bytes, False)
    for number in range(3, 9):
        running.sweep(number)
    paid = budget.settle(paid, running.journal, running.commitments)
    assert (paid, running.journal.is_dropped, budget.used_bytes) == (0, True, 0)
