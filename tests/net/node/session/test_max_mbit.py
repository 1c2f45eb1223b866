"""A node whose owner bounds what it sends: the same text, no faster than that, and nobody takes it for dead."""

from __future__ import annotations

import time

import pytest

from swarm.demo import TARGET
from swarm.link.link import BURST_S
from tests.in_process_swarm import in_process_swarm
from tests.net.raw_client import counters
from tests.net.three_nodes import prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPANS = ["0-8", "8-12"]
PROMPT_TOKENS = 200
"""Rows of 768 bytes: 1.2 Mbit, which a loopback takes in a moment."""
MBIT = 1.0
SMALL_MESSAGES_BYTES = 20_000
"""Pings and receipts, which do not wait."""


@pytest.mark.usefixtures("links")
async def test_a_prompt_leaves_no_faster_than_the_limit_and_the_chain_holds() -> None:
    tokens = (prompt(1, tokens=60) * 4)[:PROMPT_TOKENS]
    async with in_process_swarm(TARGET, SPANS, max_mbit=MBIT) as here, here.client() as swarm:
        first = here.nodes[0]
        uplink = first.running.resources.uplink
        assert first.serving().uplink_mbit_per_s == MBIT, "routes know it"
        started = time.monotonic()
        result = await swarm.generate(tokens, max_new_tokens=4, nodes=0)
        passed_s = time.monotonic() - started
        sent_bytes = first.running.resources.counters.bytes_out
        assert result.stats.repairs == ()
        assert (await counters([first]))[0].errors == 0
        uplink.mbit_per_s = None
        plain = await swarm.generate(tokens, max_new_tokens=4, nodes=0)
        assert result.tokens == plain.tokens
    assert sent_bytes > 0.8 * PROMPT_TOKENS * 768, "its rows, packed (F6)"
    assert sent_bytes <= (passed_s + BURST_S) * MBIT * 1e6 / 8 + SMALL_MESSAGES_BYTES
