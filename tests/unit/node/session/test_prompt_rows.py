"""How many of a prompt's rows a tail sends: within a bound on what the client did not acknowledge."""

from __future__ import annotations

import pytest

import node.session.tail
from node.session.tail import PromptRowsBudget
from swarm.ids import TreeNodeId

NODES = [TreeNodeId(node) for node in range(20)]


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.tail, "PROMPT_ROWS_BYTES", 100)


def test_the_newest_that_fit_are_sent() -> None:
    budget = PromptRowsBudget()
    assert budget.grant(1, NODES[:3], 10, acked=0) == NODES[:3]
    assert budget.grant(2, NODES, 10, acked=0) == NODES[13:]
    assert budget.grant(3, NODES, 10, acked=0) == []


def test_what_the_client_holds_counts_no_more() -> None:
    budget = PromptRowsBudget()
    for sequence in (1, 2, 3):
        budget.grant(sequence, NODES[:3], 10, acked=0)
    assert budget.grant(4, NODES, 10, acked=2) == NODES[13:]
    assert budget.grant(5, NODES, 10, acked=4) == NODES[10:]


def test_a_row_larger_than_the_bound_is_never_sent() -> None:
    assert PromptRowsBudget().grant(1, NODES, 101, acked=0) == []
