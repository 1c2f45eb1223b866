"""What a machine that was told nothing decides from the swarm's records and from itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from node.life.joining import Joiner, choose_class, choose_count, joiners_choice, movers_choice, need_of
from swarm.base.errors import TooSlow
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState
from tests.sample_records import MODEL, sample_record

CPU, GPU = "cpu-float32", "cuda-bfloat16"
ABLE = [CPU, "cpu-bfloat16"]
FAST, PROMISED = "cpu-bfloat16-k1+gguf", "cpu-bfloat16-k2+gguf"


def machine(number: int, start: int, end: int, kind: str = CPU, **other: Any) -> NodeRecord:  # noqa: ANN401
    """A node whose sweep of 8 takes 2 ms a layer."""
    speeds = tuple((nodes, 2.0 * (end - start)) for nodes in (1, 8, 64))
    fields = {"span": Span(start, end), "numeric_class": kind, "sweep_ms": speeds} | other
    return sample_record(PeerId(f"p{number}"), **fields)


def twice(kind: str = CPU) -> list[NodeRecord]:
    """Every layer of twelve has two holders; a span takes 8 ms."""
    starts = (0, 4, 8, 0, 4, 8)
    return [machine(number, start, start + 4, kind) for number, start in enumerate(starts)]


@pytest.mark.parametrize(
    ("records", "able", "chosen", "why", "note"),
    [
        ([], ABLE, CPU, "its own choice, as nobody serves", ""),
        ([machine(0, 0, 12, "cpu-bfloat16")], ABLE, "cpu-bfloat16", "as 1 node of the swarm", ""),
        ([*twice("cpu-bfloat16"), machine(9, 0, 4)], ABLE, "cpu-bfloat16", "as 6 nodes of the swarm", ""),
        ([*twice(), machine(9, 0, 12, "cpu-bfloat16")], ABLE, CPU, "as 6 nodes of the swarm", ""),
        (
            [machine(0, 0, 12, "cpu-bfloat16"), machine(1, 0, 4), machine(2, 0, 4)],
            ABLE,
            "cpu-bfloat16",
            "as 1 node",
            "",
        ),
        (twice(GPU), ABLE, CPU, "it cannot compute in cuda-bfloat16", "no chain mixes it with cpu-float32"),
        ([*twice(GPU), machine(9, 0, 4)], ABLE, CPU, "as 1 node of the swarm", ""),
        (twice(GPU), ["cuda-float16", GPU, CPU], GPU, "as 6 nodes of the swarm", ""),
        (twice("cpu-bfloat16"), [CPU], CPU, "it cannot compute in cpu-bfloat16", "this machine cannot or may not"),
        ([*twice(PROMISED), machine(9, 0, 12, FAST)], [FAST, PROMISED], PROMISED, "as 6 nodes of the swarm", ""),
        ([*twice(FAST), machine(9, 0, 12, PROMISED)], [PROMISED, FAST], FAST, "as 6 nodes of the swarm", ""),
        ([*twice(FAST), *twice(PROMISED)], [PROMISED, FAST], PROMISED, "as 6 nodes of the swarm", ""),
        ([machine(0, 0, 12, GPU, state=NodeState.DRAINING)], ABLE, CPU, "its own choice, as nobody serves", ""),
    ],
)
def test_the_swarms_class_is_taken_where_the_machine_can_compute_it(
    records: Sequence[NodeRecord], able: Sequence[str], chosen: str, why: str, note: str
) -> None:
    found = choose_class(records, able)
    assert found.numeric_class == chosen
    assert why in found.why
    assert note in found.note
    assert bool(note) == bool(found.note)


def count(records: Sequence[NodeRecord], layer_ms: float | None, fits: int = 12) -> tuple[int, str]:
    speeds = None if layer_ms is None else {1: layer_ms, 8: layer_ms, 64: layer_ms}
    found = choose_count(records, CPU, 12, fits, speeds)
    return found.count, found.why


def test_layers_are_as_many_as_fit_and_keep_up_with_the_others() -> None:
    assert count(twice(), 1.0) == (12, "all of the model")
    assert count(twice(), 1.0, fits=5) == (5, "as many as its memory holds")
    assert count(twice(), 4.0) == (4, "its memory holds 12, but more would make it the slowest of the chain")
    assert count(twice(), 30.0)[0] == 1
    assert count(twice(), None) == (12, "all of the model")
    assert count([], 1e6) == (12, "all of the model")


def test_a_machine_that_would_slow_every_chain_down_is_told_so_and_what_would_help() -> None:
    with pytest.raises(TooSlow) as refused:
        count(twice(), 33.0)
    said = str(refused.value)
    assert "one layer takes 33 ms here, and the whole span of a node of this swarm 8 ms (median of 6)" in said
    assert "A graphics card would help" in said
    assert "--num-layers 1 joins all the same" in said


def test_a_slow_machine_is_welcome_where_a_layer_has_few_holders() -> None:
    assert count(twice()[:5], 1e6) == (12, "all of the model"), "one machine alone holds layers 8…11"
    assert count([*twice()[:5], machine(9, 8, 12, GPU)], 1e6)[0] == 12, "of another class, it is no help"
    assert count([*twice()[:5], machine(9, 8, 12, state=NodeState.JOINING)], 1e6)[0] == 12


def test_a_liar_makes_nobody_look_slow() -> None:
    liars = [machine(10 + number, 0, 12, sweep_ms=((8, 0.001),)) for number in range(3)]
    assert count([*twice(), *liars], 8.0)[0] >= 1


def test_why_layers_are_wanted_is_said() -> None:
    def why(records: Sequence[NodeRecord]) -> str:
        return need_of(records, CPU, Span(8, 12), 12)

    assert why([]) == "nobody holds them"
    assert why([machine(0, 0, 9)]) == "nobody holds 3 of them"
    assert why([machine(0, 0, 12, GPU)]) == "nobody holds them"
    assert why(twice()[:3]) == "one machine alone holds some of them"
    assert why(twice()) == "they have the fewest holders, 2 at least"


def test_a_machine_is_placed_among_those_with_which_it_can_be_in_one_chain() -> None:
    others = [machine(0, 0, 4), machine(1, 4, 8), *twice(GPU)]
    choose = joiners_choice(PeerId("me"), 4, MODEL, Joiner(CPU, 500.0))
    assert choose(others) == Span(8, 12), "of its class, nobody holds these"
    dead = Joiner(CPU, 500.0, frozenset({PeerId("p1")}))
    whole = [machine(0, 0, 4), machine(1, 4, 8), machine(2, 8, 12)]
    assert joiners_choice(PeerId("me"), 4, MODEL, dead)(whole) == Span(4, 8), "who does not answer holds nothing"
    own = machine(9, 0, 4, movable=True)
    alone = [machine(0, 0, 4), machine(1, 4, 8), machine(2, 8, 12, GPU)]
    assert movers_choice(own)(alone) == Span(8, 12)
