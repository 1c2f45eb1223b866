"""Spans and sub-ranges of spans: what they compute, what they hold, what they refuse."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

import node.model.family_check
import node.model.span
import swarm.compute.ragged_batch
import swarm.compute.tree_attention
from node.model.checkpoint import open_checkpoint
from node.model.family_check import check_conformance
from node.model.span import SpanModel, dissect, load_span
from node.session.measure import TREE_NODES, WARM_UP_NODES, measure_sweeps, uncounted_ms, warm_up
from swarm.base.errors import LayersError, UnknownModel, UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.layers.pass_through import PassThroughLayer
from swarm.compute.ragged_batch import SessionRows, load_whole
from swarm.compute.tree_attention import AttentionReach
from swarm.demo import PASSAGES, TARGET
from swarm.files.families import TESTED, causal_lm_class, max_positions
from tests.model.tiny_models import SPANS, chain, load_alone, reference, run_chain, save_sharded, tiny_model

WHOLE = Span(0, 12)


@pytest.fixture(scope="module")
def demo() -> SpanModel:
    return load_span(open_checkpoint(TARGET), WHOLE, torch.float32)


@pytest.fixture(scope="module")
def hugging_face() -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    return model


def make_config(family: str, **values: object) -> PreTrainedConfig:
    config: PreTrainedConfig = cast("Any", CONFIG_MAPPING[family])(**values)
    return config


def passage(line: int, tokens: int) -> torch.Tensor:
    text = json.loads(PASSAGES.read_text().splitlines()[line])["text"]
    return torch.tensor(AutoTokenizer.from_pretrained(TARGET)(text).input_ids[:tokens])


def random_tree(size: int, tip: int, rng: random.Random) -> tuple[list[int | None], list[int]]:
    """Parents by offset and positions of a random tree below a tip at position `tip`."""
    parents: list[int | None] = []
    positions: list[int] = []
    for offset in range(size):
        parent = rng.choice([None, *range(offset)])
        parents.append(parent)
        positions.append(tip + 1 if parent is None else positions[parent] + 1)
    return parents, positions


def path_to(parents: list[int | None], offset: int) -> list[int]:
    path = [offset]
    while (parent := parents[path[0]]) is not None:
        path.insert(0, parent)
    return path


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 2e-5)])
def test_a_tree_nodes_logits_are_those_of_its_path_run_alone(dtype: torch.dtype, tolerance: float) -> None:
    """Logits reach 20 here, and float32 rounds: Hugging Face's own differ by 1.5e-5 between a text and its prefix."""
    model = load_whole(TARGET, dtype)
    alone = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=dtype)
    prompt, rng = passage(0, 48), random.Random(1)
    kv_cache = KvCache(model.layout, 128)
    prefill = chain(kv_cache, prompt)
    model.forward([prefill])
    kv_cache.commit(prefill.node_ids, [])
    parents, positions = random_tree(24, len(prompt) - 1, rng)
    tokens = torch.tensor([rng.randrange(3, 4_000) for _ in parents])
    first = len(prompt)
    nodes = [TreeNodeId(first + offset) for offset in range(len(parents))]
    above = [None if parent is None else nodes[parent] for parent in parents]
    logits = model.logits(model.forward([SessionRows(kv_cache, nodes, above, positions, tokens)]))
    for offset, got in enumerate(logits):
        text = torch.cat([prompt, tokens[path_to(parents, offset)]])
        assert (got - reference(alone, text)[-1]).abs().max() <= tolerance


@pytest.mark.parametrize("cuts", [(0, 12), (0, 1, 12), (0, 4, 8, 12), (0, 5, 6, 11, 12)])
def test_sub_ranges_of_one_span_make_the_whole(
    demo: SpanModel, hugging_face: PreTrainedModel, cuts: tuple[int, ...]
) -> None:
    ids = passage(1, 24)
    rows: torch.Tensor | None = None
    for start, end in itertools.pairwise(cuts):
        sub = Span(start, end)
        kv_cache = KvCache(demo.layout.within(sub), len(ids))
        assert [layer.index for layer in kv_cache.layout.layers] == list(range(start, end))
        work = chain(kv_cache, ids)
        rows = demo.forward([SessionRows(kv_cache, work.node_ids, work.parents, work.positions, ids, rows)], sub)
    assert rows is not None
    assert (demo.logits(rows) - reference(hugging_face, ids)).abs().max() <= 2e-5


