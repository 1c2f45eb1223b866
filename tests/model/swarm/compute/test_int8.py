"""Int8 rows between hops: how far they move logits, what still holds, and that they are what travels.

The demo target in three spans. Teacher-forced, with bounds: two runs that differ in shape agree to fp32's noise but for
the rare value which that noise carries over a rounding border.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

import swarm.link.link
from client import AsyncSwarm, Result
from swarm.base.errors import ConfigError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.demo import DRAFT, TARGET
from swarm.protocol import wire
from swarm.protocol.frames import split
from swarm.protocol.messages import Codec, Fault, FaultKind, Frame, Open, Ready, RouteHop, Rows, SweepFrame
from swarm.protocol.v1 import node_pb2 as pb
from tests.devices import DEVICE
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.raw_client import SweepNumbering, attach, opening, raw_link, route_of
from tests.net.three_nodes import SPANS, prompt, refusal

WIDTH = 192
NEW = 12
MAX_CHANGE = 0.5
"""Most that int8 may move a logit of the demo target; measured: 0.16 where logits reach 20."""
NOISE = 0.05
"""Most that two shapes of the same int8 run may differ in a logit; measured: 0.006, and 6e-6 in the median."""


class Chain:
    """One session of the target, rows passing between its spans in a codec."""

    def __init__(self, model: RaggedModel, codec: Codec) -> None:
        self._model = model
        self._codec = codec
        self._spans = [(span, KvCache(model.layout.within(span), 512)) for span in map(Span.parse, SPANS)]

    def logits(self, ids: tuple[int, ...], parents: list[int | None] | None = None) -> torch.Tensor:
        """Append nodes, a chain unless parents (by offset) are given, and commit nothing."""
        start = self._spans[0][1].slots.used
        nodes = [TreeNodeId(start + offset) for offset in range(len(ids))]
        above = [None, *range(len(ids) - 1)] if parents is None else parents
        positions: list[int] = []
        for parent in above:
            positions.append(start if parent is None else positions[parent] + 1)
        known = [None if parent is None else nodes[parent] for parent in above]
        rows: torch.Tensor | None = None
        for span, kv_cache in self._spans:
            if rows is not None:
                rows = decode_rows(encode_rows(rows, self._codec), rows.dtype)
            entering = torch.tensor(ids) if rows is None else None
            rows = self._model.forward([SessionRows(kv_cache, nodes, known, positions, entering, rows)], span)
        assert rows is not None
        return self._model.logits(rows)

    def commit_all(self) -> None:
        for _, kv_cache in self._spans:
            kv_cache.commit([TreeNodeId(node) for node in range(kv_cache.slots.used)], [])


def test_teacher_forced_logits_stay_near_the_lossless_ones(target: RaggedModel) -> None:
    agree, divergence = [], []
    for line in range(3):
        text = prompt(line, 128)
        lossless, int8 = (Chain(target, codec).logits(text) for codec in (Codec.FP32, Codec.INT8))
        assert 1e-3 < (lossless - int8).abs().max() <= MAX_CHANGE, "it rounds, and not more than that"
        agree.append((lossless.argmax(-1) == int8.argmax(-1)).float().mean())
        logs = lossless.log_softmax(-1), int8.log_softmax(-1)
        divergence.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
    assert torch.stack(agree).mean() >= 0.97
    assert torch.stack(divergence).mean() <= 1e-3


def test_a_tree_nodes_logits_are_those_of_its_path_run_alone(target: RaggedModel) -> None:
    """So the tree's size and shape decide nothing: what is left is fp32's noise, pushed over few rounding borders."""
    changes = []
    for line in range(2):
        text, rng = prompt(line, 48), random.Random(line)
        parents = [rng.choice([None, *range(offset)]) for offset in range(16)]
        tokens = tuple(rng.randrange(3, 4_000) for _ in parents)
        chain = Chain(target, Codec.INT8)
        chain.logits(text)
        chain.commit_all()
        for offset, got in enumerate(chain.logits(tokens, parents)):
            path = [offset]
            while (parent := parents[path[0]]) is not None:
                path.insert(0, parent)
            alone = Chain(target, Codec.INT8).logits((*text, *(tokens[place] for place in path)))[-1]
            changes.append((got - alone).abs().max())
    assert torch.stack(changes).median() <= 1e-4
    assert torch.stack(changes).max() <= NOISE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[InProcessSwarm]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    async with in_process_swarm(TARGET, SPANS) as running, running.client(draft=DRAFT) as swarm:
        await swarm.generate("It", max_new_tokens=3, nodes=1)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(here: InProcessSwarm) -> AsyncIterator[AsyncSwarm]:
    async with here.client(draft=DRAFT, codec="int8") as swarm:
        await swarm.generate("It", max_new_tokens=3, nodes=1)
        yield swarm


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Rows, int]]:
    """Rows of every frame between hops, and the bytes of that frame's parts."""
    seen: list[tuple[Rows, int]] = []

    def recording(message: Frame, part_bytes: int) -> Iterator[bytes]:
        parts = list(split(message, part_bytes))
        if isinstance(message, SweepFrame) and message.rows is not None:
            seen.append((message.rows, sum(map(len, parts))))
        return iter(parts)

    monkeypatch.setattr(swarm.link.link, "split", recording)
    return seen


