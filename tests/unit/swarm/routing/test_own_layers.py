"""Layers that only machines of the user's choice compute: what two options say, and what others may compute then."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.base.errors import ConfigError, RouteError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.identity import Identity, default_identity_path
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.routing.costs import RouteQuery, sweep_ms
from swarm.routing.own_layers import OwnLayers
from swarm.routing.route import best_route

MODEL = ModelIdentity.of("tiny", "c" * 64, "e" * 64, "d" * 64, 12)
SPANS = {"mine": Span(0, 6), "whole": Span(0, 12), "middle": Span(3, 11), "end": Span(6, 12)}
RECORDS = [
    NodeRecord(
        *(PeerId(peer), MODEL, span, "192.0.2.1:1", NodeState.SERVING, "cpu-float32", "0", None),
        *(((1, 2.0 * len(span)), (64, 6.0 * len(span))), 9, 9, 1, 0.0),
    )
    for peer, span in SPANS.items()
]
MINE, OTHER = (Identity.ephemeral().peer_id for _ in range(2))


def spans(own: OwnLayers) -> dict[str, str]:
    return {record.peer: str(record.span) for record in own.keep_to(RECORDS)}


def test_others_compute_the_rest_alone() -> None:
    trusted = frozenset({PeerId("mine")})
    assert spans(OwnLayers(trusted)) == {"mine": "0-6"}
    assert spans(OwnLayers(trusted, 4)) == {"mine": "0-6", "whole": "4-12", "middle": "4-11", "end": "6-12"}
    assert spans(OwnLayers(trusted, 0, 2)) == {"mine": "0-6", "whole": "0-10", "middle": "3-10", "end": "6-10"}
    assert spans(OwnLayers(trusted, 4, 7)) == {"mine": "0-6", "whole": "4-5", "middle": "4-5"}
    assert spans(OwnLayers(trusted, 6, 6)) == {"mine": "0-6"}, "nothing is left for others"


def test_a_part_of_a_span_takes_its_part_of_the_time() -> None:
    by_peer = {record.peer: record for record in RECORDS}
    for record in OwnLayers(frozenset(), 3, 2).keep_to(RECORDS):
        whole = by_peer[record.peer]
        assert sweep_ms(record, 17) / len(record.span) == pytest.approx(sweep_ms(whole, 17) / len(whole.span))


def test_a_chain_keeps_to_it_or_there_is_none() -> None:
    query = RouteQuery("tiny", 12)
    own = OwnLayers(frozenset({PeerId("mine")}), 4)
    route = best_route(own.keep_to(RECORDS), query)
    assert route.hops[0].peer == "mine"
    assert len(route.hops[0].span) >= 4
    with pytest.raises(RouteError, match="layers 0…3"):
        best_route(own.keep_to(RECORDS[1:]), query)


def test_options_say_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert OwnLayers.read(None, ()) is None
    assert OwnLayers.read(None, (MINE, f"/ip4/192.0.2.1/tcp/1/p2p/{OTHER}")) == OwnLayers(frozenset({MINE, OTHER}))
    assert OwnLayers.read("last:2, first:4", (MINE,)) == OwnLayers(frozenset({MINE}), 4, 2)
    assert OwnLayers.read("last:2", (MINE,)) == OwnLayers(frozenset({MINE}), 0, 2)
    for wrong in ("", "4", "first:0", "first:4,first:5", "middle:3", "first:4;last:2"):
        with pytest.raises(ConfigError, match="write first:4"):
            OwnLayers.read(wrong, (MINE,))
    with pytest.raises(ConfigError, match="'me' is no peer id"):
        OwnLayers.read(None, ("me",))
    with pytest.raises(ConfigError, match="name yours"):
        OwnLayers.read("first:4", ())
    here = Identity.load_or_create(default_identity_path())
    assert OwnLayers.read("first:4", ()) == OwnLayers(frozenset({here.peer_id}), 4)
    assert OwnLayers.read(None, (MINE,)) == OwnLayers(frozenset({MINE, here.peer_id}))
