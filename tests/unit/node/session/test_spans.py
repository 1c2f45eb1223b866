"""Which of a machine's spans a call is for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from node.session.spans import ServedSpans
from swarm.base.ids import SessionId
from swarm.protocol import wire
from swarm.protocol.manifest import Manifest, WeightFile

FIRST, SECOND = SessionId(b"\1" * 32), SessionId(b"\2" * 32)
MANIFESTS = [Manifest.of([WeightFile(f"{name}.safetensors", 9, "ab" * 32)]) for name in ("a", "b")]


class Table:
    """The sessions of one model; one comes when it is told to."""

    def __init__(self, *sessions: SessionId) -> None:
        self.sessions = set(sessions)
        self.comes = asyncio.Event()

    def __len__(self) -> int:
        return 0  # a table without sessions is one all the same

    def find(self, session: SessionId) -> object:
        return (self, session) if session in self.sessions else None

    async def find_tail(self, session: SessionId, seconds: float) -> object:
        try:
            async with asyncio.timeout(seconds):
                while session not in self.sessions:
                    await self.comes.wait()
                return self, session
        except TimeoutError:
            return None


def spans_of(*tables: Table) -> ServedSpans:
    spans = ServedSpans()
    for name, table, manifest in zip("ab", tables, MANIFESTS, strict=False):
        spans.put(name, cast("Any", table), manifest)
    return spans


async def test_a_session_is_found_whichever_model_it_is_of() -> None:
    first, second = Table(FIRST), Table(SECOND)
    spans = spans_of(first, second)
    assert cast("Any", spans.find(FIRST)) == (first, FIRST)
    assert cast("Any", spans.find(SECOND)) == (second, SECOND)
    assert spans.find(SessionId(bytes(32))) is None
    assert cast("Any", await spans.find_tail(SECOND, 0.0)) == (second, SECOND)
    assert await spans.find_tail(SessionId(bytes(32)), 0.0) is None


async def test_a_tail_is_awaited_at_every_model() -> None:
    first, second = Table(), Table()
    async with asyncio.timeout(1), asyncio.TaskGroup() as group:
        waiting = group.create_task(spans_of(first, second).find_tail(SECOND, 5.0))
        await asyncio.sleep(0)
        second.sessions.add(SECOND)
        second.comes.set()
    assert cast("Any", waiting.result()) == (second, SECOND)


async def test_a_model_is_meant_by_its_fingerprint_and_an_unknown_one_is_the_firsts_to_refuse() -> None:
    first, second = Table(), Table()
    spans = spans_of(first, second)
    asked: list[object] = [spans.table(name) for name in ("a", "b", "c", None)]
    assert asked == [first, second, first, first]
    encoded = [wire.encode_manifest(manifest) for manifest in MANIFESTS]
    assert [spans.manifest(name) for name in ("a", "b", "c", None)] == [*encoded, encoded[0], encoded[0]]
    third = Table()
    spans.put("a", cast("Any", third), MANIFESTS[0])
    assert cast("Any", spans.table("a")) is third, "a span that moved"
