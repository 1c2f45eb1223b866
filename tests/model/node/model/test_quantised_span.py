"""Spans of quantised checkpoints: what the format's own library reads is what the span computes with, still packed."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, cast

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from node.model.checkpoint import Checkpoint, open_checkpoint
from node.model.config import ServeConfig
from node.model.loading import AUTO_SHARE, fitting_layers, format_of, load
from node.model.malloc_trim import trim_heap
from node.model.offload import Offload, held_bytes, load_offloaded
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect, load_span, shared_parts
from swarm.base.errors import UnsupportedModel
from swarm.base.layers import Span
from swarm.compute.fast_path import use_static
from swarm.compute.kernels.support import kind_of
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import load_whole
from swarm.compute.weights.format import WeightFormat
from swarm.compute.weights.stored_weight import StoredWeight
from swarm.demo import TARGET
from swarm.files.pretrained import INDEX
from swarm.files.stored.source import StoredTensor
from tests.devices import DEVICE
from tests.model.quantised_models import (
    QuantisedModel,
    Written,
    awq,
    bitsandbytes,
    compressed,
    fbgemm,
    fp8,
    gptq,
    mxfp4,
    save_quantised,
)
from tests.model.tiny_models import chain, reference, run_chain, tiny_model

CPU = torch.device("cpu")
LAYERS = 3
SPANS = (Span(0, 1), Span(1, 2), Span(2, 3))
WHOLE = Span(0, LAYERS)
IDS = torch.arange(11) * 7 % 120 + 3

_GROUPS: Final[dict[str, Any]] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_BYTES: Final[dict[str, Any]] = {"num_bits": 8, "symmetric": True}
_FP4: Final[dict[str, Any]] = {"num_bits": 4, "type": "float", "symmetric": True}
FORMS: Final[dict[str, tuple[str, str, Callable[[], Written]]]] = {
    "fp8-blocks": ("fp8", "deepseek_v3", lambda: fp8(block=(16, 32))),
    "fp8-tensor": ("fp8", "llama", lambda: fp8(block=(1 << 16, 1 << 16))),
    "fbgemm": ("fp8", "llama", fbgemm),
    "mxfp4": ("mxfp4", "gpt_oss", mxfp4),
    "gptq": ("gptq4", "llama", gptq),
    "gptq-act-order": ("gptq4", "llama", lambda: gptq(act_order=True)),
    "gptq-v2-8": ("gptq8", "llama", lambda: gptq(bits=8, version="gptq_v2")),
    "awq": ("awq4", "phi3", awq),
    "ct4": ("ct4", "qwen3_moe", lambda: compressed({**_GROUPS, "symmetric": True})),
    "ct4-zeros": ("ct4", "llama", lambda: compressed({**_GROUPS, "symmetric": False})),
    "ct8-packed": ("ct8", "llama", lambda: compressed({**_BYTES, "type": "int", "strategy": "channel"})),
    "ct8": ("ct8", "llama", lambda: compressed({**_BYTES, "type": "int", "strategy": "channel"}, both=True)),
    "ct-fp8": ("fp8", "llama", lambda: compressed({**_BYTES, "type": "float", "strategy": "channel"})),
    "nvfp4": ("nvfp4", "mixtral", lambda: compressed({**_FP4, "strategy": "tensor_group", "group_size": 16})),
    "ct-mxfp4": ("mxfp4", "llama", lambda: compressed({**_FP4, "strategy": "group", "group_size": 32})),
    "nf4": ("nf4", "qwen3", lambda: bitsandbytes("nf4")),
    "nf4-nested": ("nf4", "llama", lambda: bitsandbytes("nf4", nested=True)),
    "bnb-fp4": ("bnbfp4", "llama", lambda: bitsandbytes("fp4")),
    "bnb-int8": ("bnb8", "llama", lambda: bitsandbytes("int8")),
}
"""What the class calls it, a family whose checkpoints have it, and its library."""
FEW: Final = ("fp8-blocks", "mxfp4", "nvfp4", "gptq-act-order", "nf4-nested")
"""One of each way in which parts lie in memory."""
WIDE: Final = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], QuantisedModel]:
    """Checkpoints by the names of `FORMS`, each made once."""
    made: dict[str, QuantisedModel] = {}

    def take(name: str) -> QuantisedModel:
        if name not in made:
            _, family, form = FORMS[name]
            whole = tiny_model(family, changes={"num_hidden_layers": LAYERS})
            made[name] = save_quantised(whole, form(), tmp_path_factory.mktemp("models") / name)
        return made[name]

    return take


def form_of(checkpoint: Checkpoint) -> WeightFormat:
    """Weights as the checkpoint has them, in float32 on the CPU."""
    return format_of(checkpoint, dissect(checkpoint.config), "auto", torch.float32, CPU)


def logits_of(models: Sequence[SpanModel]) -> torch.Tensor:
    kv_caches = [[KvCache(model.layout, 32)] for model in models]
    return models[-1].logits(run_chain(list(models), kv_caches, [chain(kv_caches[0][0], IDS)])).cpu()


def packed_bytes(model: SpanModel) -> int:
    return sum(one.numel() * one.itemsize for one in model.model.parameters() if not one.is_floating_point())


@pytest.mark.crossing(part=(0, 2))
@pytest.mark.parametrize("name", FORMS)
def test_three_spans_are_the_model_that_the_library_reads_and_stay_packed(
    name: str, saved: Callable[[str], QuantisedModel]
) -> None:
    model = saved(name)
    checkpoint = open_checkpoint(model.folder)
    read = checkpoint.read(checkpoint.weight_map)
    meant = load_file(Path(f"{model.folder}-plain") / "model.safetensors")
    assert read.keys() == meant.keys()
    stored = {one: tensor for one, tensor in read.items() if isinstance(tensor, StoredTensor)}
    assert len(stored) >= LAYERS * 2
    assert {tensor.matrix.encoding for tensor in stored.values()} == {FORMS[name][0]} == {checkpoint.source.encoding}
    for one, tensor in checkpoint.tensors(checkpoint.weight_map).items():
        assert torch.equal(tensor.float(), meant[one]), one
    form = form_of(checkpoint)
    device = torch.device(DEVICE)
    spans = [load_packed(checkpoint, span, form, device) for span in SPANS]
    for span in spans:
        quantised = [one for one in span.model.modules() if isinstance(one, StoredWeight)]
        assert len(quantised) == sum(len(own) for own in _matrices(checkpoint, span.span).values()), "one is not packed"
        assert span.numeric_class == f"{kind_of(device)}-float32+{FORMS[name][0]}"
    logits = logits_of(spans)
    if name in FEW:
        assert torch.equal(logits, logits_of([load_packed(checkpoint, WHOLE, form, device)]))
    assert (logits - reference(model.meant, IDS)).abs().max() <= 1e-5


def _matrices(checkpoint: Checkpoint, span: Span) -> dict[str, set[str]]:
    """The parameters of a span that quantised tensors go to, by layer: experts of a layer are one or two."""
    layout = dissect(checkpoint.config)
    found: dict[str, set[str]] = {}
    for name in layout.needed(cast("Any", checkpoint.source).parts, span):
        root = name.replace(".weight", "")
        if ".experts." in root:
            up = "down" if any(one in root for one in ("down", "w2")) else "up"
            root = f"{root.partition('.experts.')[0]}.experts.{up}"
        found.setdefault(str(layout.owner(name)), set()).add(root)
    return found


@pytest.mark.crossing(part=(0, 3))
@pytest.mark.parametrize("name", FORMS)
def test_memory_is_that_of_the_file(name: str, tmp_path: Path) -> None:
    family = {"deepseek_v3": "llama", "phi3": "llama"}.get(FORMS[name][1], FORMS[name][1])
    model = save_quantised(tiny_model(family, changes=WIDE), FORMS[name][2](), tmp_path / "model")
    checkpoint = open_checkpoint(model.folder)
    span = load_packed(checkpoint, Span(0, 1), form_of(checkpoint), CPU)
    assert packed_bytes(span) <= 1.05 * model.packed_bytes
    counted = dissect(checkpoint.config).bytes_in(Span(0, 1), form_of(checkpoint))
    assert abs(span.weight_bytes - counted) <= 0.05 * counted


def test_what_a_checkpoint_leaves_in_16_bits_stays_so(tmp_path: Path) -> None:
    """Of the demo's model, whose embedding is bfloat16; it computes in float32."""
    model = save_quantised(TARGET, gptq(group=64), tmp_path / "model")
    checkpoint = open_checkpoint(model.folder)
    form, layout = form_of(checkpoint), dissect(checkpoint.config)
    files = sum(file.stat().st_size for file in model.folder.glob("*.safetensors"))
    span = load_packed(checkpoint, Span(0, 12), form, CPU)
    assert span.weight_bytes <= 1.05 * files
    assert abs(span.weight_bytes - layout.bytes_in(Span(0, 12), form)) <= 0.05 * files
    ids = torch.arange(9) * 31 % 4000
    kv_cache = KvCache(span.layout, 16)
    assert (span.logits(span.forward([chain(kv_cache, ids)])) - reference(model.meant, ids)).abs().max() <= 1e-4
    tight = int(layout.bytes_in(Span(0, 12), form) / AUTO_SHARE * 2)
    plain = format_of(open_checkpoint(TARGET), layout, "auto", torch.float32, CPU)
    assert fitting_layers(layout, form, tight, 64) > fitting_layers(layout, plain, tight, 64)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_holds_the_files_bytes_and_one_layer(tmp_path: Path) -> None:
    """By the system's own count of the process's pages, mapped files included."""
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1}
    model = save_quantised(tiny_model("llama", changes=large), fp8(block=(64, 64)), tmp_path / "model")
    files = sum(file.stat().st_size for file in model.folder.glob("*.safetensors"))
    checkpoint, said = open_checkpoint(model.folder), [""]
    order = ServeConfig(layers="0-1", device="cpu", dtype="float32")
    load(checkpoint, order, said.append)  # what is made once is made now
    before = held_bytes_of_process()
    span = load(checkpoint, order, said.append)
    assert span.weight_bytes <= 1.05 * files
    assert held_bytes_of_process() - before <= 1.15 * files


