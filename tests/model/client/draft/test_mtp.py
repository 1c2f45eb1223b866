"""MTP layers as they are published: transformers' own numbers, whatever tree and text; texts stay the plain ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import client.draft.heads.mtp
import client.draft.sources.layer_head
from benchmarks.simulation.acceptance import Size, generate
from client.base.options import DraftOptions
from client.base.target import load_target
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.heads.mtp import MtpHead, find_mtp, has_mtp, load_mtp
from client.draft.loading import load_drafter
from client.draft.search.source import Search
from client.draft.search.tree import TokenTree
from client.draft.sources.layer_head import LayerHeadSource
from swarm.base.errors import UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows, load_whole
from swarm.files.hub import find_model
from swarm.protocol.messages import Sampling
from tests.fake_hub import MODEL, FakeHub, Repo
from tests.model.client.draft.noting_ranker import Noting
from tests.model.published_mtp import LAYERS, PUBLISHED, WIDTH, publish

CPU = torch.device("cpu")
IDS = torch.randint(3, 128, (14,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - a cached function
    return cache(lambda family: publish(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def head(published: Any) -> MtpHead:  # noqa: ANN401
    return load_mtp(published("glm4_moe"), None, CPU, torch.float32)


def theirs(folder: Path) -> tuple[PreTrainedModel, MtpModel]:
    """The model and its MTP layer in transformers, which knows the published sizes' names alone."""
    model = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [rf"layers\.{LAYERS}\.", "^mtp"]
    if getattr(model.config, "num_mtp_layers", None) is None:
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    layer: Any = MtpModel.from_pretrained(model)
    return model.eval(), layer.eval()


@pytest.mark.parametrize("family", PUBLISHED)
@torch.no_grad()
def test_it_computes_what_transformers_computes(family: str, published: Any) -> None:  # noqa: ANN401
    folder = published(family)
    model, layer = theirs(folder)
    captured: list[torch.Tensor] = []
    hook = cast("Any", model).model.layers[-1].register_forward_hook(lambda *given: captured.append(given[2]))
    normed = cast("Any", model).model(IDS[None], use_cache=False).last_hidden_state
    hook.remove()
    cache_of = MtpCache(config=model.config.get_mtp_config())
    positions = torch.arange(1, len(IDS))[None]
    rows = layer.forward_layer(0, normed[:, :-1], positions, cache_of, input_ids=IDS[None, 1:])
    wanted = layer._project_to_logits(rows)[0]
    head = load_mtp(folder, None, CPU, torch.float32)
    count = len(IDS) - 1
    nodes = [TreeNodeId(node) for node in range(count)]
    work = SessionRows(KvCache(head.model.layout, 32), nodes, [None, *nodes[:-1]], range(count))
    logits, own = head.run(work, IDS[1:], head.normed(captured[0][0, :-1]), count)
    assert (logits - wanted).abs().max() < 1e-5
    assert (own - rows[0]).abs().max() < 1e-5


@torch.inference_mode()
def alone(head: MtpHead, tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Logits after a text of which the first rows are the target's: one node after the other, nothing kept before."""
    cache_of, row, logits = KvCache(head.model.layout, 64), head.normed(rows[:1]), torch.empty(0)
    for place, token in enumerate(tokens[1:]):
        given = head.normed(rows[place : place + 1]) if place < len(rows) else row
        parent = None if place == 0 else TreeNodeId(place - 1)
        work = SessionRows(cache_of, [TreeNodeId(place)], [parent], [place])
        logits, row = head.run(work, torch.tensor([token]), given, 1)
    return logits[0]


ROWS = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(3))


def search_of(text: Sequence[int]) -> Search:
    return Search(tuple(text), 4, Sampling(), TokenTree(text[-1], 64, 4, 0.0))


@torch.inference_mode()
def test_every_node_sees_the_text_and_its_own_branch(head: MtpHead) -> None:
    """Also where the text is ahead of its rows, where it changes, where a row is missing, and where rows come late."""
    text = [int(token) for token in IDS]
    ranker = Noting((5, 9))
    source = LayerHeadSource(head, ranker)

    def check(text: Sequence[int], base: int, known: int) -> None:
        search = search_of(text)
        search.tree.frontier(1)
        assert source.begin(search)
        for _ in range(2):
            source.expand(search, list(search.tree.frontier(8)))
        paths: dict[int | None, list[int]] = {TokenTree.ROOT: []}
        assert len(ranker.seen) > 4
        for node, logits in sorted(ranker.seen.items(), key=lambda item: search.tree.depths[item[0]]):
            if node != TokenTree.ROOT:
                paths[node] = [*paths[search.tree.parents[node]], search.tree.tokens[node]]
            wanted = alone(head, [*text[base:], *paths[node]], ROWS[base:known])
            assert (logits - wanted).abs().max() < 1e-5
        ranker.seen.clear()

    source.observe(text[:3], ROWS[2:3])
    check(text[:4], 2, 3)
    source.observe(text[:6], ROWS[3:6])
    source.observe(text[:6], ROWS[3:6])
    check(text[:7], 2, 6)
    check(text[:9], 2, 6)
    source.observe(text[:8], ROWS[4:8])
    check(text[:9], 2, 8)
    other = [*text[:5], 77, 78, 79]
    check(other, 2, 5)
    source.observe(other[:7], ROWS[5:7])
    check(other[:8], 2, 7)
    source.observe(other[:3], ROWS[2:3])
    check(other[:4], 2, 3)
    source.observe(other[:5], ROWS[3:5])
    check(other[:6], 2, 5)
    assert not source.begin(search_of([1, 2, *other])), "no row of this text came"
    source.observe(text[:6], ROWS[5:6])
    check(text[:7], 5, 6)
    source.observe(text[:12], ROWS[10:12])
    check(text[:13], 10, 12)
    source.forget()
    assert not source.begin(search_of(text))


