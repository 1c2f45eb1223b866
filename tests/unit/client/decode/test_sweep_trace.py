"""A trace is bounded, and is JSON whatever a hop reports."""

from __future__ import annotations

import json
import math

from tokenizers import Tokenizer

from client.base.stats import SweepMeasurement
from client.decode.pipeline import MAX_TRACED_NODES, AnsweredSweep, InFlightSweep, SweepTracer
from client.decode.policy import Occupancy, SpeculationPlan
from client.draft.search.tree import DraftTree
from swarm.base.ids import TreeNodeId
from swarm.demo import TARGET
from swarm.protocol.messages import HopTime, Reply

WIDTH = MAX_TRACED_NODES + 40


def answered() -> AnsweredSweep:
    """A tree of one wide level, of which the text goes through the last and least likely node."""
    tree = DraftTree(tuple(range(WIDTH)), (None,) * WIDTH, tuple(1 / (2 + place) for place in range(WIDTH)))
    places: dict[TreeNodeId, int | None] = {TreeNodeId(7): None}
    places |= {TreeNodeId(8 + place): place for place in range(WIDTH)}
    plan = SpeculationPlan(WIDTH, None, "as asked")
    sweep = InFlightSweep(tree, places, WIDTH, 1, 0, plan, 1.5, 0.0, True, 0, Occupancy(), start=1)
    reply = Reply(1, 0, ((TreeNodeId(7), WIDTH - 1), (TreeNodeId(7 + WIDTH), 4)))
    measured = SweepMeasurement(WIDTH, 2, 1.5, math.nan, 0.0, (HopTime(0.0, math.inf, 0.0, 0.0),))
    return AnsweredSweep(sweep, reply, measured, [(WIDTH - 1, "a"), (4, "b")], [3, 2, 1, WIDTH - 1, 4], 2)


def test_a_large_tree_is_cut_to_its_best_nodes_and_the_path() -> None:
    tracer = SweepTracer(Tokenizer.from_file(str(TARGET / "tokenizer.json")))
    tracer.note(answered())
    [trace] = tracer.take(["first hop", "a hop that joined since"])
    assert (len(trace["nodes"]), trace["left_out"]) == (MAX_TRACED_NODES, 40)
    assert [node["token"] for node in trace["nodes"] if node["is_accepted"]] == [WIDTH - 1]
    assert trace["nodes"][-1]["pick"]["token"] == 4
    assert (trace["root"]["token"], trace["root"]["pick"]["token"]) == (1, WIDTH - 1)
    assert [hop["name"] for hop in trace["hops"]] == ["first hop"]
    assert json.loads(json.dumps(trace, allow_nan=False))["total_ms"] is None
    assert tracer.take([]) == ()
