"""What machines claim, for all of them at once, is what it is for each alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.routing.costs import HOP_OVERHEAD_MS, Candidate, RouteQuery, claims_ms, sweep_ms, tabulate, wait_ms

MODEL = ModelIdentity.of("tiny", "c" * 64, "e" * 64, "d" * 64, 8)
RECORD = NodeRecord(
    *(PeerId("peer"), MODEL, Span(0, 8), "192.0.2.1:1", NodeState.SERVING, "cpu-float32", "0", None, (), 9, 9, 1, 0.0)
)
SIZES = ((), (4,), (1, 8), (8, 1), (1, 8, 64), (2, 8, 64), (1, 8, 8), (1, 2, 4, 8))


@pytest.mark.parametrize("nodes", [0, 1, 3, 7, 16, 63, 64, 500])
def test_a_table_of_claims_is_each_claim_alone(nodes: int) -> None:
    rng = random.Random(nodes)
    records = []
    for number in range(60):
        claims = tuple((size, rng.choice([0.0, rng.uniform(1, 50), 1e9])) for size in rng.choice(SIZES))
        records.append(replace(RECORD, peer=PeerId(str(number)), sweep_ms=claims, busy=rng.choice([0.0, 0.5, 1.0])))
    table = tabulate([Candidate(record, record.span) for record in records], RouteQuery("tiny", 8, nodes))
    alone = [sweep_ms(record, nodes + 1) for record in records]
    np.testing.assert_allclose(table.layer_ms * 8, alone, rtol=1e-12)
    fixed = [wait_ms(record, whole_ms) + HOP_OVERHEAD_MS for record, whole_ms in zip(records, alone, strict=True)]
    np.testing.assert_allclose(table.fixed_ms, fixed, rtol=1e-12)


STEPS = ((16, 4.66), (64, 5.29), (512, 19.0))


@pytest.mark.parametrize(
    ("rows", "ms"), [(1, 4.66), (16, 4.66), (17, 5.29), (64, 5.29), (65, 19.0), (513, 23.66), (1_100, 2 * 19 + 19.0)]
)
def test_rows_within_a_bucket_are_free_and_more_than_the_largest_run_again(rows: int, ms: float) -> None:
    card = replace(RECORD, sweep_ms=STEPS, bucketed=True)
    assert sweep_ms(card, rows) == pytest.approx(ms)
    records = [RECORD, card, replace(RECORD, sweep_ms=STEPS)]
    np.testing.assert_allclose(claims_ms(records, rows), [sweep_ms(record, rows) for record in records])


def test_nobody_measured_anything() -> None:
    table = tabulate([Candidate(RECORD, RECORD.span)], RouteQuery("tiny", 8))
    assert table.links_ms.shape == (1, 1)
    assert np.isinf(table.links_ms).all()
