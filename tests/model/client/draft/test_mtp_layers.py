"""Checkpoints with several MTP layers: each drafts a level of the tree, with transformers' own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import client.draft.sources.layer_head
from benchmarks.simulation.acceptance import Size, generate
from client.base.options import DraftOptions
from client.base.target import load_target
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.heads.layer_head import LayerHead
from client.draft.heads.mtp import find_mtp, load_mtp
from client.draft.loading import load_drafter
from client.draft.search.source import Search
from client.draft.search.tree import TokenTree
from client.draft.sources.layer_head import LayerHeadSource
from swarm.compute.ragged_batch import load_whole
from swarm.protocol.messages import Sampling
from tests.model.client.draft.noting_ranker import Noting
from tests.model.published_mtp import LAYERS, WIDTH, publish

CPU = torch.device("cpu")
MTP_LAYERS = 3
TEXT = [int(token) for token in torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1))]
ROWS = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(request.param, tmp_path_factory.mktemp(request.param), mtp_layers=MTP_LAYERS)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> MtpModel:
    """The layers in transformers."""
    model = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [rf"layers\.{LAYERS + number}\." for number in range(MTP_LAYERS)]
    assert model.config.num_mtp_layers == MTP_LAYERS
    made: Any = MtpModel.from_pretrained(model)
    found: MtpModel = made.eval()
    return found


def reference(layers: MtpModel, tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Logits after a text from its definition: layer k reads rows of layer k - 1, the first one the target's.

    Args:
        layers: transformers' own.
        tokens: the text, from the first token whose row is known.
        rows: [n, width], the target's normed ones of its first n tokens.
    """
    made: Any = layers
    cache, known, last = MtpCache(config=made.config), len(rows), len(tokens) - 1

    def step(number: int, start: int, given: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor(tokens[start : start + len(given)])[None]
        places = torch.arange(start, start + len(given))[None]
        found: torch.Tensor = made.forward_layer(number, given[None], places, cache, input_ids=ids)[0]
        return found

    before = rows
    for number in range(MTP_LAYERS):  # the row of token t in `before` is at t - number
        before = step(number, number + 1, before[: last - number])
        if known + number == last:
            break
    for place in range(known + MTP_LAYERS, last + 1):
        before = step(MTP_LAYERS - 1, place, before[-1:])
    logits: torch.Tensor = made._project_to_logits(before[-1:])[0]
    return logits


def check(source: LayerHeadSource, theirs: MtpModel, text: Sequence[int], base: int, known: int) -> None:
    """All nodes of a tree of five levels below a text whose rows are known in [base, known)."""
    ranker, head = source.ranker, source.head
    assert isinstance(ranker, Noting)
    ranker.seen.clear()
    search = Search(tuple(text), 5, Sampling(), TokenTree(text[-1], 200, 5, 0.0))
    search.tree.frontier(1)
    assert source.begin(search)
    while nodes := search.tree.frontier(7):
        source.expand(search, nodes)
    tree, levels = search.tree, set[int]()
    assert len(ranker.seen) > 30
    for node, logits in ranker.seen.items():
        path, at = list[int](), node
        while at != TokenTree.ROOT:
            path, at = [tree.tokens[at], *path], cast("int", tree.parents[at])
        levels.add(len(path))
        wanted = reference(theirs, [*text[base:], *path], head.normed(ROWS[base:known]))
        assert (logits - wanted).abs().max() < 1e-5, (known, path)
    assert levels == set(range(5))


@pytest.mark.parametrize(("folder", "catch_up"), [("deepseek_v3", 256), ("glm4_moe", 3)], indirect=["folder"])
@torch.inference_mode()
def test_every_level_is_drafted_by_its_own_layer(
    catch_up: int, folder: Path, theirs: MtpModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of texts that go on, are ahead of their rows, change, have few rows, or are caught up with in parts."""
    monkeypatch.setattr(client.draft.sources.layer_head, "CATCH_UP_ROWS", catch_up)
    head: LayerHead = load_mtp(folder, None, CPU, torch.float32)
    assert len(head.layers) == MTP_LAYERS
    embeddings = {id(cast("Any", layer.model.model).get_input_embeddings().weight) for layer in head.layers}
    assert len(embeddings) == 1, "one for all layers"
    source = LayerHeadSource(head, Noting((5, 9)))
    source.observe(TEXT[:3], ROWS[2:3])
    check(source, theirs, TEXT[:4], 2, 3)
    source.observe(TEXT[:4], ROWS[3:4])
    check(source, theirs, TEXT[:5], 2, 4)
    source.observe(TEXT[:12], ROWS[4:12])
    check(source, theirs, TEXT[:13], 2, 12)
    check(source, theirs, TEXT[:13], 2, 12)
    check(source, theirs, TEXT[:15], 2, 12)
    source.observe(TEXT[:13], ROWS[12:13])
    check(source, theirs, TEXT[:14], 2, 13)
    other = [*TEXT[:7], 77, 78, 79]
    check(source, theirs, other[:8], 2, 7)
    source.observe(other[:9], ROWS[7:9])
    check(source, theirs, other, 2, 9)
    source.observe(TEXT[:20], ROWS[:20])
    check(source, theirs, TEXT[:21], 0, 20)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=5, temperature=1.0)], ids=["greedy", "sampled"])
def test_the_text_is_the_plain_one_and_guesses_are_right(sampling: Sampling, tmp_path: Path) -> None:
    folder = publish("deepseek_v3", tmp_path, is_able=True, mtp_layers=MTP_LAYERS)
    target = load_whole(folder, torch.float32)
    plain = generate(target, NoDrafter(), TEXT, sampling, Size(24, 0))
    drafter = load_drafter(folder, load_target(folder), DraftOptions(("mtp",), "cpu", lookup=False, siblings=False))
    assert isinstance(drafter.drafter, TreeDrafter)
    run = generate(target, drafter.drafter, TEXT, sampling, Size(24, 16))
    assert run.tokens == plain.tokens
    assert run.emitted / run.sweeps > 2


def test_several_layers_are_found_in_both_layouts() -> None:
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mlp.up_proj")
    behind = [f"model.layers.{4 + number}.{name}.weight" for number in range(2) for name in own]
    second = find_mtp(behind, 4, 1)
    assert second is not None
    assert second.layer == {"mlp.up_proj.weight": "model.layers.5.mlp.up_proj.weight"}
    assert second.roles["token_norm"] == "model.layers.5.enorm.weight"
    assert find_mtp(behind, 4, 2) is None
    shared = [f"mtp.{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    beside = [*shared, *(f"mtp.layers.{number}.mlp.up_proj.weight" for number in range(2))]
    second = find_mtp(beside, 4, 1)
    assert second is not None
    assert second.layer == {"mlp.up_proj.weight": "mtp.layers.1.mlp.up_proj.weight"}
    assert second.roles["proj"] == "mtp.fc.weight"
    assert find_mtp(beside, 4, 2) is None