def test_a_sub_range_runs_only_its_own_layers(demo: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    attend = swarm.compute.tree_attention.attend

    def recording(module: torch.nn.Module, *args: torch.Tensor, **options: object) -> tuple[torch.Tensor, None]:
        ran.append(cast("Any", module).layer_idx)
        output, _ = cast("Any", attend)(module, *args, **options)
        return output, None

    monkeypatch.setitem(cast("Any", AttentionInterface)._global_mapping, "canopy", recording)
    sub = Span(3, 6)
    kv_cache = KvCache(demo.layout.within(sub), 4)
    demo.forward([SessionRows(kv_cache, [TreeNodeId(0)], [None], [0], rows=torch.zeros(1, demo.hidden_size))], sub)
    assert ran == [3, 4, 5]
    demo.logits(torch.zeros(2, demo.hidden_size))
    assert ran == [3, 4, 5], "the head runs no layer"


def test_a_forward_sees_only_new_nodes(demo: SpanModel) -> None:
    forwards, rows_in = demo.forwards, demo.rows_in
    kv_cache = KvCache(demo.layout, 64)
    demo.forward([chain(kv_cache, torch.arange(30))])
    hidden = demo.forward([chain(kv_cache, torch.arange(3), first=30)])
    assert hidden.shape == (3, demo.hidden_size)
    assert (demo.forwards - forwards, demo.rows_in - rows_in) == (2, 33)


def test_only_the_first_chunk_of_a_prefill_is_a_plain_triangle(
    demo: SpanModel, hugging_face: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal: list[bool] = []
    is_causal = swarm.compute.tree_attention.SessionRange.is_causal

    def recording(part: swarm.compute.tree_attention.SessionRange, reach: AttentionReach) -> bool:
        causal.append(is_causal(part, reach))
        return causal[-1]

    monkeypatch.setattr(swarm.compute.tree_attention.SessionRange, "is_causal", recording)
    ids, kv_cache = passage(3, 44), KvCache(demo.layout, 44)
    first, second = chain(kv_cache, ids[:22]), chain(kv_cache, ids[22:], first=22)
    rows = demo.forward([first])
    kv_cache.commit(first.node_ids, [])
    rows = torch.cat([rows, demo.forward([replace(second, positions=range(22, 44))])])
    assert causal == [True] * 12 + [False] * 12
    assert (demo.logits(rows) - reference(hugging_face, ids)).abs().max() <= 2e-5


def test_the_head_runs_in_bounded_chunks_with_the_same_result(demo: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(7, demo.hidden_size, generator=torch.Generator().manual_seed(0))
    at_once = demo.logits(rows)
    assert at_once.shape == (7, demo.vocab_size)
    assert at_once.dtype == torch.float32
    sizes: list[int] = []
    hook = demo.model.register_forward_hook(lambda _model, _inputs, output: sizes.append(output.logits.shape[1]))
    monkeypatch.setattr(swarm.compute.ragged_batch, "MAX_LOGITS_BYTES", 3 * 4 * demo.vocab_size)
    in_pieces = demo.logits(rows)
    hook.remove()
    assert sizes == [3, 3, 1]
    assert (in_pieces - at_once).abs().max() <= 1e-5


def test_works_of_one_forward_may_belong_to_one_session(demo: SpanModel) -> None:
    ids = passage(2, 20)
    together, apart = KvCache(demo.layout, 20), KvCache(demo.layout, 20)
    whole = demo.logits(demo.forward([chain(together, ids)]))
    nodes = [TreeNodeId(node) for node in range(20)]
    first = SessionRows(apart, nodes[:8], [None, *nodes[:7]], range(8), ids[:8])
    second = SessionRows(apart, nodes[8:], nodes[7:19], range(8, 20), ids[8:])
    assert (demo.logits(demo.forward([first, second])) - whole).abs().max() <= 2e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_bfloat16_spans_stay_near_the_whole(family: str, tmp_path: Path) -> None:
    whole = tiny_model(family)
    save_sharded(whole, tmp_path / "whole")
    models = [load_alone(tmp_path / "whole", span, tmp_path / str(span), torch.bfloat16) for span in SPANS]
    assert {(model.dtype, model.layout.dtype) for model in models} == {(torch.bfloat16, torch.bfloat16)}
    assert models[0].numeric_class == "cpu-bfloat16"
    ids = torch.arange(3, 19)
    kv_caches = [[KvCache(model.layout, 32)] for model in models]
    logits = models[-1].logits(run_chain(models, kv_caches, [chain(kv_caches[0][0], ids)]))
    assert logits.dtype == torch.float32
    assert (logits - reference(whole, ids)).abs().max() <= 0.1


def test_layers_outside_a_span_hold_nothing(demo: SpanModel) -> None:
    middle = load_span(open_checkpoint(TARGET), Span(4, 8), torch.float32)
    layout = dissect(open_checkpoint(TARGET).config)
    held = {name.rpartition(".layers.")[2].partition(".")[0] for name, _ in middle.model.named_parameters()}
    assert held == {"4", "5", "6", "7"}
    assert middle.weight_bytes == 4 * layout.weights_in(Span(4, 8)) < demo.weight_bytes / 2
    assert isinstance(cast("Any", middle.model).model.layers[3], PassThroughLayer)


def test_a_span_beyond_the_model_is_refused() -> None:
    with pytest.raises(LayersError, match="the model has 12 layers"):
        load_span(open_checkpoint(TARGET), Span(8, 13), torch.float32)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("recurrent_gemma", {}, "states by a way of its own"),
        ("zamba2", {}, "share weights"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "quantised .hqq.*in one of these: fp8"),
        ("t5", {}, "encoder|no causal language model"),
        ("musicgen", {}, "several text models"),
        ("llama", {"is_causal": False}, "see those that follow"),
        ("gemma", {"use_bidirectional_attention": True}, "see those that follow"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "see those that follow"),
        ("bert", {}, "see those that follow"),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(family: str, changes: dict[str, Any], reason: str) -> None:
    config = make_config(family, **changes)
    with pytest.raises(UnsupportedModel, match=f"^{family}: .*({reason})"):
        causal_lm_class(config)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("xmod", "it cannot be cut into spans: its class fails where layers are left out"),
        ("cpmant", "it cannot be cut into spans: its class takes the ids of tokens alone, so hidden rows"),
        ("xlm", "it cannot be cut into spans: its class runs each layer as parts of several lists"),
        ("longcat_flash", "its layers attend several times for a token: 4 sets of keys and values belong to 2 layers"),
        ("gemma4_unified_assistant", "it drafts for a larger model, whose keys and values it reads"),
    ],
)
def test_a_model_that_cannot_be_taken_apart_is_refused_in_one_line(family: str, reason: str) -> None:
    sizes = {"num_layers": 2} if family == "longcat_flash" else {"num_hidden_layers": 2, "is_decoder": True}
    config = make_config(family) if family.endswith("assistant") else make_config(family, **sizes)
    with pytest.raises(UnsupportedModel, match=f"^[a-z0-9_]+: {reason}.*; choose another model$") as caught:
        dissect(config)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_does_not_fit_its_class_is_refused(tmp_path: Path) -> None:
    save_sharded(tiny_model("llama"), tmp_path / "whole")
    index = tmp_path / "whole" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=r"llama: .* 1 missing keys, such as model\.layers\.1\.mlp"):
        load_span(open_checkpoint(tmp_path / "whole"), Span(0, 2), torch.float32)


