"""Spans with packed weights: the rounded model's results on any cut, the bytes that were counted, moves, streaming."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from node.model.checkpoint import open_checkpoint
from node.model.config import ServeConfig
from node.model.loading import fitting_layers, load
from node.model.malloc_trim import trim_heap
from node.model.offload import Offload, held_bytes, load_offloaded
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect, shared_parts
from swarm.base.errors import NotEnoughSpace
from swarm.base.layers import Span
from swarm.base.process_limits import MainMemory
from swarm.compute.kv_cache import KvCache
from swarm.compute.layers.pass_through import find_layers
from swarm.compute.packed_layers import MIN_ROWS, PackedLinear, matrices_in
from swarm.compute.quantisation import group_of, quantise, restore
from swarm.compute.weights.experts import TENSORS, is_experts
from swarm.compute.weights.format import BITS, WeightFormat, bits_of, small_size
from swarm.demo import TARGET
from swarm.protocol.numeric_class import ROUNDED
from tests.model.recurrent_models import recurrent_model
from tests.model.tiny_models import chain, clone, reference, run_chain, save_sharded, tiny_model

CPU = torch.device("cpu")
WHOLE = Span(0, 6)
DEMO = Span(0, 12)
DENSE = ["llama", "gemma2", "gemma3_text", "gpt2", "opt", "phi3"]
EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
STATES = ["qwen3_next", "falcon_h1"]
IDS = torch.arange(3, 19)


def form_of(bits: int, dtype: torch.dtype = torch.float32) -> WeightFormat:
    return WeightFormat(dtype, bits)


def rounded(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """A copy whose weights are what packed ones stand for, in Hugging Face's own layers."""
    copied = clone(model)
    ends = (copied.get_input_embeddings(), cast("Any", copied).get_output_embeddings())
    layers = cast("nn.ModuleList", copied.get_submodule(find_layers(copied)))
    small = {part: small_size(matrices_in(layer)) for layer in layers for part in layer.modules()}
    for part in copied.modules():
        if is_experts(part):
            for name in TENSORS:
                weight = getattr(part, name, None)
                if weight is not None:
                    turned = weight.data.transpose(1, 2) if cast("Any", part).is_transposed else weight.data
                    new = restore(quantise(turned, bits_of(turned.numel(), bits, small[part])))
                    weight.data = new.transpose(1, 2) if cast("Any", part).is_transposed else new
        elif part in ends or (part in small and (type(part) is nn.Linear or isinstance(part, Conv1D))):
            weight = cast("Any", part).weight
            turned = weight.data.t() if isinstance(part, Conv1D) else weight.data
            own_bits = form_of(bits).ends_bits if part in ends else bits_of(turned.numel(), bits, small[part])
            if (
                len(turned) >= MIN_ROWS
                and group_of(turned.shape[1], own_bits) is not None
                and not getattr(weight, "is_rounded", False)
            ):
                new = restore(quantise(turned, own_bits))
                weight.data = new.t() if isinstance(part, Conv1D) else new
                weight.is_rounded = True  # a tied one is seen twice
    return copied


def logits_of(models: Sequence[SpanModel]) -> torch.Tensor:
    kv_caches = [[KvCache(model.layout, 32)] for model in models]
    return models[-1].logits(run_chain(list(models), kv_caches, [chain(kv_caches[0][0], IDS)]))


@pytest.mark.parametrize(
    ("family", "bits"), [*((family, 4) for family in [*DENSE, *EXPERTS, *STATES]), ("llama", 8), ("gpt_oss", 8)]
)
def test_three_spans_are_the_whole_and_that_is_the_rounded_model(family: str, bits: int, tmp_path: Path) -> None:
    model = recurrent_model(family) if family in STATES else tiny_model(family, changes={"num_hidden_layers": 3})
    checkpoint = open_checkpoint(save_sharded(model, tmp_path / "whole"))
    layout = dissect(checkpoint.config)
    third = layout.num_layers // 3
    whole = load_packed(checkpoint, Span(0, 3 * third), form_of(bits), CPU)
    logits = logits_of([whole])
    thirds = [Span(first, first + third) for first in range(0, 3 * third, third)]
    assert torch.equal(logits_of([load_packed(checkpoint, span, form_of(bits), CPU) for span in thirds]), logits)
    wanted = reference(rounded(model, bits), IDS)
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert whole.numeric_class == f"cpu-float32+{ROUNDED[bits]}"
    assert whole.weight_bytes == layout.bytes_in(Span(0, 3 * third), form_of(bits))


def test_what_a_format_takes_is_counted_beforehand() -> None:
    checkpoint = open_checkpoint(TARGET)
    layout = dissect(checkpoint.config)
    plain = 2 * sum(layout.weights.values())
    for bits, most in ((16, 1.01), (8, 0.52), (4, 0.37)):
        for dtype in (torch.float32, torch.bfloat16):
            form = form_of(0 if bits == 16 and dtype is torch.bfloat16 else bits, dtype)
            for span in (Span(0, 1), Span(3, 4), Span(11, 12))[: 3 if dtype is torch.float32 else 1]:
                model = load_packed(checkpoint, span, form, CPU)
                assert model.weight_bytes == layout.bytes_in(span, form)
                assert model.dtype == model.layout.dtype == dtype
            assert layout.bytes_in(DEMO, form) <= most * plain


