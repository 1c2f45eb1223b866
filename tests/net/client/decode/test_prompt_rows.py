"""Hidden rows of a prompt's last tokens, over real nodes: the whole model's, bounded, and what a head makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import client.chain.answers
import node.session.tail
import swarm.link.link
from client import AsyncSwarm
from client.base.options import Options
from client.decode.state import GenerationState
from client.draft.search.source import Search
from client.draft.sources.layer_head import LayerHeadSource
from client.draft.sources.model import LocalSession
from node.session.sweep_run import SweepRun
from node.session.tail import Tail
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import TARGET
from swarm.protocol.frames import FrameAssembler
from swarm.protocol.limits import MAX_PROMPT_ROWS
from swarm.protocol.messages import Frame, Reply, Rows
from swarm.protocol.session import Limits
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.model.published_mtp import publish
from tests.net.client.decode.stalled_tail import stall_a_tail
from tests.net.three_nodes import engine_of, prompt, server_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 60)
NEW = 6
CHUNK = 16


@dataclass(frozen=True, slots=True)
class TwoTails:
    """Two tails, of which a chain uses one, and a client."""

    swarm: InProcessSwarm
    client: AsyncSwarm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[TwoTails]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    with pytest.MonkeyPatch.context() as patch:
        for module in (swarm.link.link, client.chain.answers):
            patch.setattr(module, "SILENCE_S", 20.0)  # however busy the machine is
        async with in_process_swarm(TARGET, ["0-6", "6-12", "6-12"]) as here, here.client() as opened:
            for one in here.nodes:
                await engine_of(one).on_thread(int)  # its thread lives as long as the node
            await opened.generate("It", max_new_tokens=2)
            yield TwoTails(here, opened)


@pytest.fixture(scope="module")
def whole() -> RaggedModel:
    return load_whole(TARGET, torch.float32)


@dataclass
class Listener:
    """Rows that one generation was told, by position in the text, and the texts that they came with."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        first = len(sequence) - len(rows)
        self.texts.append(tuple(sequence))
        self.rows |= {first + place: row for place, row in enumerate(rows)}

    def check(self, whole: RaggedModel, text: Sequence[int], first: int) -> None:
        """All rows are the whole model's, and none is missing from `first` to the last token of the text that ran."""
        session = LocalSession(whole, Limits(4096, 256, 1, 256))
        expected = session.run(session.next(text, [None, *range(len(text) - 1)]))
        assert sorted(self.rows) == list(range(first, max(self.rows) + 1))
        assert max(self.rows) >= len(text) - 2
        for position, row in self.rows.items():
            error = (row - expected[position]).abs().max() / expected[position].abs().max()
            assert error < 1e-5, f"position {position}"
        assert all(tuple(text[: len(told)]) == told for told in self.texts)


def job_of(swarm: AsyncSwarm, listener: Listener, ids: Sequence[int], rows: int, **options: Any) -> GenerationState:  # noqa: ANN401
    job: GenerationState = swarm._factory.make(ids, Options(max_new_tokens=NEW, **options))
    job.observe, job.prompt_rows, job.chunk = listener.observe, rows, CHUNK
    return job


