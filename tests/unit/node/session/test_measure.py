"""Which path a span is given before it is announced."""

from __future__ import annotations

from typing import cast

import pytest

import node.session.measure
from node.model.span import SpanModel
from node.session.measure import make_ready


class _Asked:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def use_plain(self, reason: str) -> None:
        self.told.append(reason)


@pytest.mark.parametrize(
    ("graphs", "streamed", "told"),
    [
        (True, False, "proven"),
        (False, False, "its numeric class is without kernels, as --no-graphs or the swarm wants it"),
        (True, True, "weights are streamed"),
    ],
)
def test_graphs_are_for_weights_that_stay_where_nobody_declined(
    graphs: bool, streamed: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.session.measure, "use_static", lambda model: model.told.append("proven"))
    asked = _Asked()
    make_ready(cast("SpanModel", asked), graphs=graphs, streamed=streamed)
    assert asked.told == [told]