def test_the_smallest_matrices_of_a_layer_have_eight_bits() -> None:
    """Keys and values that queries share: one of two equal ones is never alone."""
    attention, mlp = [(576, 576), (192, 576), (192, 576), (576, 576)], [(1536, 576), (1536, 576), (576, 1536)]
    assert small_size([*attention, *mlp]) == 192 * 576
    assert small_size([*attention[:2], *mlp[:1]]) == 0
    assert small_size([*attention, (128 * 1536, 576)]) == 576 * 576, "beside experts, the whole attention"
    layer = load_packed(open_checkpoint(TARGET), Span(0, 1), form_of(4), CPU).layers[0]
    bits = {name: part.shared.weight.bits for name, part in layer.named_modules() if isinstance(part, PackedLinear)}
    assert {name.rpartition(".")[2] for name, own in bits.items() if own == 8} == {"k_proj", "v_proj"}
    assert set(bits.values()) == {4, 8}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_streamed_layers_are_packed_as_they_are(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_sharded(tiny_model(family), tmp_path / "whole"))
    layout = dissect(checkpoint.config)
    resident = load_packed(checkpoint, WHOLE, form_of(4), CPU)
    with closing(load_offloaded(checkpoint, WHOLE, form_of(4), CPU, Offload())) as streamed:
        for _ in range(2):
            assert torch.equal(logits_of([streamed]), logits_of([resident]))
        assert streamed.numeric_class == resident.numeric_class
        held, stored = held_bytes(layout, WHOLE, form_of(4))
        assert stored <= streamed.stored_bytes <= stored + 64 * sum(1 for _ in resident.model.parameters())
        assert held <= streamed.weight_bytes <= held + 2 * 64 * sum(1 for _ in resident.model.parameters())
        assert streamed.stored_bytes < layout.weights_in(WHOLE)


@pytest.mark.parametrize(
    ("family", "old", "new"), [("llama", (0, 4), (2, 6)), ("gpt2", (0, 4), (0, 6)), ("gpt_oss", (0, 4), (2, 6))]
)
def test_a_move_keeps_packed_layers(family: str, old: tuple[int, int], new: tuple[int, int], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_sharded(tiny_model(family), tmp_path / "whole"))
    layout, after = dissect(checkpoint.config), Span(*new)
    model = load_packed(checkpoint, Span(*old), form_of(4), CPU)
    kept = {index: model._owned[index] for index in range(max(old[0], new[0]), min(old[1], new[1]))}
    fresh = load_packed(checkpoint, after, form_of(4), CPU)
    moved = load_packed(checkpoint, after, form_of(4), CPU, shared_parts(model, layout, after))
    assert {index: moved._owned[index] for index in kept} == kept
    assert moved.weight_bytes == fresh.weight_bytes
    assert [name for name, _ in moved.model.named_parameters()] == [name for name, _ in fresh.model.named_parameters()]
    assert all(
        torch.equal(one, other) for one, other in zip(moved.model.parameters(), fresh.model.parameters(), strict=True)
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_holds_what_was_counted_and_one_layer(tmp_path: Path) -> None:
    """By the system's own count of the process's pages, mapped files included: a quarter of bfloat16."""
    config = cast("Any", CONFIG_MAPPING["llama"])(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=8, vocab_size=1024
    )
    with torch.no_grad():
        model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    plain = sum(weight.numel() for weight in model.parameters()) * 2
    del model
    checkpoint, said = open_checkpoint(tmp_path / "whole"), list[str]()
    order = ServeConfig(layers="0-2", device="cpu", weights="int4")
    load(checkpoint, ServeConfig(layers="0-1", device="cpu", weights="int4"), said.append)  # as what is made once
    before = _held_bytes()
    said.clear()
    span = load(checkpoint, order, said.append)
    grown = _held_bytes() - before
    assert span.weight_bytes <= 0.33 * plain
    assert grown <= 0.34 * plain
    assert "with int4 weights" in said[0]


def _held_bytes() -> int:
    gc.collect()
    trim_heap()
    return int(psutil.Process().memory_info().rss)


def test_more_layers_fit_in_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = dissect(open_checkpoint(TARGET).config)
    fit = [fitting_layers(layout, form_of(bits), 20_000_000, kv_tokens=64) for bits in BITS.values()]
    assert fit == sorted(fit)
    assert fit[0] < fit[-1]
    few = layout.bytes_in(DEMO, form_of(4))
    monkeypatch.setattr("swarm.compute.devices.main_memory", lambda: MainMemory(few + 3_000_000, 1 << 60))
    load(open_checkpoint(TARGET), ServeConfig(layers="0-12", device="cpu", weights="int4"), lambda _: None)
    with pytest.raises(NotEnoughSpace, match="of memory"):
        load(open_checkpoint(TARGET), ServeConfig(layers="0-12", device="cpu"), lambda _: None)


@pytest.mark.parametrize(
    ("bits", "reading"), [(8, [["q_proj", "k_proj", "v_proj"]]), (4, [["q_proj"], ["k_proj", "v_proj"]])]
)
def test_linear_layers_that_read_the_same_rows_are_one_product(bits: int, reading: list[list[str]]) -> None:
    """As far as they have the same bits."""
    span = load_packed(open_checkpoint(TARGET), Span(3, 4), form_of(bits), CPU)
    shared: dict[int, list[str]] = {}
    for name, part in span.model.named_modules():
        if isinstance(part, PackedLinear):
            shared.setdefault(id(part.shared), []).append(name.rpartition(".")[2])
    assert sorted(shared.values()) == sorted([["down_proj"], ["gate_proj", "up_proj"], ["o_proj"], *reading])
