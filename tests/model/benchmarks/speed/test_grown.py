"""The demo target in a large model's shape: the same text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.simulation.acceptance import Size, demo_prompts, generate
from benchmarks.speed.grown import SHAPES, grow
from client.draft.drafter import ModelDrafter, NoDrafter
from swarm.base.errors import ConfigError
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.protocol.messages import Sampling

TINY = SHAPES["tiny"]


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