@pytest.mark.asyncio(loop_scope="module")
async def test_every_hop_sends_int8_and_the_stats_say_so(client: AsyncSwarm, sent: list[tuple[Rows, int]]) -> None:
    result = await client.generate(prompt(0), max_new_tokens=NEW, nodes=16)
    stats = result.stats
    assert len(sent) == 2 * (stats.prefill_sweeps + len(stats.sweeps)), "two links, every sweep"
    assert {rows.codec for rows, _ in sent} == {Codec.INT8}
    assert all(len(rows.data) == rows.count * (WIDTH + 12) for rows, _ in sent)
    assert sum(size for _, size in sent) < sum(rows.count for rows, _ in sent) * WIDTH * 4 / 3, "a third of fp32's"
    assert (stats.numeric_class, stats.reproducible) == (f"{DEVICE}-float32+int8", False)


@pytest.mark.asyncio(loop_scope="module")
async def test_lossless_stays_the_default(here: InProcessSwarm, sent: list[tuple[Rows, int]]) -> None:
    async with here.client() as swarm:
        result = await swarm.generate(prompt(0), max_new_tokens=4)
    assert {rows.codec for rows, _ in sent} == {Codec.FP32}
    assert (result.stats.numeric_class, result.stats.reproducible) == (f"{DEVICE}-float32", True)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("nodes", [0, 64])
async def test_every_token_is_the_int8_targets_own_pick(nodes: int, client: AsyncSwarm, target: RaggedModel) -> None:
    """For every tree size, up to the noise between two shapes."""
    for line in (1, 2):
        ids = prompt(line)
        result: Result = await client.generate(ids, max_new_tokens=NEW, nodes=nodes)
        logits = Chain(target, Codec.INT8).logits((*ids, *result.tokens[:-1]))[len(ids) - 1 :]
        chosen = logits.gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= NOISE
        assert (nodes == 0) == (len(result.stats.sweeps) == NEW), "trees were used"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_codec_that_is_none(here: InProcessSwarm) -> None:
    with pytest.raises(ConfigError, match="codec: 'int4'; there are lossless and int8"):
        async with here.client(codec="int4"):
            pass


def asking(here: InProcessSwarm, codec: Codec) -> Open:
    return replace(opening(here.nodes[1]), codec=codec)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("asked", "came"), [(Codec.INT8, Codec.FP32), (Codec.FP32, Codec.INT8)])
async def test_rows_in_another_codec_than_the_sessions_end_it(asked: Codec, came: Codec, here: InProcessSwarm) -> None:
    values = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    opened = attach(route(here), asking(here, asked), f"{asked}".encode()[:16], index=1)
    async with raw_link(here.nodes[1], opened) as link:
        await link.until(Ready)
        await link.send(SweepFrame(SweepNumbering().chain(prompt(0, 3)), None, encode_rows(values, came)))
        fault = await link.until(Fault)
    assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, "codec")
    assert fault.reason.endswith(f"{came.value} rows in a session of {asked.value}")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scale", [b"\x80\x7f", b"\xc0\x7f", b"\x80\xbf", b"\x00\x00"], ids=["inf", "nan", "-1", "0"])
async def test_a_hostile_scale_ends_its_session(scale: bytes, here: InProcessSwarm) -> None:
    rows = Rows(Codec.INT8, 1, WIDTH, bytes([0, 0x3F] * 5) + scale + bytes([1] * WIDTH))
    opened = attach(route(here), asking(here, Codec.INT8), b"scale" + scale, index=1)
    async with raw_link(here.nodes[1], opened) as link:
        await link.until(Ready)
        await link.send(SweepFrame(SweepNumbering().chain(prompt(0, 1)), None, rows))
        fault = await refusal(link)
    assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, "rows")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_codec_of_another_version_is_refused_by_a_node(here: InProcessSwarm) -> None:
    frame = pb.Frame.FromString(wire.encode_frame(attach(route(here), asking(here, Codec.INT8), b"later", index=1)))
    frame.attach.open.codec = pb.Codec.ValueType(9)
    head = frame.SerializeToString()
    async with raw_link(here.nodes[1]) as link:
        await link.send_bytes(wire.encode_part(len(head), 0, (head,)))
        fault = await refusal(link)
    assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, "codec")
    assert "codec 9 is unknown to release" in fault.reason


def route(here: InProcessSwarm) -> tuple[RouteHop, ...]:
    return route_of(here.nodes, SPANS)
