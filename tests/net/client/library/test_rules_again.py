"""Rules of picks in a session that has made a text already: each text begins them anew."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from client.base.options import Grammar, make_options
from tests.net.three_nodes import ThreeNodes, prompt, three_nodes

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS = prompt(4, 24)
SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
SCHEMED: dict[str, Any] = {"grammar": Grammar("json_schema", json.dumps(SCHEMA))}
RULES: dict[str, dict[str, Any]] = {
    "grammar": SCHEMED,
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[ThreeNodes]:
    async with three_nodes() as running:
        yield running


@pytest.mark.parametrize(("name", "nodes"), [("grammar", 0), ("grammar", 8), ("penalties", 0), ("penalties", 8)])
async def test_a_second_text_of_the_same_prompt_begins_its_rules_anew(
    running: ThreeNodes, name: str, nodes: int
) -> None:
    client = running.client
    drawn = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]
    asked: list[dict[str, Any]] = [{"max_new_tokens": 12, "nodes": nodes, **RULES[name], **one} for one in drawn]
    fresh = [(await client.generate(IDS, **options)).tokens for options in asked]
    async with client.opener.open(len(IDS) + 12, nodes) as session:
        for options, expected in zip(asked, fresh, strict=True):
            state = client.factory.make(IDS, make_options(options))  # type: ignore[arg-type]
            await client.factory.check_grammar(state)
            async for piece in session.run(state):
                result = piece.result
            assert result is not None
            assert result.tokens == expected, options
