"""Training text and labels through real nodes: what a local copy says, also where a text ends, and resumable.

And the whole way: a head is trained with no weight of its target at hand, and drafts for it.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

import client.tools.train.command
import client.tools.train.samples
from client import AsyncSwarm
from client.base.target import load_target
from client.decode.state import GenerationState
from client.library.session import Piece, Session
from client.tools.train.command import train_draft
from client.tools.train.labels import LabelFolder, ModelLabels
from client.tools.train.options import TrainDraft
from client.tools.train.samples import LocalSampler, SampleAmount, SwarmSampler, load_for_training
from swarm.base.errors import ContextFull, GenerationInterrupted
from swarm.demo import TARGET
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.memory_registry import MemoryRegistry

pytestmark = pytest.mark.timeout(60)

FEW = SampleAmount(lines=6, tokens=20, seed=5)


@pytest.fixture(scope="module")
def weightless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as its client may have it: config and tokenizer."""
    folder = tmp_path_factory.mktemp("client") / TARGET.name
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal("asyncio") as portal:
        yield portal


@pytest.fixture(scope="module")
def here(portal: BlockingPortal) -> Iterator[InProcessSwarm]:
    with portal.wrap_async_context_manager(in_process_swarm(TARGET, ["0-6", "6-12"])) as here:
        yield here


@pytest.fixture(scope="module")
def sampler(portal: BlockingPortal, here: InProcessSwarm, weightless: Path) -> Iterator[SwarmSampler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.tools.train.samples, "SWARM_LINES", 4)
        options = {"registry": MemoryRegistry(here.network), "calibration": None, "lookup": False, "audit": 0.0}
        connecting = AsyncSwarm.connect(weightless, **options)  # type: ignore[arg-type]
        with portal.wrap_async_context_manager(connecting) as swarm:
            sampler = SwarmSampler(swarm, portal, with_rows=True)
            sampler.make(FEW, 0, 4)  # starts every thread that lives as long as they do
            yield sampler


@pytest.fixture(scope="module")
def local() -> LocalSampler:
    return LocalSampler(load_for_training(TARGET, "cpu"), load_target(TARGET).tokenizer)


def test_a_swarm_gives_the_lines_and_labels_of_a_local_copy(
    sampler: SwarmSampler, local: LocalSampler, tmp_path: Path
) -> None:
    """Interrupted after the first batch, too: lines know nothing of their batches."""
    told: list[int] = []
    target = sampler.swarm.target
    labels = LabelFolder(tmp_path / "labels", FEW, target, target.hidden_size)
    replace(labels, amount=replace(FEW, lines=4)).collect(sampler, told.append)
    found = labels.collect(sampler, told.append)
    assert told == [0, 4, 4, 6]
    ours = labels.source(found, torch.device("cpu"))
    got = ours.labels(ours.entries)
    lines = local.make(FEW, 0, FEW.lines)
    assert torch.equal(got.tokens, lines.long())
    theirs = ModelLabels(local.target, lines, with_rows=True)
    wanted = theirs.labels(theirs.entries)
    assert got.known[:, 1:-1].all(), "all but the first token, which travels with no question, and the last"
    assert got.top is not None
    assert got.rows is not None
    assert wanted.rows is not None
    known = got.known
    best = wanted.logs.topk(got.top.shape[2], dim=2)
    assert torch.allclose(got.logs[known], best.values[known], atol=1e-4)
    assert torch.equal(got.top[known], best.indices[known])
    assert torch.allclose(got.rows[known].float(), wanted.rows[known], rtol=1e-2, atol=1e-4), "as bfloat16 has them"
    assert len({tuple(line) for line in got.tokens.tolist()}) == FEW.lines


def test_a_line_goes_on_behind_the_end_of_a_text(
    sampler: SwarmSampler, local: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = local.make(FEW, 0, 2)
    ends = frozenset({int(expected[0, 6]), int(expected[1, 11])})
    factory = sampler.swarm._factory
    monkeypatch.setattr(sampler.swarm, "_factory", replace(factory, target=replace(factory.target, eos_ids=ends)))
    made = sampler.make(FEW, 0, 2)
    assert torch.equal(made.tokens, expected)
    assert made.known[:, 1:-1].all()


def test_a_line_goes_on_where_chains_break(
    sampler: SwarmSampler, local: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, broken = Session.run, list[int]()

    async def breaking(session: Session, state: GenerationState) -> AsyncIterator[Piece]:
        async for piece in run(session, state):
            yield piece
            if len(broken) < at_most and len(state.text.tokens) == 4:
                broken.append(4)
                raise GenerationInterrupted("its machine left", "", state.text.tokens)

    monkeypatch.setattr(Session, "run", breaking)
    at_most = 2
    made = sampler.make(FEW, 0, 1)
    assert len(broken) == 2
    assert torch.equal(made.tokens, local.make(FEW, 0, 1))
    assert made.known[:, 1:-1].all()
    at_most = 6
    with pytest.raises(GenerationInterrupted, match="its machine left"):
        sampler.make(FEW, 0, 1)


def test_lines_that_the_model_cannot_hold_are_refused_in_one_line(sampler: SwarmSampler) -> None:
    with pytest.raises(ContextFull, match="exceed the model's context"):
        sampler.make(replace(FEW, tokens=1 << 20), 0, 2)


def test_a_head_is_trained_without_weights_and_drafts(
    sampler: SwarmSampler, here: InProcessSwarm, weightless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def opened(model: str, **options: object) -> Iterator[SwarmSampler]:
        yield sampler

    monkeypatch.setattr(client.tools.train.command, "open_sampler", opened)
    said = io.StringIO()
    command = TrainDraft(
        model=str(weightless),
        out=tmp_path / "head",
        join=("/ip4/192.0.2.1/tcp/1",),
        kind="dgf",
        depth=1,
        lines=32,
        tokens=16,
        steps=40,
        batch=8,
        rate=1e-2,
        device="cpu",
        threads=1,
    )
    train_draft(command, Console(file=said, width=200))
    assert "the head learns matrices of its own" in said.getvalue()
    losses = [float(line.rpartition("loss ")[2]) for line in said.getvalue().splitlines() if " steps, loss" in line]
    assert losses[-1] < 0.8 * losses[0]

    async def texts() -> list[tuple[tuple[int, ...], float]]:
        options = {
            "registry": MemoryRegistry(here.network),
            "calibration": None,
            "lookup": False,
            "siblings": False,
            "audit": 0.0,
        }
        async with AsyncSwarm.connect(weightless, draft=command.out, draft_device="cpu", **options) as swarm:  # type: ignore[arg-type]
            found = []
            for nodes in (0, 16):
                result = await swarm.generate("The captain", max_new_tokens=24, nodes=nodes)
                found.append((result.tokens, result.stats.acceptance_length))
            return found

    (plain, _), (drafted, acceptance) = sampler.portal.call(texts)
    assert drafted == plain
    assert acceptance > 1, "some of what the head guessed was right"
