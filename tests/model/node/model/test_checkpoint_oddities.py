"""Checkpoints as people have them: what works gives transformers' own numbers, what does not says what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from client.base.target import load_target
from node.model.checkpoint import open_checkpoint
from node.model.loading import fetch
from node.model.span import dissect, load_span
from swarm.base.errors import SwarmError
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import load_whole
from swarm.demo import TARGET
from swarm.files.fingerprint import model_identity
from tests.fake_hub import MODEL, FakeHub, Repo
from tests.model.tiny_models import chain, reference, run_chain, tiny_model

Tensors = dict[str, torch.Tensor]
LAYERS = 3
SPANS = (Span(0, 1), Span(1, 2), Span(2, 3))
SMALL = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1}
IDS = torch.arange(3, 15)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", changes=SMALL)


@pytest.fixture(scope="module")
def tied() -> PreTrainedModel:
    return tiny_model("qwen3", changes=SMALL)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> torch.Tensor:
    return reference(model, IDS)


def tensors_of(model: PreTrainedModel) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def write(folder: Path, model: PreTrainedModel, files: dict[str, Tensors]) -> Path:
    """A checkpoint of just these files, and the model's config."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder


def shards(tensors: Tensors, stem: str = "model", first: int = 1) -> dict[str, Tensors]:
    """Ends and each layer in a file of its own."""
    parts = [{name: tensor for name, tensor in tensors.items() if "layers." not in name}]
    parts += [{name: tensors[name] for name in tensors if f"layers.{layer}." in name} for layer in range(LAYERS)]
    return {f"{stem}-{first + at:05}-of-{len(parts):05}.safetensors": part for at, part in enumerate(parts)}


def index_of(files: dict[str, Tensors]) -> str:
    """Without the metadata that transformers asks for and nobody needs."""
    return json.dumps({"weight_map": {name: file for file, tensors in files.items() for name in tensors}})