@pytest.fixture
def self_tests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Families that took the self-test."""
    taken: list[str] = []
    error = node.model.family_check.conformance_error

    def recording(config: PreTrainedConfig, load: node.model.family_check.Load) -> float:
        taken.append(config.model_type)
        return error(config, load)

    monkeypatch.setattr(node.model.family_check, "conformance_error", recording)
    return taken


@pytest.mark.parametrize("family", ["starcoder2", "smollm3", "olmo3"])
def test_an_untested_family_proves_itself_when_it_is_loaded(family: str, tmp_path: Path, self_tests: list[str]) -> None:
    assert family not in TESTED
    save_sharded(tiny_model(family), tmp_path / "whole")
    load_span(open_checkpoint(tmp_path / "whole"), Span(2, 4), torch.float32)
    assert self_tests == [family]


def test_a_tested_family_needs_no_proof(tmp_path: Path, self_tests: list[str]) -> None:
    save_sharded(tiny_model("llama"), tmp_path / "whole")
    load_span(open_checkpoint(tmp_path / "whole"), Span(2, 4), torch.float32)
    assert self_tests == []


def test_an_untested_family_that_comes_out_different_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its window were forgotten."""
    monkeypatch.setattr(
        swarm.compute.tree_attention.SessionRange, "mask", lambda part, _window, like: part.visible.to(like.device)
    )
    with pytest.raises(UnsupportedModel, match=r"starcoder2: not a tested family, and its self-test is .* off"):
        check_conformance(make_config("starcoder2", sliding_window=4096), node.model.span.load_tested)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"num_hidden_layers": 4}),
        ("gemma4_text", {"num_hidden_layers": 12, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    ],
)
def test_the_self_test_takes_models_of_fewer_and_of_more_layers(family: str, changes: dict[str, Any]) -> None:
    check_conformance(make_config(family, **changes), node.model.span.load_tested)


