"""A swarm that serves a quantised checkpoint: its text is that of the model which the format's library reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer

from swarm.compute.compute_thread import CoreShare
from swarm.compute.ragged_batch import RaggedModel
from swarm.compute.weights.codes_weight import CodesWeight
from swarm.compute.weights.format import computes_bfloat16
from swarm.compute.weights.stored_weight import StoredWeight
from swarm.demo import DRAFT, TARGET
from swarm.protocol.numeric_class import without_rounding
from tests.in_process_swarm import in_process_swarm, swarm_in
from tests.memory_registry import MemoryNetwork
from tests.model.quantised_models import awq, bitsandbytes, compressed, fp8, save_quantised

PROMPT = "In the village below the hill,"
LONG_PROMPT = "The lighthouse keeper opened the door, and looked at the sea. " * 8
"""So long that a text passes the end of a block of positions."""
TOKENS = 12
NEAR = 0.1
"""How far below the best one a pick may be, in standard deviations of logits: rounding, and no more."""
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


async def test_trees_splits_and_threads_leave_a_cpus_texts_as_they_are(tmp_path: Path) -> None:
    model = save_quantised(TARGET, compressed(GROUPS), tmp_path / "model")
    texts: set[tuple[float, tuple[int, ...]]] = set()
    for layers, threads in ((["0-12"], 2), (["0-4", "4-8", "8-12"], 1)):
        async with (
            in_process_swarm(model.folder, layers, dtype="auto", threads=threads) as here,
            here.client(draft=DRAFT) as client,
        ):
            for nodes, temperature in itertools.product((0, 16, 64), (0.0, 1.0)):
                made = await client.generate(
                    LONG_PROMPT, max_new_tokens=24, nodes=nodes, temperature=temperature, seed=3
                )
                assert made.stats.reproducible
                texts.add((temperature, tuple(made.tokens)))
    assert len(texts) == 2, "one text for each temperature"


@pytest.mark.parametrize("is_fast", [True, False])
async def test_a_node_follows_the_swarm_with_the_promise_or_without_it(tmp_path: Path, *, is_fast: bool) -> None:
    model = save_quantised(TARGET, compressed(GROUPS), tmp_path / "model")
    network, kind = MemoryNetwork(), f"cpu-bfloat16-{'k1' if is_fast else 'k2'}+ct4"
    async with (
        swarm_in(network, model.folder, ["0-6"], {"dtype": "auto", "no_promise": is_fast}),
        swarm_in(network, model.folder, ["6-12"], {"dtype": "auto", "no_promise": not is_fast}) as second,
        second.client() as client,
    ):
        made = await client.generate(PROMPT, max_new_tokens=2)
        if computes_bfloat16(torch.device("cpu")):
            assert (without_rounding(made.stats.numeric_class), made.stats.reproducible) == (kind, not is_fast)
        else:
            assert made.stats.reproducible, "float32 promises texts"


async def test_by_default_a_cpu_multiplies_with_the_integers_on_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_quantised(TARGET, compressed(GROUPS), tmp_path / "model")
    threads: set[int] = set()
    forward, product, expanded = RaggedModel.forward, CodesWeight.product, StoredWeight.product_of

    def noted(self: RaggedModel, *given: Any) -> torch.Tensor:  # noqa: ANN401 - as the forward's
        threads.add(get_ident())
        assert torch.get_num_threads() == 2
        return forward(self, *given)

    used: list[str] = []
    monkeypatch.setattr(RaggedModel, "forward", noted)

    def counted(kind: str, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def product_of(*given: Any) -> torch.Tensor:  # noqa: ANN401 - as the product's
            used.append(kind)
            return call(*given)

        return product_of

    monkeypatch.setattr(CodesWeight, "product", counted("codes", product))
    monkeypatch.setattr(StoredWeight, "product_of", counted("expanded", expanded))
    monkeypatch.setattr(CoreShare, "end", lambda self: self.most)  # whatever else this machine does
    texts = {}
    has_bfloat16 = computes_bfloat16(torch.device("cpu"))
    async with in_process_swarm(model.folder, ["0-12"], dtype="auto", threads=2) as here, here.client() as client:
        assert torch.get_num_threads() == 1, "the event loop's"
        for nodes in (1, 16):
            made = await client.generate(PROMPT, max_new_tokens=TOKENS, nodes=nodes)
            texts[nodes] = list(made.tokens)
        kind = "cpu-bfloat16-k2+ct4" if has_bfloat16 else "cpu-float32+ct4"
        assert without_rounding(made.stats.numeric_class) == kind
        assert made.stats.reproducible
    assert texts[1] == texts[16]
    assert set(used) == {"codes" if has_bfloat16 else "expanded"}
    assert len(threads) == 1
    meant: Any = model.meant
    ids = cast("Any", AutoTokenizer).from_pretrained(TARGET)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        whole = torch.cat([ids, torch.tensor([texts[1]])], 1)
        logits = meant(whole).logits[0, ids.shape[1] - 1 : -1].float()
    best = logits.max(1).values - logits[torch.arange(TOKENS), torch.tensor(texts[1])]
    assert float(best.max()) <= NEAR * float(logits.std()), "no pick is far from the exact model's"
