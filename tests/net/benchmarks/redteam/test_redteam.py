"""The red team's short form: attacks of several kinds on nodes of this process, and texts beside them that stay right.

What users feel of each attack, `python -m benchmarks redteam` measures; here nothing depends on the machine's speed.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import node.session.hop_session
from benchmarks.redteam.attack import Fight, Kind
from benchmarks.redteam.ground import Ground, NodeMark
from benchmarks.redteam.kit import Kit
from benchmarks.redteam.listing import all_attacks
from client import AsyncSwarm
from node.life.serve import Node
from swarm.demo import TARGET
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import Filing
from swarm.directory.sealing import RecordError
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.three_nodes import until

PROMPT = (2565, 591, 572, 289, 663, 281)
NEW_TOKENS = 6
SPARE_FILES = 24
"""Files that gRPC and the event loop may keep open that were not open before: pollers, idle connections of clients."""
TRIES = 24
"""Users who come until one of them meets a hostile machine."""
ATTACKS = (
    "bare-preface",
    "blames-successor",
    "dead-quick",
    "connection-churn",
    "half-preface",
    "half-tls",
    "hold-flood",
    "mutated-frames",
    "refused-sweeps",
    "reroute-flood",
    "reroute-jump",
    "says-full",
    "sequence-leap",
)


class MemoryKit(Kit):
    """A tool kit for a directory in memory."""

    def __init__(self, ground: Ground, network: MemoryNetwork) -> None:
        super().__init__(ground)
        self._network = network

    async def directory(self) -> Any:  # noqa: ANN401
        return MemoryRegistry(self._network)

    async def file(self, who: Identity, filings: Sequence[Filing], expires_at: float) -> list[bool]:
        return [self._takes(who, one, expires_at) for one in filings]

    def _takes(self, who: Identity, one: Filing, expires_at: float) -> bool:
        with suppress(RecordError):
            return one.subkey.endswith(who.peer_id) and self._network.store(one.key, one.subkey, one.data, expires_at)
        return False


@cache
def right_tokens() -> tuple[int, ...]:
    """Hugging Face's greedy continuation."""
    model = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tuple(ids[0].tolist()[len(PROMPT) :])


def mark(one: Node, log: Path) -> NodeMark:
    record = one.serving()
    return NodeMark(one.address, one.peer_id, record.span, record.certificate.hex(), str(log))


@asynccontextmanager
async def under(name: str, ground: Ground, here: InProcessSwarm) -> AsyncIterator[Fight]:
    """The attack goes on until the end of the block."""
    ready = asyncio.Event()
    async with MemoryKit(ground, here.network) as kit:
        listed = await MemoryRegistry(here.network).records(here.nodes[0].identity.fingerprint, 12)
        sealed = tuple(record.sealed for record in listed)
        fight = Fight(ground, kit, sealed, ready.set)
        async with asyncio.TaskGroup() as group:
            striking = group.create_task(cast("Any", all_attacks()[name].act(fight)))
            async with asyncio.timeout(20.0):
                await ready.wait()
            fight.started.set()
            try:
                yield fight
            finally:
                striking.cancel()


async def text(swarm: AsyncSwarm) -> tuple[int, ...]:
    result = await swarm.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0)
    return tuple(result.tokens)


async def come_and_go(here: InProcessSwarm) -> tuple[int, ...]:
    """A text for somebody who reads the directory for the first time."""
    async with here.client() as swarm:
        return await text(swarm)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("broken_calls")
async def test_texts_stay_right_under_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 0.2)
    log = tmp_path / "node.log"
    log.touch()
    async with in_process_swarm(TARGET, ["0-6", "6-12"], kv_tokens=20_000) as here, here.client() as swarm:
        assert await text(swarm) == right_tokens()
        first = here.nodes[0]
        marks = tuple(mark(one, log) for one in here.nodes)
        ground = Ground("", marks, first.identity, 192, 4_096, "cpu-float32", "", "", str(tmp_path))
        before = psutil.Process().num_fds()
        kinds = set()
        for name in ATTACKS:
            async with under(name, ground, here) as fight:
                texts = [await text(swarm), await come_and_go(here)]
                while all_attacks()[name].kind is Kind.HOPS and not fight.tally.acts and len(texts) < TRIES:
                    texts.append(await come_and_go(here))  # of chains that take the same time, chance takes one
            assert set(texts) == {right_tokens()}, name
            assert fight.tally.breaches == [], name
            assert "attracted nobody" not in fight.tally.notes, name
            kinds.add(all_attacks()[name].kind)
        assert {Kind.CONNECTIONS, Kind.FRAMES, Kind.SESSIONS, Kind.HOPS, Kind.RECORDS, Kind.CLOCKS} <= kinds

        async def is_calm() -> bool:
            await asyncio.sleep(0.05)  # else this loop and gRPC's threads have no time to close anything
            files, tables = psutil.Process().num_fds(), [one.sessions for one in here.nodes]
            is_free = all(len(table) == 0 and table.kv_tokens_free == table.kv_tokens for table in tables)
            return is_free and files <= before + SPARE_FILES

        assert await text(swarm) == right_tokens()
        gc.collect()
        await until(is_calm, 20.0)


def test_every_attack_says_in_one_line_what_it_does() -> None:
    attacks = all_attacks()
    assert len(attacks) > 90
    assert {one.kind for one in attacks.values()} == set(Kind)
    for one in attacks.values():
        assert one.about, one.name
        assert len(one.about) <= 112, one.name