async def tokens_of(run: Any) -> tuple[int, ...]:  # noqa: ANN401 - what a session or a swarm generates
    found: tuple[int, ...] | None = None
    async for piece in run:
        found = found if piece.result is None else piece.result.tokens
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [MAX_PROMPT_ROWS, 37, 5, 0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_prompt_in_parts_brings_the_rows_of_its_last_tokens(
    rows: int, temperature: float, running: TwoTails, whole: RaggedModel
) -> None:
    listener, options = Listener(), dict[str, Any](temperature=temperature, seed=7)
    tokens = await tokens_of(running.client._once(job_of(running.client, listener, IDS, rows, **options)))
    assert tokens == (await running.client.generate(IDS, max_new_tokens=NEW, **options)).tokens
    listener.check(whole, (*IDS, *tokens), max(0, len(IDS) - 1 - rows))


async def test_rows_in_replies_travel_packed(
    running: TwoTails, whole: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.link.link, "NEAR_MS", 0.0)
    monkeypatch.setattr(swarm.link.link, "THREAD_BYTES", 0)
    finish, listener, found = FrameAssembler.finish, Listener(), list[Rows]()

    def noted(self: FrameAssembler) -> Frame | None:
        frame = finish(self)
        found.extend([frame.rows] if isinstance(frame, Reply) and frame.rows is not None else ())
        return frame

    monkeypatch.setattr(FrameAssembler, "finish", noted)
    tokens = await tokens_of(running.client._once(job_of(running.client, listener, IDS, MAX_PROMPT_ROWS)))
    assert [rows.count for rows in found if rows.is_packed] == [16, 16, 16]
    listener.check(whole, (*IDS, *tokens), 0)


async def test_of_a_prefix_that_the_session_holds_no_row_comes_again(running: TwoTails, whole: RaggedModel) -> None:
    first, second, changed = Listener(), Listener(), Listener()
    async with running.client.opener.open(200, 0) as session:
        tokens = await tokens_of(session.run(job_of(running.client, first, IDS[:30], MAX_PROMPT_ROWS)))
        longer = (*IDS[:30], *tokens, *IDS[40:60])
        job = job_of(running.client, second, longer, MAX_PROMPT_ROWS)
        told = await tokens_of(session.run(job))
        other = (*longer[:20], *IDS[:30])  # an earlier turn was changed
        again = job_of(running.client, changed, other, MAX_PROMPT_ROWS)
        third = await tokens_of(session.run(again))
    assert job.kept_tokens >= 34
    assert again.kept_tokens == 20
    second.check(whole, (*longer, *told), job.kept_tokens)
    changed.check(whole, (*other, *third), 20)
    for prompt_of, text in ((longer, told), (other, third)):
        assert text == (await running.client.generate(prompt_of, max_new_tokens=NEW)).tokens


async def test_a_tail_sends_no_more_bytes_than_it_may_keep(
    running: TwoTails, whole: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.session.tail, "PROMPT_ROWS_BYTES", 5 * 4 * whole.hidden_size)
    replies, reply_of = list[Reply](), Tail.reply

    def noting(tail: Tail, run: SweepRun, times: Any) -> Reply:  # noqa: ANN401
        replies.append(reply_of(tail, run, times))
        return replies[-1]

    monkeypatch.setattr(Tail, "reply", noting)
    listener = Listener()
    tokens = await tokens_of(running.client._once(job_of(running.client, listener, IDS, MAX_PROMPT_ROWS)))
    assert tokens == (await running.client.generate(IDS, max_new_tokens=NEW)).tokens
    parts = [reply for reply in replies if not reply.picks]
    assert len(parts) >= 4
    assert {len(reply.row_ids) for reply in parts} <= {0, 5}
    kept = [reply.row_ids for reply in parts if reply.row_ids]
    assert kept, "the newest of a part, as long as the client acknowledges"
    assert all(ids[-1] % CHUNK == CHUNK - 1 or ids[-1] == len(IDS) - 2 for ids in kept)


async def test_rows_after_the_tails_death_with_a_part_of_the_prompt_in_flight(
    running: TwoTails, whole: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new tail sends the rows of parts that were unanswered. The last test on these nodes: one of them is dead."""
    listener = Listener()
    struck, arrived = stall_a_tail(3, monkeypatch)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        job = job_of(running.client, listener, IDS, MAX_PROMPT_ROWS)
        telling = group.create_task(tokens_of(running.client._once(job)))
        await arrived.wait()
        [victim] = [one for one in running.swarm.nodes if one.peer_id in struck]
        await server_of(victim).stop(None)
        await victim.running.resources.dialer.__aexit__()
    listener.check(whole, (*IDS, *telling.result()), 0)
    assert sum(one.sessions.info().counters.restores for one in running.swarm.nodes) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_attending_heads_first_tree_sees_the_prompt(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []
    begin = LayerHeadSource.begin

    def noting(source: LayerHeadSource, search: Search) -> bool:
        did = begin(source, search)
        if did:
            seen.append((source._base, source._count, len(search.sequence)))
        return did

    monkeypatch.setattr(LayerHeadSource, "begin", noting)
    folder, ids = publish("deepseek_v3", tmp_path, is_able=True), list(range(3, 43))
    async with (
        in_process_swarm(folder, ["0-2", "2-4"]) as here,
        here.client(draft="mtp", lookup=False, siblings=False) as swarm,
    ):
        generate = partial(swarm.generate, ids, max_new_tokens=16, temperature=temperature, seed=3)
        plain = await generate(nodes=0)
        seen.clear()  # of the warm-up
        told = await generate(nodes=12)
    assert told.tokens == plain.tokens
    base, count, length = seen[0]
    assert (base, base + count) == (0, length - 1), "entries of the prompt and of the newest row"
    assert length >= len(ids)
