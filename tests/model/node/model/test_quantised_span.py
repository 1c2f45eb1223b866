"""Spans of quantised checkpoints: what the format's own library reads is what the span computes with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from node.model.checkpoint import open_checkpoint
from swarm.models.stored.source import StoredTensor
from tests.model.quantised_models import (
    QuantisedModel,
    Written,
    awq,
    bitsandbytes,
    compressed,
    fp8,
    gptq,
    mxfp4,
    save_quantised,
)

_GROUPS: Final[dict[str, Any]] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_BYTES: Final[dict[str, Any]] = {"num_bits": 8, "symmetric": True}
_FP4: Final[dict[str, Any]] = {"num_bits": 4, "type": "float", "symmetric": True}
FORMS: Final[dict[str, tuple[str, str, Callable[[], Written]]]] = {
    "fp8-blocks": ("fp8", "deepseek_v3", lambda: fp8(block=(16, 32))),
    "fp8-tensor": ("fp8", "llama", lambda: fp8(block=(1 << 16, 1 << 16))),
    "mxfp4": ("mxfp4", "gpt_oss", mxfp4),
    "gptq": ("gptq4", "llama", gptq),
    "gptq-act-order": ("gptq4", "llama", lambda: gptq(act_order=True)),
    "gptq-v2-8": ("gptq8", "llama", lambda: gptq(bits=8, version="gptq_v2")),
    "awq": ("awq4", "llama", awq),
    "ct4": ("ct4", "qwen3_moe", lambda: compressed({**_GROUPS, "symmetric": True})),
    "ct4-zeros": ("ct4", "llama", lambda: compressed({**_GROUPS, "symmetric": False})),
    "ct8-packed": ("ct8", "llama", lambda: compressed({**_BYTES, "type": "int", "strategy": "channel"})),
    "ct8": ("ct8", "llama", lambda: compressed({**_BYTES, "type": "int", "strategy": "channel"}, both=True)),
    "ct-fp8": ("fp8", "llama", lambda: compressed({**_BYTES, "type": "float", "strategy": "channel"})),
    "nvfp4": ("nvfp4", "llama", lambda: compressed({**_FP4, "strategy": "tensor_group", "group_size": 16})),
    "ct-mxfp4": ("mxfp4", "llama", lambda: compressed({**_FP4, "strategy": "group", "group_size": 32})),
    "nf4": ("nf4", "llama", lambda: bitsandbytes("nf4")),
    "nf4-nested": ("nf4", "llama", lambda: bitsandbytes("nf4", nested=True)),
    "bnb-fp4": ("bnbfp4", "llama", lambda: bitsandbytes("fp4")),
    "bnb-int8": ("bnb8", "llama", lambda: bitsandbytes("int8")),
}
"""What the class calls it, a family whose checkpoints have it, and its library."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], QuantisedModel]:
    """Checkpoints by the names of `FORMS`, each made once."""
    made: dict[str, QuantisedModel] = {}

    def take(name: str) -> QuantisedModel:
        if name not in made:
            _, family, form = FORMS[name]
            made[name] = save_quantised(family, form(), tmp_path_factory.mktemp("models") / name)
        return made[name]

    return take


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_that_the_library_reads(name: str, saved: Callable[[str], QuantisedModel]) -> None:
    model = saved(name)
    checkpoint = open_checkpoint(model.folder)
    read = checkpoint.read(checkpoint.weight_map)
    meant = _plain(model)
    assert read.keys() == meant.keys()
    stored = {one: tensor for one, tensor in read.items() if isinstance(tensor, StoredTensor)}
    assert len(stored) >= 6 * 2
    assert {tensor.matrix.encoding for tensor in stored.values()} == {FORMS[name][0]} == {checkpoint.source.encoding}
    for one, tensor in checkpoint.tensors(checkpoint.weight_map).items():
        assert torch.equal(tensor.float(), meant[one]), one


def _plain(model: QuantisedModel) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(f"{model.folder}-plain") / "model.safetensors")
