"""Texts of nodes with packed weights depend on model, format, prompt and seed alone, as they do in float32."""

from __future__ import annotations

import pytest

from swarm.demo import DRAFT, TARGET
from swarm.errors import RouteError
from tests.in_process_swarm import in_process_swarm, swarm_in

LAYOUTS = (["0-12"], ["0-6", "6-12"], ["0-4", "4-8", "8-12"])
PROMPT = "The lighthouse keeper opened the door, and"


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
async def test_machines_and_trees_leave_the_text_as_it_is(weights: str) -> None:
    texts: dict[tuple[float, tuple[int, ...], int, int], str] = {}
    bits = {"bf16": 16, "int8": 8, "int4": 4}[weights]
    for layout in LAYOUTS if weights == "int4" else LAYOUTS[::2]:
        async with in_process_swarm(TARGET, layout, weights=weights) as here, here.client(draft=DRAFT) as client:
            for temperature in (0.0, 1.0):
                for nodes in (0, 16):
                    result = await client.generate(
                        PROMPT, max_new_tokens=12, nodes=nodes, temperature=temperature, seed=3
                    )
                    assert result.stats.numeric_class == f"cpu-float32+w{bits}"
                    assert result.stats.reproducible
                    texts[temperature, tuple(result.tokens), nodes, len(layout)] = result.text
    assert len({key[:2] for key in texts}) == 2


async def test_a_chain_never_mixes_formats() -> None:
    async with (
        in_process_swarm(TARGET, ["0-6"], weights="int4") as here,
        swarm_in(here.network, TARGET, ["6-12"], {"weights": "int8"}),
        here.client() as client,
    ):
        with pytest.raises(RouteError, match="one numeric class"):
            await client.route()
