"""Records of all legal values, as their declaration bounds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import (
    MAX_DELAYS,
    MAX_KV_TOKENS,
    MAX_REFUTED,
    MAX_SPEEDS,
    NodeRecord,
    NodeState,
    Reach,
)
from swarm.link.endpoint import RelayedAddress
from swarm.protocol.limits import MAX_LAYERS, MAX_SWEEP_ROWS, SWEEP_MS
from tests.declarations import values_of

NOW = 1_800_000_000.0
DIGEST = st.text("0123456789abcdef", min_size=64, max_size=64)


def speeds(*, bucketed: bool = False) -> st.SearchStrategy[tuple[tuple[int, float], ...]]:
    """Claimed speeds, from none to as many as there may be, rising or falling, as extreme as may be.

    Args:
        bucketed: whether rows are padded to these sizes: then times do not fall.
    """
    sizes = st.one_of(
        st.lists(st.integers(1, MAX_SWEEP_ROWS), max_size=MAX_SPEEDS, unique=True).map(sorted),
        st.sampled_from([[1, 8, 64], [1, 2], [16, 17], [MAX_SWEEP_ROWS]]),
    )
    times = st.one_of(st.sampled_from(SWEEP_MS), st.floats(*SWEEP_MS))
    return sizes.flatmap(
        lambda found: st.tuples(*[times] * len(found)).map(
            lambda ms: tuple(zip(found, sorted(ms) if bucketed else ms, strict=True))
        )
    )


@st.composite
def models(draw: st.DrawFn, max_layers: int = MAX_LAYERS) -> ModelIdentity:
    """A model that tells the truth about itself."""
    name = draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}(/[A-Za-z0-9_-]{1,20})?", fullmatch=True))
    return ModelIdentity.of(name, draw(DIGEST), draw(DIGEST), draw(DIGEST), draw(st.integers(1, max_layers)))


_OTHERWISE = values_of(
    NodeRecord,
    **{
        name: st.just(value)
        for name, value in {
            "left": False,
            "peer": PeerId("a"),
            "model": ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 1),
            "span": Span(0, 1),
            "address": "192.0.2.7:1",
            "reach": Reach.DIRECT,
            "kv_tokens_free": 0,
            "kv_tokens_total": 0,
            "sweep_ms": (),
            "delays_ms": (),
            "certificate": b"",
            "refuted": (),
        }.items()
    },
)
"""Records of which other fields may have any value that they are declared to have."""


@st.composite
def records(
    draw: st.DrawFn,
    model: ModelIdentity,
    peer: PeerId,
    others: tuple[PeerId, ...] = (),
    certificate: bytes = b"",
) -> NodeRecord:
    """A legal record of a machine with some layers of a model; fields that nothing else bounds are as declared."""
    start, total = draw(st.integers(0, model.num_layers - 1)), draw(st.integers(0, MAX_KV_TOKENS))
    own = ["192.0.2.7:1", "[2001:db8::1]:65535", "a-b.example:80", f"{'h' * 253}:5000"]
    address, reach = draw(st.sampled_from(own)), draw(st.sampled_from(Reach))
    bucketed = draw(st.booleans())
    delays = st.tuples(st.sampled_from(others), st.floats(0.0, 60_000.0)) if others else st.nothing()
    refuted = st.tuples(st.sampled_from(others), st.floats(NOW - 90_000.0, NOW + 90.0)) if others else st.nothing()
    here: dict[str, Any] = {
        "left": False,
        "peer": peer,
        "model": model,
        "span": Span(start, draw(st.integers(start + 1, model.num_layers))),
        "address": str(RelayedAddress(peer, address)) if reach is Reach.RELAYED else address,
        "reach": reach,
        "state": draw(st.sampled_from([NodeState.SERVING] * 3 + [NodeState.JOINING, NodeState.DRAINING])),
        "rounding": draw(st.sampled_from(["", "0123abcd"])),
        "numeric_class": draw(st.sampled_from(["cpu-float32", "cpu-float32", "cuda-bfloat16", "cuda-float16-w8"])),
        "sweep_ms": draw(speeds(bucketed=bucketed)),
        "bucketed": bucketed,
        "kv_tokens_free": draw(st.integers(0, total)),
        "kv_tokens_total": total,
        "expires_at": NOW + draw(st.floats(1.0, 90.0)),
        "delays_ms": tuple(draw(st.lists(delays, max_size=MAX_DELAYS))) if others else (),
        "certificate": certificate,
        "refuted": tuple(draw(st.lists(refuted, max_size=MAX_REFUTED))) if others else (),
    }
    made: NodeRecord = draw(_OTHERWISE)
    return replace(made, **here)
