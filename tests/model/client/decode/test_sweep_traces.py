"""What people see of sweeps, over a real swarm: the traces of a text rebuild it, and say what the statistics say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from client import AsyncSwarm, Result
from client.decode.pipeline import MAX_TRACED_NODES
from swarm.demo import DRAFT, PASSAGES, TARGET
from tests.in_process_swarm import in_process_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = json.loads(PASSAGES.read_text().splitlines()[3])["text"][:60]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[AsyncSwarm]:
    async with in_process_swarm(TARGET, ["0-7", "7-12"]) as here, here.client(draft=DRAFT) as client:
        await client.generate("It", max_new_tokens=3, nodes=1)  # starts the threads that live as long as the swarm
        yield client


async def traced(swarm: AsyncSwarm, **options: Any) -> tuple[list[dict[str, Any]], str, Result]:  # noqa: ANN401
    sweeps: list[dict[str, Any]] = []
    text, result = "", None
    async for piece in swarm.stream(PROMPT, trace=True, seed=1, **options):
        sweeps += piece.sweeps
        text, result = text + piece.text, piece.result
    assert result is not None
    return json.loads(json.dumps(sweeps, allow_nan=False)), text, result


@pytest.mark.parametrize("nodes", [0, 16, None], ids=["plain", "trees", "chosen"])
async def test_traces_rebuild_the_text(swarm: AsyncSwarm, nodes: int | None) -> None:
    sweeps, text, result = await traced(swarm, nodes=nodes, max_new_tokens=40)
    emitted = [token for sweep in sweeps for token in sweep["emitted"]]
    assert tuple(token["token"] for token in emitted) == result.tokens
    assert "".join(token["text"] for token in emitted) == text == result.text
    assert [sweep["number"] for sweep in sweeps] == list(range(1, len(result.stats.sweeps) + 1))
    for sweep, measured in zip(sweeps, result.stats.sweeps, strict=True):
        carried = sum(node["is_carried"] for node in sweep["nodes"])
        assert carried == measured.nodes or carried <= MAX_TRACED_NODES < measured.nodes
        assert sweep["total_ms"] == pytest.approx(measured.total_ms, abs=1e-3)
        assert [hop["name"] for hop in sweep["hops"]] == list(result.stats.hops)
        assert sweep["is_part"] == measured.is_part


async def test_a_tree_shows_the_path_that_the_text_took(swarm: AsyncSwarm) -> None:
    sweeps, _, result = await traced(swarm, nodes=16, max_new_tokens=40)
    accepted = 0
    for sweep in sweeps:
        path = [node for node in sweep["nodes"] if node["is_accepted"]]
        following = list(result.tokens[sweep["start"] :][: len(path)])
        assert [node["token"] for node in path] == following
        assert len(path) in {len(sweep["emitted"]) - 1, len(sweep["emitted"])}  # as many where the text was cut
        parents = [node["parent"] for node in path]
        assert parents == [None, *(sweep["nodes"].index(node) for node in path)][: len(path)]
        assert all(0 <= node["probability"] <= 1 for node in sweep["nodes"])
        last = path[-1] if path else sweep["root"]
        accepted += len(path)
        if sweep["start"] + len(path) < len(result.tokens):
            assert last["pick"]["token"] == result.tokens[sweep["start"] + len(path)]
    assert accepted > len(sweeps)


async def test_a_cut_text_counts_no_token_behind_its_end(swarm: AsyncSwarm) -> None:
    whole = await swarm.generate(PROMPT, max_new_tokens=40, seed=1)
    word = whole.text.split()[8]
    sweeps, text, result = await traced(swarm, nodes=16, max_new_tokens=40, stop=word)
    assert result.finish_reason == "stop"
    emitted = [token for sweep in sweeps for token in sweep["emitted"]]
    assert tuple(token["token"] for token in emitted) == result.tokens
    assert "".join(token["text"] for token in emitted) == text == result.text


async def test_without_being_asked_nothing_is_traced(swarm: AsyncSwarm) -> None:
    assert [piece.sweeps async for piece in swarm.stream(PROMPT, max_new_tokens=8) if piece.sweeps] == []
