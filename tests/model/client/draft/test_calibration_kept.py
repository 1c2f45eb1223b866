"""What a client learns about its draft outlives it, and changes no text."""

from __future__ import annotations

import logging
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from client import Result
from client.draft import loading
from client.draft.loading import load_calibration
from client.draft.search.calibration import START
from swarm.demo import DRAFT, TARGET
from tests.in_process_swarm import InProcessSwarm, in_process_swarm

PROMPT = "It was a dark night, and the captain said"


async def generate(here: InProcessSwarm, folder: Path | None, nodes: int) -> Result:
    async with here.client(draft=DRAFT, calibration=folder) as swarm:
        return await swarm.generate(PROMPT, max_new_tokens=32, temperature=0.0, nodes=nodes)


def written(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@pytest.mark.asyncio
async def test_the_next_client_begins_with_what_the_last_one_learned(tmp_path: Path) -> None:
    async with in_process_swarm(TARGET, ["0-12"]) as here:
        plain, first, second = [await generate(here, tmp_path, nodes) for nodes in (0, 16, 16)]
        await generate(here, None, 16)
    assert plain.text == first.text == second.text
    [file] = written(tmp_path)
    greedy, *others = load_calibration(file).fits
    assert (greedy.weights != START).any()
    assert all((fit.weights == START).all() for fit in others)
    assert len(second.stats.sweeps) < len(first.stats.sweeps), "the same text again, with better trees"


@pytest.mark.asyncio
async def test_a_cache_that_cannot_be_written_does_not_break_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    heard = BufferingHandler(100)
    monkeypatch.setattr(loading.logger, "handlers", [heard])
    async with in_process_swarm(TARGET, ["0-12"]) as here:
        result = await generate(here, tmp_path / "file" / "cache", 16)
    assert len(result.tokens) == 32
    assert [record.levelno for record in heard.buffer] == [logging.WARNING] * 2
