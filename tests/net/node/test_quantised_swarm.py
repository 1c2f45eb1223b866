"""A swarm that serves a quantised checkpoint: its text is that of the model which the format's library reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer

from swarm.demo import TARGET
from tests.in_process_swarm import in_process_swarm
from tests.model.quantised_models import awq, bitsandbytes, compressed, fp8, save_quantised

PROMPT = "In the village below the hill,"
TOKENS = 12
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
FORMS = {
    "fp8": lambda: fp8(block=(16, 64)),
    "ct4": lambda: compressed(GROUPS),
    "awq4": lambda: awq(group=64),
    "nf4": lambda: bitsandbytes("nf4", nested=True),
}


@pytest.mark.parametrize("name", FORMS)
async def test_a_swarm_gives_the_text_of_the_model_that_the_library_reads(name: str, tmp_path: Path) -> None:
    model = save_quantised(TARGET, FORMS[name](), tmp_path / "model")
    ids = cast("Any", AutoTokenizer).from_pretrained(TARGET)(PROMPT, return_tensors="pt").input_ids
    meant: Any = model.meant
    with torch.no_grad():
        wanted = meant.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    async with in_process_swarm(model.folder, ["0-12"]) as here, here.client() as client:
        made = await client.generate(PROMPT, max_new_tokens=TOKENS, nodes=16)
        assert list(made.tokens) == wanted
        assert made.stats.numeric_class == f"cpu-float32+{name}"
        assert made.stats.reproducible