@torch.inference_mode()
def test_of_a_long_text_the_newer_part_is_kept(head: MtpHead, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_WINDOW_TOKENS", "MAX_WINDOW_TOKENS"):
        monkeypatch.setattr(client.draft.sources.layer_head, name, 8)
    source, ranker = LayerHeadSource(head, Noting(())), Noting(())
    source.ranker = ranker
    text = [int(token) for token in IDS]
    for known in range(1, 13):
        source.observe(text[:known], ROWS[known - 1 : known])
        assert source.begin(search_of(text[: known + 1]))
    wanted = alone(head, text[source._base : 13], ROWS[source._base : 12])
    assert source._base >= 4
    assert (ranker.seen[TokenTree.ROOT] - wanted).abs().max() < 1e-5
    source.observe(text, ROWS[: len(text)])
    assert source._count <= 8, "more rows at once than there is room for"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=5, temperature=1.0)], ids=["greedy", "sampled"])
def test_the_text_is_the_plain_one_and_guesses_are_right(sampling: Sampling, tmp_path: Path) -> None:
    folder = publish("deepseek_v3", tmp_path, is_able=True)
    target, prompt = load_whole(folder, torch.float32), [int(token) for token in IDS]
    plain = generate(target, NoDrafter(), prompt, sampling, Size(24, 0))
    options = DraftOptions(("mtp",), "cpu", lookup=False, siblings=False)
    drafter = load_drafter(folder, load_target(folder), options).drafter
    assert isinstance(drafter, TreeDrafter)
    run = generate(target, drafter, prompt, sampling, Size(24, 16))
    assert run.tokens == plain.tokens
    assert run.emitted / run.sweeps > 2


def test_a_layer_that_is_there_is_named_and_one_that_is_not_is_refused(
    published: Any,  # noqa: ANN401
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = published("glm4_moe")
    load_drafter(folder, load_target(folder), DraftOptions())
    assert "--draft mtp drafts with it" in caplog.text
    assert not has_mtp("nobody/knows-it"), "and the hub is not asked"
    without = tmp_path / "without"
    publish("glm4_moe", without)
    index = json.loads((without / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if f".{LAYERS}." not in name}
    (without / "model.safetensors.index.json").write_text(json.dumps(index))
    caplog.clear()
    load_drafter(without, load_target(without), DraftOptions())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(UnsupportedModel, match="no layer for multi-token prediction"):
        load_drafter(without, load_target(without), DraftOptions(("mtp",), "cpu"))


def test_a_large_layer_takes_half_the_memory_on_a_cpu(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    monkeypatch.setattr(client.draft.heads.mtp, "MAX_FLOAT32_BYTES", 1)
    head = load_mtp(published("deepseek_v3"), None, CPU, torch.float32)
    assert head.model.dtype == torch.bfloat16
    ours = alone(head, [3, 4, 5], ROWS[:2])
    wanted = alone(load_mtp(published("deepseek_v3"), None, CPU, torch.bfloat16), [3, 4, 5], ROWS[:2])
    assert torch.equal(ours, wanted)


def test_from_the_hub_only_its_files_come(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[MODEL] = Repo.of(publish("deepseek_v3", tmp_path / "published"))
    load_mtp(MODEL, None, CPU, torch.float32)
    folder, _ = find_model(MODEL)
    assert {file.name for file in folder.glob("*.safetensors")} == {"ends.safetensors", "mtp.safetensors"}
    assert has_mtp(MODEL)


def test_weights_in_eight_bit_floats_are_expanded_by_their_scales(published: Any, tmp_path: Path) -> None:  # noqa: ANN401
    folder = publish("deepseek_v3", tmp_path)
    head = load_mtp(folder, None, CPU, torch.float32)
    tensors = load_file(folder / "mtp.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in [name for name in tensors if name.endswith("_proj.weight") and "eh_proj" not in name]:
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
        index["weight_map"][f"{name}_scale_inv"] = "mtp.safetensors"
    save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    plain = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(plain | {"quantization_config": quantised}))
    rounded = load_mtp(folder, None, CPU, torch.float32)
    ours, wanted = (alone(one, [3, 4, 5], ROWS[:2]) for one in (rounded, head))
    assert 0 < (ours - wanted).abs().max() < 0.1
    (folder / "config.json").write_text(json.dumps(plain))
    with pytest.raises(UnsupportedModel, match=r"_scale_inv is a part of a quantised weight, and config\.json has"):
        load_mtp(folder, None, CPU, torch.float32)


def test_only_a_whole_layer_is_found() -> None:
    names = [f"mtp.{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    found = find_mtp([*names, "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight"], 4)
    assert found is not None
    assert found.layer == {"mlp.up_proj.weight": "mtp.layers.0.mlp.up_proj.weight"}
    assert find_mtp(names, 4) is None
    assert find_mtp([*names[1:], "mtp.layers.0.mlp.up_proj.weight"], 4) is None
