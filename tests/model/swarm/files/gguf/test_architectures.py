"""Architectures of GGUF: the table in the documentation, and what is asked of a class."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import CONFIG_MAPPING

from swarm.base.errors import UnsupportedModel
from swarm.files.gguf.architectures import NO_CLASS, READ, REFUSED, architecture_of, types_of
from swarm.files.gguf.container import GgufHeader, TensorPlace
from swarm.files.gguf.encodings import ENCODINGS
from swarm.files.stored.gguf_layout import ClassLayout
from swarm.files.text_classes import class_of
from tests.model.node.model.test_gguf_span import FAMILIES

ROOT = Path(__file__).parents[5]
NAMES = set(gguf.MODEL_ARCH_NAMES.values()) - {"clip"}  # which is what sees


def test_the_table_says_what_becomes_of_each_architecture_of_the_library() -> None:
    page = (ROOT / "docs/reference/gguf.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (.*?) ?\| (exact|refused: .*) \|$", page, re.MULTILINE)
    expected = {name: (", ".join(types_of(name)), "exact") for name in READ}
    expected |= {name: ("", f"refused: {REFUSED.get(name, NO_CLASS)}") for name in NAMES - READ}
    assert {name: (types, result) for name, types, result in rows} == expected
    assert f"{len(READ)} of {len(NAMES)} are exact" in page
    assert not READ & REFUSED.keys()


def test_each_architecture_and_type_that_is_read_is_compared_with_its_class() -> None:
    compared = {(family, kind) for family, kind, _ in FAMILIES.values()}
    assert {(name, kind) for name in READ for kind in types_of(name)} <= compared


def test_an_architecture_that_is_not_read_says_why() -> None:
    place = TensorPlace("token_embd.weight", (320, 64), ENCODINGS[0], 0)
    for name, reason in (*REFUSED.items(), ("plamo2", NO_CLASS)):
        header = GgufHeader({"general.architecture": name}, {place.name: place}, 0)
        with pytest.raises(UnsupportedModel, match=re.escape(f"architecture {name!r} is not read: {reason}")):
            architecture_of(header, "model")


def layout_of(family: str, model_type: str, **changes: Any) -> ClassLayout:  # noqa: ANN401
    config: Any = CONFIG_MAPPING[model_type](**changes)
    with torch.device("meta"):
        model = (class_of(config) or pytest.fail(model_type))(config)
    return ClassLayout.of(model, family)


FEW: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 8}


@pytest.mark.parametrize(
    ("family", "model_type", "is_reordered"),
    [
        ("llama", "llama", True),
        ("command-r", "cohere", False),
        ("ernie4_5", "ernie4_5", False),
        ("qwen2", "qwen2", False),
    ],
)
def test_rows_lie_in_another_order_where_files_turn_neighbours_and_the_class_halves(
    family: str, model_type: str, *, is_reordered: bool
) -> None:
    layout = layout_of(family, model_type, **FEW)
    assert (layout.is_reordered, layout.is_other_rope) == (is_reordered, False)


def test_a_class_that_turns_neighbours_where_files_turn_halves_is_of_another_rope() -> None:
    assert layout_of("qwen2", "ernie4_5", **FEW).is_other_rope


def test_norms_that_add_one_are_found_by_their_results() -> None:
    config = {**FEW, "layer_types": ["linear_attention"], "num_experts": 2}
    found = layout_of("qwen3next", "qwen3_next", **config).plus_one
    assert {"model.norm.weight", "model.layers.0.input_layernorm.weight"} <= found
    assert "model.layers.0.linear_attn.norm.weight" not in found, "which is gated, and adds none"
    assert not layout_of("llama", "llama", **FEW).plus_one
    assert "model.norm.weight" in layout_of("nemotron", "nemotron", **FEW, num_key_value_heads=8).plus_one


def test_turned_and_mixed_weights_are_found_by_modules() -> None:
    mixed = layout_of("gpt-oss", "gpt_oss", **FEW)
    experts = {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}
    assert mixed.turned == experts
    assert experts <= mixed.mixed
    assert "transformer.h.0.attn.c_attn.weight" in layout_of("gpt2", "gpt2", n_layer=1, vocab_size=8).turned
    assert not layout_of("qwen3moe", "qwen3_moe", **FEW, num_experts=2).turned