def held_bytes_of_process() -> int:
    gc.collect()
    trim_heap()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize(
    ("name", "end", "made"),
    [
        ("fp8-blocks", ".q_a_proj.weight_scale_inv", torch.ones(99, 1)),
        ("mxfp4", ".gate_up_proj_scales", torch.ones(1, 1, 1, dtype=torch.uint8)),
        ("gptq-act-order", ".q_proj.g_idx", torch.full((64,), 99, dtype=torch.int32)),
        ("gptq-act-order", ".q_proj.qzeros", torch.ones(1, 1, dtype=torch.int32)),
        ("nvfp4", ".q_proj.weight_packed", torch.ones(3, 8, dtype=torch.uint8)),
        ("nf4-nested", ".q_proj.weight.nested_absmax", torch.ones(0)),
        ("nf4-nested", ".q_proj.weight.quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8)),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    name: str, end: str, made: torch.Tensor, saved: Callable[[str], QuantisedModel], tmp_path: Path
) -> None:
    model = saved(name)
    folder = shutil.copytree(model.folder, tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    (part,) = (one for one in index if ".layers.2." in one and one.endswith(end))
    save_file(load_file(folder / index[part]) | {part: made}, folder / index[part])
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UnsupportedModel, match=rf"^{folder}: model\.layers\.2\..* is not what \S+ means \(") as caught:
        load_packed(checkpoint, Span(2, 3), form_of(checkpoint), CPU)
    assert "\n" not in str(caught.value)
    load_packed(checkpoint, Span(1, 2), form_of(checkpoint), CPU)


@pytest.mark.parametrize("name", FEW)
def test_streamed_and_moved_layers_stay_as_they_are(name: str, saved: Callable[[str], QuantisedModel]) -> None:
    checkpoint = open_checkpoint(saved(name).folder)
    form, layout = form_of(checkpoint), dissect(checkpoint.config)
    resident = load_packed(checkpoint, WHOLE, form, CPU)
    wanted = logits_of([resident])
    with closing(load_offloaded(checkpoint, WHOLE, form, CPU, Offload())) as streamed:
        for _ in range(2):
            assert torch.equal(logits_of([streamed]), wanted)
        assert streamed.numeric_class == resident.numeric_class
        assert streamed.stored_bytes <= 1.06 * held_bytes(layout, WHOLE, form)[1] + 64 * 200
    first = load_packed(checkpoint, Span(0, 2), form, CPU)
    moved = load_packed(checkpoint, WHOLE, form, CPU, shared_parts(first, layout, WHOLE))
    assert torch.equal(logits_of([moved]), wanted)


@pytest.mark.parametrize("name", ["ct4", "mxfp4"])
def test_rounding_on_load_starts_from_the_values_that_it_means(
    name: str, saved: Callable[[str], QuantisedModel]
) -> None:
    model = saved(name)
    form = WeightFormat(torch.float32, 4)
    ours = load_packed(open_checkpoint(model.folder), WHOLE, form, CPU)
    plain = load_packed(open_checkpoint(Path(f"{model.folder}-plain")), WHOLE, form, CPU)
    assert ours.numeric_class == "cpu-float32+w4z"
    assert all(
        torch.equal(one, other) for one, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True)
    )


def test_a_draft_and_a_plain_span_are_decoded(saved: Callable[[str], QuantisedModel]) -> None:
    model = saved("gptq")
    wanted = reference(model.meant, IDS)
    for whole in (
        load_whole(model.folder, torch.float32),
        load_span(open_checkpoint(model.folder), WHOLE, torch.float32),
    ):
        assert (logits_of([cast("SpanModel", whole)]) - wanted).abs().max() <= 1e-5


def test_a_node_says_what_it_holds(saved: Callable[[str], QuantisedModel]) -> None:
    said: list[str] = []
    checkpoint = open_checkpoint(saved("mxfp4").folder)
    model = load(checkpoint, ServeConfig(layers="0-3", device="cpu", dtype="float32"), said.append)
    assert said[0] == "layers 0…2 of 3 as float32 with weights in mxfp4 on cpu"
    assert said[-1].startswith("mxfp4 as published: 0.1 MiB of weights, expanded block by block; ")
    use_static(model, forced=True)
    assert "kernels do not read all weights in mxfp4; --weights bf16, int8 or int4 run them" in model.path_reason
    rounded = load(checkpoint, ServeConfig(layers="0-3", device="cpu", weights="int8"), said.append)
    assert rounded.numeric_class == "cpu-float32+w8"


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("gptq", "model.layers.2.self_attn.q_proj.pre_quant_scale"),
        ("fp8-tensor", "model.layers.2.mlp.up_proj.svdquant_lora_a"),
        ("awq", "model.layers.2.mlp.act.scales"),
    ],
)
def test_parts_of_a_quantised_module_that_nobody_knows_are_refused(
    name: str, stray: str, saved: Callable[[str], QuantisedModel], tmp_path: Path
) -> None:
    """Weights that a scale of their own corrects would be wrong without it, and the text with them."""
    folder = shutil.copytree(saved(name).folder, tmp_path / "model")
    content = json.loads((folder / INDEX).read_text())
    file = next(iter(content["weight_map"].values()))
    content["weight_map"][stray] = file
    save_file(load_file(folder / file) | {stray: torch.ones(64)}, folder / file)
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(folder).read([])
    method = FORMS[name][2]().config["quant_method"]
    assert f"the checkpoint is quantised ({method}) with {stray}, which is not handled" in str(caught.value)


def test_a_weight_of_8_bits_without_a_scale_is_refused(saved: Callable[[str], QuantisedModel], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("fp8-tensor").folder, tmp_path / "model")
    content = json.loads((folder / INDEX).read_text())
    name = "model.layers.2.mlp.up_proj.weight"
    del content["weight_map"][f"{name}_scale_inv"]
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=rf"{name} is of the type float8_e4m3fn, and its scales are not known"):
        open_checkpoint(folder).read([name])
