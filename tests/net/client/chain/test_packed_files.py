"""A swarm of a GGUF file's own class: heads, audits and what is signed are judged there as in float32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from gguf import GGMLQuantizationType as Kind

from client import AsyncSwarm
from node.model import packed_span
from node.session.sweep_run import AskedPicks, SweepRun
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.compute.weights.format import computes_bfloat16
from swarm.protocol.numeric_class import ROUNDING_DIGITS
from swarm.trust.bounds import FAR_MEDIAN, FLOOR, PICK_FLOOR, Agrees, Differs
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.model.gguf_files import TinyGguf
from tests.net.three_nodes import engine_of, service_of, until

__test__ = computes_bfloat16(torch.device("cpu"))  # elsewhere such files are multiplied in float32
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

KIND = "cpu-bfloat16-k2+gguf"
IDS = [7 + 5 * place for place in range(40)]
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_new_tokens": 30, "nodes": 1}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return TinyGguf.of("llama", "llama", lambda *_: Kind.Q4_K, max_position_embeddings=256).write(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(file: Path) -> AsyncIterator[InProcessSwarm]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    async with in_process_swarm(file, ["0-2", "0-2", "0-2", "2-3", "2-3"], dtype="auto") as running:
        for node in running.nodes:
            await engine_of(node).on_thread(int)  # its thread lives as long as the node
        yield running


async def audited(client: AsyncSwarm, place: int) -> Any:  # noqa: ANN401
    """A text, and the audit of one of its hops."""
    auditor = client._opener.auditor
    assert auditor is not None
    await auditor.newest()  # of the text before
    auditor.draw = lambda _: place
    before = len(auditor.done)
    await client.generate(IDS, **OPTIONS)

    async def is_done() -> bool:
        return len(auditor.done) > before

    await until(is_done, timeout_s=30)
    return auditor.done[-1]


async def test_honest_machines_agree_to_the_bit(here: InProcessSwarm) -> None:
    async with here.client(check_picks=1.0, audit=1.0) as client:
        found = await client.generate(IDS, **OPTIONS)
        kind, _, mark = found.stats.numeric_class.partition("~")
        assert (kind, len(mark)) == (KIND, ROUNDING_DIGITS)
        checks = found.stats.picks
        assert (checks.judged, checks.largest_gap, checks.refuted) == (len(found.tokens), 0.0, ())
        for place in range(2):
            audit = await audited(client, place)
            assert isinstance(audit.verdict, Agrees), audit.verdict
            assert (audit.verdict.largest, audit.verdict.bound) == (0.0, FLOOR if place == 0 else PICK_FLOOR)
            assert audit.named is None


async def test_a_tail_that_picks_otherwise_is_refuted(here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    take, liars = SweepRun.take_picks, list[Any]()

    def taken(run: SweepRun, asked: AskedPicks, tokens: Sequence[int]) -> None:
        if not liars:
            liars.append(run.model)
        take(run, asked, [(token + 1) % 256 for token in tokens] if run.model is liars[0] else tokens)

    async with here.client(check_picks=1.0) as client:
        wanted = await client.generate(IDS, **OPTIONS)
        monkeypatch.setattr(SweepRun, "take_picks", taken)
        found = await client.generate(IDS, **OPTIONS)
    assert len(found.stats.picks.refuted) == 1
    assert found.tokens == wanted.tokens


def let_lie(monkeypatch: pytest.MonkeyPatch, noise: float) -> list[Any]:
    """Rows of the first machine that has some to send are off by so much; the list gets its model."""
    encode, liars = SweepRun.encode, list[Any]()

    def lying(run: SweepRun) -> None:
        encode(run)
        if run.rows is None or not run.rows.count or run.is_tail:
            return
        if not liars:
            liars.append(run.model)
        if run.model is liars[0]:
            rows = decode_rows(run.rows, torch.float32)
            drawn = torch.randn(rows.shape, generator=torch.Generator().manual_seed(len(rows)))
            run.rows = encode_rows(rows * (1 + noise * drawn), run.rows.codec)

    monkeypatch.setattr(SweepRun, "encode", lying)
    return liars


@pytest.mark.parametrize("noise", [0.2, 0.005])
async def test_a_hop_of_other_rows_is_named(
    noise: float, here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fifth, or by less than any other kind of processor rounds; the third machine says who of two it is."""
    liars = let_lie(monkeypatch, noise)
    async with here.client(audit=1.0) as client:
        audit = await audited(client, 0)
    assert isinstance(audit.verdict, Differs)
    assert len(audit.asked) == 2
    assert audit.named is not None
    (liar,) = [node for node in here.nodes if service_of(node).sessions._context.model is liars[0]]
    assert audit.named == liar.peer_id


async def test_processors_of_two_marks_are_not_named_for_rounding_and_promise_no_text_together(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = iter("00112" + "01")
    monkeypatch.setattr(packed_span, "rounding_of", lambda config: next(marks) * ROUNDING_DIGITS)
    async with in_process_swarm(file, ["0-2", "2-3", "0-2", "2-3", "0-2"], dtype="auto") as running:
        for node in running.nodes:
            await engine_of(node).on_thread(int)
        async with running.client(audit=1.0) as client:
            found = await client.generate(IDS, **OPTIONS)
            mark = found.stats.numeric_class.partition("~")[2]
            assert mark[0] in "01", "a chain of one kind goes before one of two"
            assert found.stats.reproducible
            let_lie(monkeypatch, 0.005)  # as another processor's rows are
            audit = await audited(client, 0)
            assert isinstance(audit.verdict, Agrees), audit.verdict
            assert audit.verdict.bound == FAR_MEDIAN
    async with in_process_swarm(file, ["0-2", "2-3"], dtype="auto") as running, running.client() as client:
        mixed = await client.generate(IDS, **OPTIONS)
        assert (mixed.stats.reproducible, mixed.stats.numeric_class) == (False, KIND)