def test_the_self_test_has_a_layer_of_every_kind() -> None:
    """A kind that begins late: its window is in the mask of the whole, but the layer itself does not know it."""
    late = {"layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 2, "use_sliding_window": True}
    with pytest.raises(UnsupportedModel, match=r"qwen2_moe: not a tested family, and its self-test is .* off"):
        check_conformance(
            make_config("qwen2_moe", num_hidden_layers=8, sliding_window=4096, **late), node.model.span.load_tested
        )


def test_an_untested_family_is_compared_with_decoding_by_a_cache_too() -> None:
    """Moshi's own cache keeps a window of keys, of which its forward of a whole text knows nothing."""
    with pytest.raises(UnsupportedModel, match="moshi: its class decodes other logits by its cache than"):
        check_conformance(make_config("moshi"), node.model.span.load_tested)


def test_an_untested_family_that_does_not_run_is_refused() -> None:
    def fails(*_: object) -> SpanModel:
        raise RuntimeError("no such operation\nand more")

    with pytest.raises(UnsupportedModel, match="git: its class knows no attention but kinds of its own; choose"):
        check_conformance(make_config("git", num_hidden_layers=2), node.model.span.load_tested)
    said = r"starcoder2: not a tested family, and does not run in spans \(no such operation\); choose another model"
    with pytest.raises(UnsupportedModel, match=said):
        check_conformance(make_config("starcoder2"), fails)


def test_the_self_test_leaves_the_programs_randomness_alone() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    check_conformance(make_config("starcoder2"), node.model.span.load_tested)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_rotary_embeddings_that_grow_with_the_batch_end_at_their_first_window() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 2048}
    assert max_positions(make_config("llama", max_position_embeddings=4096, rope_parameters=rope)) == 2048
    assert max_positions(make_config("llama", max_position_embeddings=4096)) == 4096
    kinds = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    for kind in ("dynamic", "longrope"):
        kinds["full_attention"] = rope | {"rope_type": kind} | dict.fromkeys(("short_factor", "long_factor"), [1.0] * 8)
        config = make_config("gemma3_text", head_dim=16, max_position_embeddings=4096, rope_parameters=kinds)
        assert max_positions(config) == 2048


def test_a_folder_that_is_no_model_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no config\.json that transformers knows"):
        load_whole(tmp_path, torch.float32)


@pytest.mark.parametrize("slow", [range(6), range(3, 9), range(12, 18)])
def test_a_bad_moment_while_a_machine_measures_itself_makes_no_size_alone_slow(demo: SpanModel, slow: range) -> None:
    """One that made a single row seem slow had rows cost nothing, and clients sent hundreds of them."""
    usual, now_ms, rows = {1: 4.0, 8: 5.0, 64: 12.0}, [0.0], list[int]()

    class Timed:
        """The span, which takes as long as is said here."""

        layout, span, num_layers = demo.layout, demo.span, demo.num_layers
        hidden_size, dtype, device, static = demo.hidden_size, demo.dtype, demo.device, None

        def forward(self, work: list[SessionRows], sub: Span | None) -> torch.Tensor:
            now_ms[0] += usual[len(work[0].node_ids)] * (10 if len(rows) in slow else 1)
            rows.append(len(work[0].node_ids))
            return torch.zeros(rows[-1], 1)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    measured = measure_sweeps(cast("SpanModel", Timed()), lambda: now_ms[0] / 1e3)
    assert dict(measured) == pytest.approx(usual)
    assert {rows.count(size) for size in usual} == {6}


@pytest.mark.parametrize("span", SPANS)
def test_a_card_sees_trees_of_many_sizes_below_a_token_before_it_is_measured(
    span: Span, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_span(open_checkpoint(save_sharded(tiny_model("gemma2"), tmp_path)), span, torch.float32)
    seen: list[tuple[int, int]] = []
    forward = model.forward

    def noted(works: list[SessionRows], sub: Span | None = None) -> torch.Tensor:
        made = forward(works, sub)
        seen.append((len(works[0].node_ids), works[0].kv_cache.slots.used))
        return made

    monkeypatch.setattr(model, "forward", noted)
    warm_up(model)
    assert seen == [(1, 1), *((nodes, 1 + nodes) for nodes in WARM_UP_NODES)]
    monkeypatch.setattr("node.session.measure.warm_up", lambda _: seen.clear())
    measure_sweeps(model)
    assert seen, "a CPU has nothing to load"
    monkeypatch.setattr("node.session.measure.forward_ms", lambda *_: 1.0)
    measured = measure_sweeps(cast("SpanModel", SimpleNamespace(device=torch.device("cuda"), static=None)))
    assert not seen
    assert measured == tuple((nodes, 1.0) for nodes in TREE_NODES)


def test_a_larger_sweep_is_never_said_to_be_quicker(demo: SpanModel) -> None:
    measured = [ms for _, ms in measure_sweeps(demo)]
    assert 0 < measured[0] <= measured[1] <= measured[2]


def test_a_forward_that_is_only_measured_is_nobodys_work(demo: SpanModel) -> None:
    measure_sweeps(demo)
    counted = demo.forwards, demo.rows_in
    assert uncounted_ms(demo, 8) > 0
    assert (demo.forwards, demo.rows_in) == counted != (0, 0)
