"""Spans of GGUF models: every family that is read, every published type, against Hugging Face's own classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import modeling_gguf_pytorch_utils as by_transformers

from node.model.checkpoint import open_checkpoint
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect
from node.model.stored_sizes import format_of
from swarm.errors import UnsupportedModel
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import load_whole
from swarm.layers import Span
from swarm.models.gguf.folder import TensorTable
from swarm.models.stored.gguf_source import GgufSource
from swarm.models.stored.source import StoredTensor
from swarm.models.whole_model import load_causal_lm
from tests.model.gguf_files import PUBLISHED, VOCAB, TinyGguf
from tests.model.tiny_models import chain, reference, run_chain

CPU = torch.device("cpu")
SPANS = (Span(0, 1), Span(1, 2), Span(2, 3))
IDS = torch.arange(12) * 7 % VOCAB
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 64}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "mixtral": ("llama", "mixtral", {}),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 256}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma2", GEMMA),
    "gemma3": ("gemma3", "gemma3_text", GEMMA),
    "phi3": ("phi3", "phi3", {}),
    "starcoder2": ("starcoder2", "starcoder2", {}),
    "gpt2": ("gpt2", "gpt2", {"scale_attn_by_inverse_layer_idx": False}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {}),
    "granite": ("granite", "granite", {}),
    "olmo2": ("olmo2", "olmo2", {}),
    "smollm3": ("smollm3", "smollm3", {}),
    "cohere2": ("cohere2", "cohere2", {}),
}
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "starcoder2")


def tiny(name: str) -> TinyGguf:
    architecture, model_type, changes = FAMILIES[name]
    return TinyGguf.of(architecture, model_type, **changes)


def spans_of(path: Path) -> list[SpanModel]:
    """As a node loads them: packed weights stay as they are in the file."""
    checkpoint = open_checkpoint(path)
    form = format_of(checkpoint, dissect(checkpoint.config), "auto", torch.float32, CPU)
    return [load_packed(checkpoint, span, form, CPU) for span in SPANS]


def logits_of(spans: list[SpanModel], ids: torch.Tensor = IDS) -> torch.Tensor:
    kv_caches = [[KvCache(span.layout, 64)] for span in spans]
    return spans[-1].logits(run_chain(spans, kv_caches, [chain(kv_caches[0][0], ids)]))


@pytest.mark.parametrize("name", FAMILIES)
def test_three_spans_of_a_family_are_the_whole_model(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    path = made.write(tmp_path / f"{name}.gguf")
    own = reference(made.model, IDS)
    spans = spans_of(path)
    assert (logits_of(spans) - own).abs().max() <= 1e-5
    assert {span.stored_as for span in spans} == {"gguf"}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3moe", "gpt-oss"])
def test_memory_is_the_files_own(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    made.choose = lambda title, _: Kind.Q6_K if title.startswith(("token", "output.")) else Kind.Q4_K
    path = made.write(tmp_path / f"{name}.gguf")
    checkpoint = open_checkpoint(path)
    layout = dissect(checkpoint.config)
    form = format_of(checkpoint, layout, "auto", torch.float32, CPU)
    assert isinstance(checkpoint.source, GgufSource)
    spans = spans_of(path)
    assert (logits_of(spans) - reference(made.model, IDS)).abs().max() <= 1e-5
    for span, model in zip(SPANS, spans, strict=True):
        held = layout.needed(checkpoint.weight_map, span)
        places = TensorTable.read(checkpoint.folder).places
        in_file = sum(places[part][1].size_bytes for one in held for part in checkpoint.source.stored[one])
        assert in_file < 0.35 * 4 * layout.weights_in(span), "packed"
        assert model.weight_bytes <= 1.05 * in_file
        assert abs(layout.bytes_in(span, form) - model.weight_bytes) <= 0.05 * in_file, "known before it is loaded"


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_tensors_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    path = made.write(tmp_path / f"{name}.gguf")
    read: Any = by_transformers.load_gguf_checkpoint
    theirs = read(path, return_tensors=True, model_to_load=made.model)["tensors"]
    checkpoint = open_checkpoint(path)
    ours = checkpoint.tensors(checkpoint.weight_map)
    assert ours.keys() == theirs.keys()
    for title, tensor in theirs.items():
        assert torch.equal(ours[title].float(), tensor.float()), title


def test_published_types_stay_as_they_are_in_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama").write(tmp_path / "mixed.gguf"))
    read = checkpoint.read(checkpoint.weight_map)
    packed = {name: one for name, one in read.items() if isinstance(one, StoredTensor)}
    kinds = {one.matrix.encoding for one in packed.values()}
    assert kinds == {kind.name.lower() for kind in PUBLISHED}
    for name, one in packed.items():
        size = (one.matrix.rows * one.matrix.columns, one.matrix.size_bytes)
        assert checkpoint.source.stored_size(name) == size
    assert checkpoint.source.encoding == "gguf"


def test_a_span_needs_only_the_parts_that_hold_it(tmp_path: Path) -> None:
    made = tiny("llama")
    first = made.write(tmp_path / "split.gguf", parts=5)
    assert first.name == "split-00001-of-00005.gguf"
    checkpoint = open_checkpoint(first)
    layout = dissect(checkpoint.config)
    assert checkpoint.name == "split"
    held = [checkpoint.files(layout.needed(checkpoint.weight_map, span)) for span in SPANS]
    assert all(0 < len(files) < 5 for files in held)
    assert set().union(*held) == {path.name for path in tmp_path.glob("*.gguf")}
    own = reference(made.model, IDS)
    assert (logits_of(spans_of(tmp_path)) - own).abs().max() <= 1e-5  # the folder holds this one model


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    first = tiny("llama").write(tmp_path / "split.gguf", parts=3)
    (tmp_path / "split-00002-of-00003.gguf").rename(tmp_path / "elsewhere")
    with pytest.raises(Exception, match=r"1 of its 3 parts are missing, such as split-00002-of-00003\.gguf"):
        open_checkpoint(first)
    shutil.copy(first, tmp_path / "split-00002-of-00003.gguf")
    with pytest.raises(UnsupportedModel, match="part 1 of 3, by its own word, and 2 of 3 by its name"):
        open_checkpoint(first)


def test_a_file_that_changed_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama").write(tmp_path / "llama.gguf"))
    with (tmp_path / "llama.gguf").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UnsupportedModel, match=r"bytes instead of \d+; fetch it again"):
        checkpoint.tensors(checkpoint.weight_map)


def test_a_tensor_that_the_class_lacks_is_named(tmp_path: Path) -> None:
    made = tiny("llama")
    made.more = {"blk.0.strange.weight": torch.zeros(4)}
    with pytest.raises(UnsupportedModel, match=r"tensors that LlamaForCausalLM does not have, such as blk\.0\.strange"):
        open_checkpoint(made.write(tmp_path / "strange.gguf"))


@pytest.mark.parametrize("method", ["add_head_count", "add_head_count_kv"])
def test_metadata_that_no_class_can_have_are_one_line(method: str, tmp_path: Path) -> None:
    made = tiny("llama")
    made.fields = {method: 0}
    path = made.write(tmp_path / "zero.gguf")
    with pytest.raises(UnsupportedModel) as caught:
        logits_of(spans_of(path))
    assert "\n" not in str(caught.value)


def test_a_whole_model_and_its_draft_read_the_same_file(tmp_path: Path) -> None:
    made = tiny("qwen3")
    path = made.write(tmp_path / "draft.gguf")
    own = reference(made.model, IDS)
    whole = load_causal_lm(path, torch.float32, "cpu")
    assert (reference(whole, IDS) - own).abs().max() <= 1e-5
    assert load_whole(path, torch.float32).vocab_size == VOCAB


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_a_file_of_plain_floats_is_no_packed_one(kind: Kind, tmp_path: Path) -> None:
    made = TinyGguf.of("llama", "llama", lambda *_: kind)
    checkpoint = open_checkpoint(made.write(tmp_path / "plain.gguf"))
    assert checkpoint.source.encoding == ""
    assert all(isinstance(one, torch.Tensor) for one in checkpoint.read(checkpoint.weight_map).values())
    assert checkpoint.config.dtype == (torch.float16 if kind == Kind.F16 else torch.bfloat16)
