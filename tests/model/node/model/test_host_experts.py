"""`--experts cpu`: experts stay in host memory and are computed there, and nothing of a text changes by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.model.checkpoint import open_checkpoint
from node.model.config import ServeConfig, Weights
from node.model.loading import AUTO_SHARE, fitting_layers, format_of, load
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect
from swarm.base.errors import ConfigError, NotEnoughSpace
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.fast_path import use_static
from swarm.compute.kv_cache import KvCache
from swarm.compute.packed_layers import keep_experts_on_host
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.weights.experts import PackedExperts, is_experts
from tests.devices import DEVICE
from tests.model.quantised_models import mxfp4, save_quantised
from tests.model.tiny_models import save_sharded, tiny_model

CPU = torch.device("cpu")
PROMPT = [5, 9, 77, 31, 8, 12]
NEW = 12
FEW = {"num_hidden_layers": 2}


def served(folder: Path, *, weights: Weights = "auto", experts: bool, said: list[str] | None = None) -> SpanModel:
    where = {"device": DEVICE, "dtype": "float32", "weights": weights, "experts": "cpu" if experts else "device"}
    said = [] if said is None else said
    model = load(open_checkpoint(folder), ServeConfig(layers="0-2", **where), said.append)  # type: ignore[arg-type]
    assert model.has_host_experts is experts
    return model


def text_of(model: SpanModel) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the last logits."""
    kv_cache, tokens, new = KvCache(model.layout, 64), list(PROMPT), list(PROMPT)
    logits = torch.empty(0)
    while len(tokens) < len(PROMPT) + NEW:
        start = kv_cache.slots.committed
        nodes = [TreeNodeId(start + offset) for offset in range(len(new))]
        positions = range(start, start + len(new))
        rows = model.forward([SessionRows(kv_cache, nodes, [None, *nodes[:-1]], positions, torch.tensor(new))])
        logits = model.logits(rows[-1:]).cpu()
        kv_cache.commit(nodes, [])
        new = [int(logits.argmax())]
        tokens += new
    return tokens, logits


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_a_text_is_the_same_with_experts_in_host_memory(family: str, weights: Weights, tmp_path: Path) -> None:
    folder = save_sharded(tiny_model(family, changes=FEW), tmp_path / "model")
    tokens, logits = text_of(served(folder, weights=weights, experts=False))
    said: list[str] = []
    apart, own = text_of(served(folder, weights=weights, experts=True, said=said))
    assert apart == tokens
    assert (own - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert any("of experts stay in host memory" in line for line in said)


def test_published_experts_stay_as_they_are(tmp_path: Path) -> None:
    folder = save_quantised(tiny_model("gpt_oss", changes=FEW), mxfp4(), tmp_path / "model").folder
    assert text_of(served(folder, experts=True))[0] == text_of(served(folder, experts=False))[0]
    assert served(folder, experts=True).numeric_class.endswith("+mxfp4")


def test_what_moves_a_layer_leaves_its_experts() -> None:
    layer = tiny_model("mixtral", changes=FEW).get_submodule("model.layers.0")
    keep_experts_on_host(layer, 0)
    layer.to("meta")
    where = {name: part.device.type for name, part in layer.named_parameters()}
    assert {name for name, kind in where.items() if kind == "cpu"} == {name for name in where if ".experts." in name}
    assert set(where.values()) == {"cpu", "meta"}
    assert any(isinstance(part, PackedExperts) for part in layer.modules())
    assert sum(is_experts(part) for part in layer.modules()) == 1


def test_such_a_span_runs_no_graph_and_says_why(tmp_path: Path) -> None:
    model = served(save_sharded(tiny_model("mixtral", changes=FEW), tmp_path / "model"), experts=True)
    use_static(model, 32, forced=True)
    assert model.path == "plain"
    assert "computed by the CPU" in model.path_reason


def test_a_card_holds_more_layers_and_the_host_has_to_have_room(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_sharded(tiny_model("mixtral", changes=FEW), tmp_path / "model"))
    layout, span = dissect(checkpoint.config), Span(0, 2)
    whole = replace(format_of(checkpoint, layout, "auto", torch.float32, CPU), on_cpu=False)
    apart = replace(whole, host_experts=True)
    own = layout.expert_bytes(span, apart)
    assert layout.bytes_in(span, whole) == layout.bytes_in(span, apart) + own
    model = load_packed(checkpoint, span, apart, CPU)
    held = [part for part in model.model.modules() if isinstance(part, PackedExperts)]
    assert own == sum(one.numel() * one.itemsize for part in held for one in part.parameters())
    room = int((layout.bytes_in(span, apart) + 40_000) / AUTO_SHARE)
    assert fitting_layers(layout, apart, room, kv_tokens=8, host_bytes=int(own / AUTO_SHARE) + 1) == 2
    assert fitting_layers(layout, apart, room, kv_tokens=8, host_bytes=int(own / 2 / AUTO_SHARE) + 1) == 1
    with pytest.raises(NotEnoughSpace, match=r"the experts of one layer take .* of host memory"):
        fitting_layers(layout, apart, room, kv_tokens=8, host_bytes=1)
    with pytest.raises(NotEnoughSpace, match="--experts cpu leaves a mixture's experts in host memory"):
        fitting_layers(layout, whole, 1)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        ServeConfig(layers="0-2", offload=True, experts="cpu").check()
    folder = save_sharded(tiny_model("llama", changes=FEW), tmp_path / "model")
    with pytest.raises(ConfigError, match="no experts that can be computed apart"):
        served(folder, experts=True)
