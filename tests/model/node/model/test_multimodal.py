"""The language part of a model that also sees or hears, served in spans and as a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from node.model.family_check import check_text_part, language_error
from node.model.span import dissect, load_tested
from swarm.base.errors import UnsupportedModel
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import load_whole
from swarm.files.stored.source import SafetensorsSource
from tests.model.tiny_models import _BASE as BASE
from tests.model.tiny_models import SPANS, chain, load_alone, reference, run_chain, save_sharded, tiny_config

EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}


@pytest.mark.parametrize(("family", "text"), [("gemma3", "gemma3_text"), ("idefics3", "llama")])
def test_the_language_part_of_a_model_with_eyes_is_served_and_drafts(family: str, text: str, tmp_path: Path) -> None:
    eyes = {**EYES, "image_size": 28, "patch_size": 14}
    config = cast("Any", CONFIG_MAPPING[family])(text_config=tiny_config(text).to_dict(), vision_config=eyes)
    torch.manual_seed(0)
    whole = cast("Any", AutoModelForImageTextToText).from_config(config).eval()
    save_sharded(whole, tmp_path / "whole")
    models = [load_alone(tmp_path / "whole", span, tmp_path / str(span)) for span in SPANS]
    ids = torch.arange(3, 19)
    kv_caches = [[KvCache(model.layout, 32)] for model in models]
    logits = models[-1].logits(run_chain(models, kv_caches, [chain(kv_caches[0][0], ids)]))
    assert (logits - reference(whole, ids)).abs().max() <= 1e-5
    draft = load_whole(tmp_path / "whole", torch.float32)
    drafted = draft.logits(draft.forward([chain(KvCache(draft.layout, 32), ids)]))
    assert (drafted - reference(whole, ids)).abs().max() <= 1e-5


TURNS: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 64}
DEPTH: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, **PATCHES}
PARTIAL = TURNS | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
COMPOSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {"rope_parameters": TURNS},
        {"depth": 1, "embed_dim": 32, "num_heads": 2, **PATCHES, "hidden_size": 64},
    ),
    "qwen2_5_vl": ({"rope_parameters": TURNS}, DEPTH),
    "qwen3_vl": ({"rope_parameters": TURNS}, {**DEPTH, "deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (
        {"rope_parameters": TURNS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        {**DEPTH, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": ({"rope_parameters": PARTIAL}, {**DEPTH, "image_size": 8}),
    "glm4v_moe": ({"rope_parameters": PARTIAL, "first_k_dense_replace": 1, **ROUTED}, {**DEPTH, "image_size": 8}),
}
"""Changes of the text model's config, and of the one of the part that sees."""


@pytest.mark.parametrize("family", COMPOSED)
def test_a_text_model_without_a_class_of_its_own_runs_with_a_head(family: str, tmp_path: Path) -> None:
    """The class of the whole model is what its texts are compared with, on the checkpoint that it writes."""
    changes, eyes = COMPOSED[family]
    kind: Any = CONFIG_MAPPING[family]
    text = {**BASE, "head_dim": 16, **changes}
    config = kind(text_config=text, vision_config=eyes, tie_word_embeddings=False)
    torch.manual_seed(0)
    whole = cast("Any", AutoModelForImageTextToText).from_config(config, attn_implementation="eager").eval()
    for weight in whole.parameters():
        weight.data += torch.randn(weight.shape) * 0.05
    save_sharded(whole, tmp_path / "whole")
    models = [load_alone(tmp_path / "whole", span, tmp_path / str(span)) for span in SPANS]
    ids = torch.arange(3, 19)
    kv_caches = [[KvCache(model.layout, 32)] for model in models]
    logits = models[-1].logits(run_chain(models, kv_caches, [chain(kv_caches[0][0], ids)]))
    with torch.no_grad():
        expected = whole(input_ids=ids[None], use_cache=False).logits[0]
    assert (logits - expected).abs().max() <= 1e-5 * max(1, float(expected.abs().max()))


def test_a_head_that_does_more_than_a_plain_one_is_refused() -> None:
    """Chameleon's class forbids tokens of images, which its text model does not."""
    config = cast("Any", CONFIG_MAPPING["chameleon"])(vocabulary_map={"<image>": 3, "IMGIMGAA": 5})
    with pytest.raises(UnsupportedModel, match=r"a text's logits are .* off those of the whole model's class"):
        check_text_part(config)


@pytest.mark.parametrize("family", ["kimi_k25", "llava", "minimax_m3_vl", "molmo2", "qianfan_ocr"])
def test_a_checkpoint_of_the_whole_is_read_under_the_names_that_its_class_writes(family: str) -> None:
    error, is_alike = language_error(cast("Any", CONFIG_MAPPING[family])(), load_tested)
    assert is_alike
    assert error <= 1e-5


def test_a_head_that_scales_logits_otherwise_than_the_whole_gives_the_same_greedy_text() -> None:
    error, is_alike = language_error(cast("Any", CONFIG_MAPPING["cohere2_vision"])(), load_tested)
    assert is_alike
    assert error > 0.1, "its language part's class scales logits, the class of the whole does not"


def test_what_sees_is_left_out_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    text = {"model.language_model.norm.weight": "a", "lm_head.weight": "b"}
    eyes = {"model.visual.blocks.0.norm.weight": "a", "model.visual.blocks.1.norm.weight": "a"}
    caplog.set_level("INFO")
    SafetensorsSource.of(Path(), "model", {**text, **eyes})
    assert "model: 2 tensors of what sees or hears are left out" in caplog.text


def test_layers_that_predict_further_tokens_stay_in_the_map_of_a_model_with_eyes() -> None:
    text = {"model.language_model.norm.weight": "a", "mtp.layers.0.norm.weight": "b", "lm_head.weight": "b"}
    eyes = {"model.visual.blocks.0.norm.weight": "a"}
    found = SafetensorsSource.of(Path(), "model", {**text, **eyes}).files
    assert found == {name.replace("language_model.", ""): (file,) for name, file in text.items()}


@pytest.mark.parametrize("family", ["voxtral", "qwen2_audio"])
def test_whether_a_head_is_tied_is_the_language_parts_word_where_the_whole_says_nothing(family: str) -> None:
    for is_tied in (False, True):
        text = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": is_tied}
        assert dissect(cast("Any", CONFIG_MAPPING[family])(text_config=text)).is_tied == is_tied
