"""The language part of a model that also sees or hears, served in spans and as a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from node.model.span import dissect
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import load_whole
from swarm.models.stored.source import _text_only
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


def test_layers_that_predict_further_tokens_stay_in_the_map_of_a_model_with_eyes() -> None:
    text = {"model.language_model.norm.weight": "a", "mtp.layers.0.norm.weight": "b", "lm_head.weight": "b"}
    eyes = {"model.visual.blocks.0.norm.weight": "a"}
    assert _text_only({**text, **eyes}) == {name.replace("language_model.", ""): file for name, file in text.items()}


@pytest.mark.parametrize("family", ["voxtral", "qwen2_audio"])
def test_whether_a_head_is_tied_is_the_language_parts_word_where_the_whole_says_nothing(family: str) -> None:
    for is_tied in (False, True):
        text = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": is_tied}
        assert dissect(cast("Any", CONFIG_MAPPING[family])(text_config=text)).is_tied == is_tied