def in_spans(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    models = [load_span(checkpoint, span, dtype) for span in SPANS]
    kv_caches = [[KvCache(span.layout, 32)] for span in models]
    return models[-1].logits(run_chain(models, kv_caches, [chain(kv_caches[0][0], IDS)]))


def as_whole(folder: Path) -> torch.Tensor:
    whole = load_whole(folder, torch.float32)
    return whole.logits(whole.forward([chain(KvCache(whole.layout, 32), IDS)]))


def stray(tensors: Tensors) -> Tensors:
    return {name: tensor + 1 for name, tensor in tensors.items()}


def stray_beside_an_index(folder: Path, tensors: Tensors) -> dict[str, Tensors]:
    """A file of the usual name goes before an index, as in transformers."""
    files = shards(stray(tensors))
    (folder / INDEX).write_text(index_of(files))
    return {SINGLE: tensors, **files}


def index_of_files_that_are_gone(folder: Path, tensors: Tensors) -> dict[str, Tensors]:
    (folder / INDEX).write_text(index_of(shards(tensors)))
    return {SINGLE: tensors}


def stray_files_beside_an_index(folder: Path, tensors: Tensors) -> dict[str, Tensors]:
    files = shards(tensors)
    (folder / INDEX).write_text(index_of(files))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return {**files, "other.safetensors": stray(tensors), "consolidated.safetensors": stray(tensors)}


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


WORKS: dict[str, Callable[[Path, Tensors], dict[str, Tensors]]] = {
    "shards": lambda _, tensors: shards(tensors),
    "shards from 0": lambda _, tensors: shards(tensors, first=0),
    "shards of another name": lambda _, tensors: shards(tensors, "weights"),
    "shards of two names": lambda _, tensors: {**shards(tensors), **shards(stray(tensors), "ema")},
    "one file of another name": lambda _, tensors: {"weights.safetensors": tensors},
    "consolidated by name alone": lambda _, tensors: {"consolidated.safetensors": tensors},
    "consolidated beside shards": lambda _, tensors: {"consolidated.safetensors": stray(tensors), **shards(tensors)},
    "stray beside an index": stray_beside_an_index,
    "index of files that are gone": index_of_files_that_are_gone,
    "names of a compiled model": lambda _, tensors: {SINGLE: prefixed(tensors, "_orig_mod.")},
    "names of a model trained in parallel": lambda _, tensors: {SINGLE: prefixed(tensors, "module._orig_mod.")},
    "compiled layers": lambda _, tensors: {
        SINGLE: {re.sub(r"(layers\.\d+)", r"\1._orig_mod", name): tensor for name, tensor in tensors.items()}
    },
    "stray files beside an index": stray_files_beside_an_index,
}


@pytest.mark.parametrize("kind", WORKS)
def test_files_in_other_order_give_the_same_logits(
    kind: str, model: PreTrainedModel, expected: torch.Tensor, tmp_path: Path
) -> None:
    folder = write(tmp_path, model, WORKS[kind](tmp_path, tensors_of(model)))
    assert (in_spans(folder) - expected).abs().max() <= 1e-5
    assert (as_whole(folder) - expected).abs().max() <= 1e-5


def test_shards_without_an_index_are_a_model_of_their_own(model: PreTrainedModel, tmp_path: Path) -> None:
    """The fingerprint covers every shard."""
    prints = set()
    for number, changed in enumerate([None, "lm_head.weight", "model.layers.2.mlp.up_proj.weight"]):
        tensors = tensors_of(model)
        if changed is not None:
            tensors[changed] += 1
        folder = write(tmp_path / f"model{number}", model, shards(tensors))
        shutil.copy(TARGET / "tokenizer.json", folder)
        prints.add(model_identity(folder, "org/model").fingerprint)
    assert len(prints) == 3


EXTRA = [
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.mtp_layers.0.self_attn.q_proj.weight",
    f"model.layers.{LAYERS}.self_attn.q_proj.weight",
    f"model.layers.{LAYERS}.embed_tokens.weight",
    "model.mtp.norm.weight",
    "mtp.norm.weight",
    "mtp.embed_tokens.weight",
    "mtp.lm_head.weight",
    "mtp.fc.weight",
    "visual.layers.0.self_attn.q_proj.weight",
    "v_head.weight",
]


def test_tensors_that_no_layer_needs_are_left_alone_and_named(
    model: PreTrainedModel, expected: torch.Tensor, tmp_path: Path
) -> None:
    extra = {name: torch.zeros(8, 8) for name in EXTRA}
    folder = write(tmp_path, model, {SINGLE: {**tensors_of(model), **extra}})
    assert (in_spans(folder) - expected).abs().max() <= 1e-5
    assert (as_whole(folder) - expected).abs().max() <= 1e-5
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weight_map.keys() >= extra.keys(), "a drafter may read them"
    layout, lines = dissect(checkpoint.config), list[str]()
    assert layout.unused(checkpoint.weight_map) == sorted(EXTRA)
    fetch(checkpoint, layout, Span(0, 1), lines.append)
    assert lines == [f"{len(EXTRA)} tensors of the checkpoint are not used, such as {min(EXTRA)}: no layer needs them"]


@pytest.mark.parametrize("prefix", ["", "thinker.model."])
def test_names_of_the_base_model_and_longer_ones_find_their_layers(prefix: str, model: PreTrainedModel) -> None:
    layout = dissect(model.config)
    names = {name: prefix + name.removeprefix("model.") for name in tensors_of(model)}
    for span in SPANS:
        own = layout.needed(names, span)
        assert layout.needed(names.values(), span) == [names[name] for name in own]
        assert own


def test_a_head_under_an_older_name_goes_to_the_last_machine(tmp_path: Path) -> None:
    """GPT-NeoX's was called embed_out; transformers renames it."""
    older = tiny_model("gpt_neox", changes=SMALL)
    tensors = tensors_of(older)
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    folder = write(tmp_path, older, {SINGLE: tensors})
    assert (in_spans(folder) - reference(older, IDS)).abs().max() <= 1e-5


@pytest.mark.parametrize("added", [0.0, 1.0], ids=["equal", "different"])
def test_a_tied_head_that_is_stored_too_counts_as_in_transformers(
    added: float, tied: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = tensors_of(tied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + added
    folder = write(tmp_path, tied, {SINGLE: tensors})
    theirs = reference(cast("Any", AutoModelForCausalLM).from_pretrained(folder).eval(), IDS)
    assert ((theirs - reference(tied, IDS)).abs().max() > 1e-3) == bool(added)
    assert (in_spans(folder) - theirs).abs().max() <= 1e-5
    assert (as_whole(folder) - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_several_types_are_cast_as_transformers_casts_them(
    dtype: torch.dtype, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Weights in bf16, norms in fp32, one shard in fp16."""
    files = shards(
        {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors_of(model).items()}
    )
    last = list(files)[-1]
    files[last] = {name: (tensor * 1.001).half() for name, tensor in files[last].items()}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, **json.loads(index_of(files))}))
    folder = write(tmp_path, model, files)
    theirs = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=dtype).state_dict()
    checkpoint = open_checkpoint(folder)
    for span in SPANS:
        layer = f"model.layers.{span.start}."
        loaded = load_span(checkpoint, span, dtype).model.state_dict()
        mine = {name: tensor for name, tensor in loaded.items() if name.startswith(layer)}
        assert mine
        assert all(torch.equal(tensor, theirs[name]) and tensor.dtype == dtype for name, tensor in mine.items())


def without_a_shard(tensors: Tensors) -> dict[str, Tensors]:
    files = shards(tensors)
    del files["model-00003-of-00004.safetensors"]
    return files


def in_two_files(tensors: Tensors) -> dict[str, Tensors]:
    files = shards(tensors)
    files["model-00004-of-00004.safetensors"]["model.norm.weight"] = tensors["model.norm.weight"]
    return files


def mistrals(tensors: Tensors) -> dict[str, Tensors]:
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    return {"consolidated.safetensors": {new: tensors[old] for new, old in names.items()}}


REFUSED: dict[str, tuple[Callable[[Tensors], dict[str, Tensors]], str]] = {
    "a missing shard": (
        without_a_shard,
        "model-00003-of-00004.safetensors missing, and no index says what is in it; fetch all 4 shards",
    ),
    "a tensor in two files": (
        in_two_files,
        "model.norm.weight lies in model-00001-of-00004.safetensors and in model-00004-of-00004.safetensors; "
        "remove the file that is not the model's, or add its index",
    ),
    "two sets of shards": (
        lambda tensors: {**shards(tensors, "a"), **shards(tensors, "b")},
        "no index says which weights are meant: a-00001-of-00004.safetensors, b-00001-of-00004.safetensors; "
        "leave one set of shards there",
    ),
    "two files": (
        lambda tensors: {"a.safetensors": tensors, "b.safetensors": tensors},
        "no index says which weights are meant: a.safetensors, b.safetensors; "
        "rename the one that is meant to model.safetensors",
    ),
    "Mistral's own file": (
        mistrals,
        "consolidated.safetensors has Mistral's own names of tensors (tok_embeddings.weight); "
        "fetch the same model's files with Hugging Face's names (model….safetensors)",
    ),
    "an adapter": (
        lambda _: {"adapter_model.safetensors": {"base.q_proj.lora_A.weight": torch.zeros(2, 2)}},
        "adapter_model.safetensors has a LoRA adapter (base.q_proj.lora_A.weight); merge it into its model first",
    ),
    "a part of a quantised weight": (
        lambda tensors: {SINGLE: {**tensors, "model.layers.1.mlp.up_proj.qweight": torch.zeros(2, 2)}},
        "model.layers.1.mlp.up_proj.qweight is a part of a quantised weight, and config.json has no "
        "quantization_config; take the config.json that was published with these weights",
    ),
    "two names of one tensor": (
        lambda tensors: {SINGLE: {**tensors, "module.model.norm.weight": tensors["model.norm.weight"] + 1}},
        "model.norm.weight and module.model.norm.weight name one tensor; remove one of them",
    ),
    "an embedding of other rows": (
        lambda tensors: {SINGLE: {**tensors, "model.embed_tokens.weight": torch.zeros(97, 32)}},
        "checkpoint does not fit its class: model.embed_tokens.weight has the shape [97, 32], and by the config "
        "[128, 32]",
    ),
    "a matrix of another width": (
        lambda tensors: {SINGLE: {**tensors, "model.layers.1.mlp.up_proj.weight": torch.zeros(32, 33)}},
        "checkpoint does not fit its class: model.layers.1.mlp.up_proj.weight has the shape [32, 33], and by the "
        "config [32, 32]",
    ),
    "an unknown tensor in a layer": (
        lambda tensors: {SINGLE: {**tensors, "model.layers.1.self_attn.q_proj.scale": torch.zeros(2)}},
        "checkpoint does not fit its class: 1 unexpected keys, such as model.layers.1.self_attn.q_proj.scale",
    ),
    "an unknown tensor of the head": (
        lambda tensors: {SINGLE: {**tensors, "lm_head.bias": torch.zeros(2)}},
        "checkpoint does not fit its class: 1 unexpected keys, such as lm_head.bias",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_files_that_say_too_little_are_refused_by_name(kind: str, model: PreTrainedModel, tmp_path: Path) -> None:
    files, message = REFUSED[kind]
    folder = write(tmp_path, model, files(tensors_of(model)))
    with pytest.raises(SwarmError, match=re.escape(message) + "$"):
        in_spans(folder)
    if "unknown" not in kind:
        with pytest.raises(SwarmError, match=re.escape(message) + "$"):
            load_whole(folder, torch.float32)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "tokenizer.model",
            "needs tokenizer.json; it has tokenizer.model alone, which only sentencepiece reads; "
            "add the tokenizer.json that the same model has elsewhere, or `pip install sentencepiece`",
        ),
        (
            "tekken.json",
            "needs tokenizer.json; it has tekken.json, Mistral's own; add the tokenizer.json that the same model has "
            "elsewhere",
        ),
        (None, "no tokenizer.json; a model comes with its tokenizer"),
    ],
)
def test_a_tokenizer_of_another_form_is_refused_in_one_line(
    file: str | None, message: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    folder = write(tmp_path, model, {})
    if file is not None:
        (folder / file).write_bytes(b"{}")
    with pytest.raises(SwarmError, match=re.escape(message) + "$") as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_of_shards_without_an_index_on_the_hub_only_headers_are_read(
    model: PreTrainedModel, expected: torch.Tensor, hub: FakeHub, tmp_path: Path
) -> None:
    repo = Repo.of(write(tmp_path / "there", model, shards(tensors_of(model))))
    hub.repos[MODEL] = repo
    checkpoint = open_checkpoint(MODEL)
    for shard in shards(tensors_of(model)):
        assert hub.ranges(shard) == ["bytes=0-100000"]
    load_span(checkpoint, Span(1, 2), torch.float32)
    assert {shard for shard in shards({}) if None in hub.ranges(shard)} == {"model-00003-of-00004.safetensors"}
    assert (as_whole(cast("Path", MODEL)) - expected).abs().max() <= 1e-5
    hub.status = 503
    assert open_checkpoint(MODEL).weight_map == checkpoint.weight_map, "all are here by now"


def test_a_shard_that_the_hub_lacks_is_named(hub: FakeHub, model: PreTrainedModel, tmp_path: Path) -> None:
    hub.repos[MODEL] = Repo.of(write(tmp_path / "there", model, without_a_shard(tensors_of(model))))
    with pytest.raises(SwarmError, match=f"^{MODEL}: model-00003-of-00004.safetensors missing"):
        open_checkpoint(MODEL)


def test_a_hub_that_is_gone_is_named_where_shards_are_still_there(
    hub: FakeHub, model: PreTrainedModel, tmp_path: Path
) -> None:
    hub.repos[MODEL] = Repo.of(write(tmp_path / "there", model, shards(tensors_of(model))))
    load_span(open_checkpoint(MODEL), Span(1, 2), torch.float32)
    hub.status = 503
    with pytest.raises(SwarmError, match=f"^{MODEL}: its weights: .*503"):
        open_checkpoint(MODEL)
