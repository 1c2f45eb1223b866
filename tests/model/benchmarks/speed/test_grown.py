"""The demo target in a large model's shape: the same text, and what is measured of it on a card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.simulation.acceptance import Size, demo_prompts, generate
from benchmarks.speed import card_streamed
from benchmarks.speed.card_streamed import CardBench, Options, measure, sheet
from benchmarks.speed.grown import SHAPES, grow
from client.drafting.drafter import ModelDrafter, NoDrafter
from node.model.checkpoint import open_checkpoint
from node.model.span import load_span
from swarm.errors import ConfigError
from swarm.inference.ragged_batch import RaggedModel, load_whole
from swarm.layers import Span
from swarm.protocol.messages import Sampling

TINY = SHAPES["tiny"]
WHOLE = Span(0, TINY.num_hidden_layers)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    grow(folder, TINY, torch.float32)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_writes_what_the_demo_target_writes(
    grown: Path, target: RaggedModel, draft: RaggedModel, temperature: float
) -> None:
    large, drafter = load_whole(grown, torch.float32), ModelDrafter(draft, target.vocab_size, 512)
    assert large.hidden_size == TINY.hidden_size > target.hidden_size
    weights = [dict(layer.named_parameters())["mlp.gate_proj.weight"] for layer in large._owned.values()]
    assert all(weight.count_nonzero() > weight.numel() // 5 for weight in weights), "not zeros, which are quicker"
    for prompt in demo_prompts(2):
        sampling, size = Sampling(3, temperature), Size(12, 16)
        small = generate(target, NoDrafter(), prompt, sampling, replace(size, nodes=0))
        # What is behind the tokenizer's ids is never picked by a node; `generate` knows none of that.
        assert generate(large, drafter, prompt, sampling, size).tokens == small.tokens


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (replace(TINY, hidden_size=96), "hidden_size 96: the demo target has 192"),
        (replace(TINY, head_dim=48), "head_dim 48: must be a multiple of 32"),
        (replace(TINY, num_key_value_heads=8), "fewer query heads share a key head"),
    ],
)
def test_a_shape_that_cannot_hold_it_is_refused(shape: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        grow(tmp_path, shape)  # type: ignore[arg-type]


def test_layers_that_pass_by_are_held_against_resident_ones(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_streamed, "COPY_BYTES", 1 << 24)
    monkeypatch.setattr(card_streamed, "ON_HOST_BYTES", 1 << 19)
    options = Options(
        shape="tiny", device="cpu", dtype="float32", rows=(1, 16), context=24, repeats=1, offloaded_repeats=1
    )
    lines, known = measure(grown, options, Console(quiet=True))
    assert [line.rows for line in lines] == [1, 16]
    assert all(min(line.forward_ms, line.head_ms, line.offloaded_ms) > 0 for line in lines)
    assert len(sheet(lines, known, options).rows) == 2
    honest, turn = CardBench.sweep, [0]

    def wrong(self: CardBench, rows: int) -> torch.Tensor:
        turn[0] += 1
        return honest(self, rows) + turn[0]

    monkeypatch.setattr(CardBench, "sweep", wrong)
    with pytest.raises(AssertionError, match="layers that pass by gave others"):
        measure(grown, replace(options, rows=(1,)), Console(quiet=True))


def test_a_benchmarks_sweeps_leave_nothing_behind(grown: Path) -> None:
    bench = CardBench(load_span(open_checkpoint(grown), WHOLE, torch.float32), context=24, most_rows=16)
    first = bench.sweep(16)
    bench.sweep(7)
    assert torch.equal(bench.sweep(16), first)
