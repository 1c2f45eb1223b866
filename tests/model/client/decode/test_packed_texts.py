"""Texts of nodes with packed weights depend on model, format, prompt and seed alone, as they do in float32."""

from __future__ import annotations

import pytest

from swarm.base.errors import RouteError
from swarm.demo import DRAFT, TARGET
from tests.in_process_swarm import in_process_swarm, swarm_in

LAYOUTS = (["0-12"], ["0-4", "4-8", "8-12"])
PROMPT = "The lighthouse keeper opened the door, and"


async def test_machines_and_trees_leave_the_text_as_it_is() -> None:
    texts: set[tuple[float, tuple[int, ...]]] = set()
    for layout in LAYOUTS:
        async with in_process_swarm(TARGET, layout, weights="int4") as here, here.client(draft=DRAFT) as client:
            for temperature in (0.0, 1.0):
                for nodes in (0, 16):
                    result = await client.generate(
                        PROMPT, max_new_tokens=8, nodes=nodes, temperature=temperature, seed=3
                    )
                    assert result.stats.numeric_class == "cpu-float32+w4z"
                    assert result.stats.reproducible
                    texts.add((temperature, tuple(result.tokens)))
    assert len(texts) == 2, "one text for each temperature"


async def test_a_chain_never_mixes_formats() -> None:
    async with (
        in_process_swarm(TARGET, ["0-6"], weights="int4") as here,
        swarm_in(here.network, TARGET, ["6-12"], {"weights": "int8"}),
        here.client() as client,
    ):
        with pytest.raises(RouteError, match="one numeric class"):
            await client.route()
