"""The benchmark before joining: synthetic layers of the model's shape, in bounded time."""

from __future__ import annotations

import itertools

import pytest
import torch

import node.session.measure
from node.model.span import dissect, synthetic_span
from node.session.measure import ROUNDS, TREE_NODES, benchmark
from swarm.base.layers import Span
from swarm.compute.weights.format import WeightFormat
from swarm.demo import TARGET
from swarm.files.model_config import read_config
from tests.model.tiny_models import FAMILIES, OTHER_KINDS, tiny_config

CPU = torch.device("cpu")
LAYOUT = dissect(read_config(TARGET, "demo"))


def test_layers_of_the_right_shape_are_measured() -> None:
    speed = benchmark(LAYOUT, WeightFormat(torch.float32), CPU)
    assert speed.is_measured
    assert speed.how == "measured on 2 synthetic layers"
    assert sorted(speed.layer_ms) == list(TREE_NODES)
    assert all(ms > 0 for ms in speed.layer_ms.values())
    few, many = (dict(speed.sweep_ms(layers)) for layers in (1, 12))
    assert many[1] > few[1] >= speed.base_ms


def test_synthetic_weights_have_the_layers_sizes() -> None:
    model = synthetic_span(LAYOUT, Span(5, 7), torch.float32)
    assert model.weight_bytes == 4 * sum(LAYOUT.weights[f"{LAYOUT.layers}.{index}"] for index in (5, 6))


def test_the_time_is_bounded_on_a_machine_that_takes_a_second_for_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = itertools.count()
    seconds = itertools.count()

    def slow(*_: object) -> float:
        next(ran)
        return 1_000.0

    monkeypatch.setattr(node.session.measure, "forward_ms", slow)
    speed = benchmark(LAYOUT, WeightFormat(torch.float32), CPU, clock=lambda: float(next(seconds)))
    assert next(ran) == 1 + 1 + len(TREE_NODES), "once to wake up, then each size once"
    assert speed.layer_ms[1] > 0
    assert ROUNDS > 1


def test_layers_that_are_too_large_to_make_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.measure, "MAX_BYTES", 1_000)
    monkeypatch.setattr(node.session.measure, "MATRIX_BYTES", 4 << 20)
    speed = benchmark(LAYOUT, WeightFormat(torch.float32), CPU)
    assert not speed.is_measured
    assert "estimated" in speed.how
    assert all(ms > 0 for ms in speed.layer_ms.values())


@pytest.mark.crossing(part=(0, 4))
@pytest.mark.parametrize("family", sorted(FAMILIES | OTHER_KINDS))
def test_layers_of_every_tested_family_can_be_made(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.measure, "BUDGET_S", 0.0)
    assert benchmark(dissect(tiny_config(family)), WeightFormat(torch.float32), CPU).is_measured
