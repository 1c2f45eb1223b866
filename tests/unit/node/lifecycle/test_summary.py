"""The six lines in which a node says what it does and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from node.config import ServeConfig
from node.engine.measure import LayerSpeed
from node.lifecycle.planning import ServingPlan
from node.lifecycle.summary import ServingSummary
from node.membership.joining import ClassChoice, LayerCount
from swarm.discovery.node_record import NodeRecord
from swarm.ids import PeerId
from swarm.inference.weights.format import WeightFormat
from swarm.layers import Span
from tests.sample_records import MODEL, sample_record

SPEED = LayerSpeed(2.0, {1: 2.0, 8: 3.0, 64: 9.0}, 0.84, "measured on 2 synthetic layers", is_measured=True)
PLAN = ServingPlan(
    order=ServeConfig(),
    layout=cast("Any", None),
    records=(),
    compute=(torch.device("cpu"), torch.float32, "auto"),
    kind=ClassChoice("cpu-float32", "its own choice, as nobody serves the model yet"),
    count=LayerCount(4, "as many as its memory holds"),
    form=WeightFormat(torch.float32),
    speed=SPEED,
)
FIRST = ServingSummary(MODEL, "swarm/demo/demo", (), PLAN, Span(0, 4), "at 192.0.2.7:31338, by its own port")


def held(start: int, end: int) -> NodeRecord:
    return sample_record(PeerId(f"p{start}"), span=Span(start, end))


def test_the_first_machine_says_what_it_begins() -> None:
    assert FIRST.lines() == [
        f"model: swarm/demo/demo (12 layers, fingerprint {MODEL.fingerprint[:12]}), as you asked",
        "swarm: nobody serves it yet; this machine begins a swarm",
        "layers: the swarm needs layers 0…3 of 12 most, for nobody holds them; 4: as many as its memory holds",
        "computes: on cpu in float32, its own choice, as nobody serves the model yet; KV for 8,192 tokens or more: "
        "50% of the memory that is free then, 262,144 at most",
        "reached: at 192.0.2.7:31338, by its own port",
        "gives: about 14.0 ms per sweep of 8, at most 100 tokens/s in plain decoding (measured on 2 synthetic layers "
        "in 0.8 s)",
    ]


def test_who_named_the_model_is_said() -> None:
    assert replace(FIRST, why="as the invite says").lines()[0].endswith("), as the invite says")


def test_a_later_one_says_what_the_swarm_lacks_and_what_stands_in_its_way() -> None:
    plan = replace(
        PLAN,
        order=ServeConfig(kv_tokens=4_096),
        records=(held(0, 4), held(8, 12)),
        kind=ClassChoice("cpu-float32", "its own choice", "no chain can use it yet"),
        speed=None,
    )
    lines = replace(FIRST, asked=None, join=("/ip4/…",), plan=plan, span=Span(4, 8)).lines()
    assert lines[0].startswith("model: demo (") and lines[0].endswith("), the one that this swarm serves")  # noqa: PT018
    assert lines[1] == "swarm: 2 nodes serve it already, and nobody holds layers 4…7"
    assert lines[2].startswith("layers: the swarm needs layers 4…7 of 12 most, for nobody holds them")
    assert lines[3].endswith("KV for 4,096 tokens, as you asked")
    assert lines[5] == "gives: what is measured once the layers are loaded"
    assert lines[6:] == ["note: no chain can use it yet"]


def test_layers_that_the_user_chose_are_not_explained() -> None:
    plan = replace(PLAN, order=ServeConfig(layers="0-4"), records=(held(0, 12),), speed=None)
    lines = replace(FIRST, plan=plan).lines()
    assert len(lines) == 6
    assert lines[1] == "swarm: 1 node serves it already, and every layer is held"
    assert lines[2] == "layers: layers 0…3 of 12, as you asked"
