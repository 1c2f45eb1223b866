"""Checkpoints that GPTQModel and ModelOpt wrote: what they read of them is what a node computes with, still packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from node.model.checkpoint import Checkpoint, open_checkpoint
from node.model.loading import format_of
from node.model.packed_span import load_packed
from node.model.span import dissect
from swarm.base.errors import UnsupportedModel
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.weights.stored_weight import StoredWeight
from swarm.files.stored.quantised import refusal
from swarm.files.stored.source import StoredTensor
from tests.model import gptqmodel, modelopt
from tests.model.gptqmodel.make import EMBEDDING, digest, plain_config
from tests.model.tiny_models import chain, reference, run_chain

FOLDERS: Final = [Path(next(iter(package.__path__))) for package in (gptqmodel, modelopt)]
MADE: Final = {folder: json.loads((folder / "made.json").read_text(encoding="utf-8"))["models"] for folder in FOLDERS}
FILES: Final = {name: folder / f"{name}.safetensors" for folder, models in MADE.items() for name in models}
MODELS: Final[dict[str, Any]] = {name: model for models in MADE.values() for name, model in models.items()}
ENCODINGS: Final = {
    "gptq4": {"gptq4"},
    "gptq4-act-order": {"gptq4"},
    "gptq8-v2": {"gptq8"},
    "gptq-dynamic": {"gptq4", "gptq8"},
    "awq4": {"awq4"},
    "fp8": {"fp8"},
    "fp8-rows": {"fp8"},
    "fp8-blocks": {"fp8"},
    "nvfp4": {"nvfp4"},
}
CPU: Final = torch.device("cpu")
SPANS: Final = (Span(0, 1), Span(1, 2))
IDS: Final = torch.arange(11) * 7 % 120 + 3


def saved(name: str, folder: Path, **changes: object) -> Checkpoint:
    """A whole checkpoint of the library's file; its config may be changed."""
    folder.mkdir()
    config = plain_config()
    config.architectures = ["LlamaForCausalLM"]
    config.quantization_config = {**MODELS[name]["config"], **changes}
    config.save_pretrained(folder)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(1))
    save_file(load_file(FILES[name]) | {EMBEDDING: embedding.bfloat16()}, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_spans_are_those_that_the_library_reads(name: str, tmp_path: Path) -> None:
    checkpoint = saved(name, tmp_path / "model")
    read = checkpoint.read(checkpoint.weight_map)
    stored = {one: tensor for one, tensor in read.items() if isinstance(tensor, StoredTensor)}
    assert {tensor.matrix.encoding for tensor in stored.values()} == ENCODINGS[name]
    assert checkpoint.source.encoding == "_".join(sorted(ENCODINGS[name]))
    plain = dict(checkpoint.tensors(stored))
    assert {one: digest(tensor) for one, tensor in plain.items()} == MODELS[name]["values"]
    layout = dissect(checkpoint.config)
    form = format_of(checkpoint, layout, "auto", torch.float32, CPU)
    spans = [load_packed(checkpoint, span, form, CPU) for span in SPANS]
    packed = [one for span in spans for one in span.model.modules() if isinstance(one, StoredWeight)]
    assert len(packed) >= len(MODELS[name]["values"])
    assert spans[0].numeric_class == f"cpu-float32+{checkpoint.source.encoding}"
    counted = sum(layout.bytes_in(span, form) for span in SPANS)
    assert abs(sum(span.weight_bytes for span in spans) - counted) <= 0.05 * counted
    meant = LlamaForCausalLM(plain_config())
    values = {one: tensor.float() for one, tensor in checkpoint.tensors(checkpoint.weight_map).items()}
    assert meant.load_state_dict(values, strict=False).unexpected_keys == []
    kv_caches = [[KvCache(span.layout, 32)] for span in spans]
    logits = spans[-1].logits(run_chain(spans, kv_caches, [chain(kv_caches[0][0], IDS)]))
    assert (logits - reference(meant, IDS)).abs().max() <= 1e-5


@pytest.mark.parametrize("bits", [2, 3, "many", [4]])
def test_modules_of_other_bits_are_refused_by_their_config(bits: object) -> None:
    config = {**MODELS["gptq-dynamic"]["config"], "dynamic": {"+:.*down_proj.*": {"bits": bits}}}
    said = f"the checkpoint is quantised (gptq) in {bits} bits, which is not handled; 4 or 8 bits are"
    assert refusal(config) == said


def test_modules_of_other_bits_are_refused_by_their_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved("gptq4", folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.qzeros"] = tensors[f"{name}.qzeros"][:, :8]
    save_file({one: tensor.contiguous() for one, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"{name}.weight is not what gptq means \(2 bits of a weight are not"):
        open_checkpoint(folder).read([f"{name}.weight"])


@pytest.mark.parametrize("dynamic", [None, [], {"+:.*": 3}, {"+:.*": {"group_size": 32}}])
def test_bits_are_found_from_the_tensors_whatever_the_config_says(dynamic: object, tmp_path: Path) -> None:
    checkpoint = saved("gptq-dynamic", tmp_path / "model", dynamic=dynamic)
    values = dict(checkpoint.tensors(MODELS["gptq-dynamic"]["values"]))
    assert {one: digest(tensor) for one, tensor in values.items()} == MODELS["gptq-dynamic"]["values"]
