"""Spans of published formats through the kernels: held as codes, proven, and the model that the library reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from node.model.checkpoint import open_checkpoint
from node.model.loading import format_of
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect
from swarm.base.layers import Span
from swarm.compute.fast_path import GRAPHS, KERNELS, use_static
from swarm.compute.kernels.support import KERNEL_VERSION
from swarm.compute.kv_cache import KvCache
from swarm.compute.packed_layers import PackedLinear
from swarm.compute.weights.format import WeightFormat
from swarm.compute.weights.kernel_codes import KernelCodes
from swarm.compute.weights.kernel_form import KernelForm
from tests.devices import DEVICE
from tests.model.gguf_files import Choose, TinyGguf
from tests.model.quantised_models import fp8, gptq, mxfp4, save_quantised
from tests.model.tiny_models import chain, run_chain, tiny_model

SPANS: Final = (Span(0, 1), Span(1, 2), Span(2, 3))
FORCED: Final = DEVICE == "cpu"
IDS: Final = torch.arange(11) * 7 % 120 + 3
K_MIX: Final = (Kind.Q4_K, Kind.Q6_K, Kind.Q4_K, Kind.Q5_K)


def q4_k_m(title: str, number: int) -> Kind:
    return Kind.Q6_K if "down" in title else K_MIX[number % len(K_MIX)]


def exact(title: str, _: int) -> Kind:
    return Kind.Q8_0 if "exps" in title else Kind.Q4_0


def of_gguf(
    family: str,
    model_type: str,
    choose: Choose,
    **changes: Any,  # noqa: ANN401
) -> Callable[[Path], tuple[Path, Any]]:
    def write(folder: Path) -> tuple[Path, Any]:
        made = TinyGguf.of(family, model_type, choose, **changes)
        return made.write(folder / "model.gguf"), made.model

    return write


def of_tensors(form: Callable[[], Any], family: str) -> Callable[[Path], tuple[Path, Any]]:
    def write(folder: Path) -> tuple[Path, Any]:
        saved = save_quantised(tiny_model(family, changes={"num_hidden_layers": 3}), form(), folder / "model")
        return saved.folder, saved.meant

    return write


ROUNDED: Final = 0.01
"""How far logits may be off where steps are rounded to bfloat16; else float32's rounding."""
MODELS: Final = {
    "gguf": (of_gguf("llama", "llama", q4_k_m), ROUNDED),
    "gguf-moe": (of_gguf("qwen3moe", "qwen3_moe", exact, norm_topk_prob=True, mlp_only_layers=[]), 1e-5),
    "gptq-act-order": (of_tensors(lambda: gptq(act_order=True), "llama"), 1e-3),
    "fp8": (of_tensors(lambda: fp8(block=(16, 32)), "llama"), ROUNDED),
    "mxfp4-moe": (of_tensors(mxfp4, "gpt_oss"), 1e-5),
}


def load_codes(path: Path, span: Span, dtype: torch.dtype = torch.float32) -> SpanModel:
    checkpoint = open_checkpoint(path)
    form = format_of(checkpoint, dissect(checkpoint.config), "auto", dtype, torch.device(DEVICE))
    return load_packed(checkpoint, span, replace(form, with_kernels=True, codes=False), torch.device(DEVICE))


@pytest.mark.parametrize("name", MODELS)
def test_three_spans_by_the_kernels_are_the_published_model(name: str, tmp_path: Path) -> None:
    write, bound = MODELS[name]
    path, meant = write(tmp_path)
    models = [load_codes(path, span) for span in SPANS]
    for model in models:
        assert model.reads_codes
        assert any(isinstance(part, KernelForm) and part.bits < 16 for part in model.model.modules())
        buckets = (16, 32) if model.span == SPANS[1] else (16,)
        use_static(model, 64, sessions=4, buckets=buckets, forced=FORCED)
        assert model.path == (KERNELS if FORCED else GRAPHS), model.path_reason
        assert f"-k{KERNEL_VERSION}+" in model.numeric_class or not FORCED
    caches = [[KvCache(model.layout, 32)] for model in models]
    logits = models[-1].logits(run_chain(models, caches, [chain(caches[0][0], IDS)])).cpu()
    with torch.inference_mode():
        wanted = meant(input_ids=IDS[None]).logits[0]
    assert (logits - wanted).norm() <= bound * wanted.norm()


def test_siblings_of_one_type_are_one_product(tmp_path: Path) -> None:
    path = TinyGguf.of("llama", "llama", lambda *_: Kind.Q4_0).write(tmp_path / "model.gguf")
    layer = load_codes(path, SPANS[1], torch.bfloat16).model.get_submodule("model.layers.1")
    shared = {name: part.shared for name, part in layer.named_modules() if isinstance(part, PackedLinear)}
    assert all(isinstance(one.weight, KernelCodes) for one in shared.values())
    groups = {frozenset(name.rpartition(".")[2] for name in shared if shared[name] is one) for one in shared.values()}
    assert {frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"})} < groups


def test_a_card_needs_what_was_counted(tmp_path: Path) -> None:
    path = MODELS["gguf"][0](tmp_path)[0]
    checkpoint = open_checkpoint(path)
    layout = dissect(checkpoint.config)
    form = format_of(checkpoint, layout, "auto", torch.bfloat16, torch.device(DEVICE))
    counted = format_of(checkpoint, layout, "auto", torch.bfloat16, torch.device(DEVICE), has_kernels=False)
    form = replace(counted, with_kernels=True, stored_sizes=_card_sizes(checkpoint, layout)) if FORCED else form
    model = load_codes(path, Span(0, 3), torch.bfloat16)
    assert model.weight_bytes <= layout.bytes_in(Span(0, 3), form) <= 1.02 * model.weight_bytes
    assert layout.bytes_in(Span(0, 3), counted) < model.weight_bytes, "5 and 6 bits are held in 8"


def _card_sizes(checkpoint: Any, layout: Any) -> dict[str, tuple[int, int]]:  # noqa: ANN401
    from node.model.loading import stored_sizes

    return stored_sizes(checkpoint, layout, WeightFormat(torch.bfloat16, with_kernels=True))
