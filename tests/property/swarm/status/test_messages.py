"""Every legal message arrives as it left; every illegal value of any field is refused, and the field named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.status.messages import (
    _FORMS,
    KINDS,
    Body,
    Event,
    Metrics,
    ServedModel,
    Stamp,
    Status,
    TelemetryError,
    Will,
    open_payload,
    seal_body,
)
from tests.broken_values import broken_facts
from tests.declarations import values_of
from tests.telemetry_messages import FINGERPRINT, identity, topic

MODELS = values_of(ServedModel, name=st.just("org/demo"), fingerprint=st.just(FINGERPRINT), num_layers=st.just(198))
STAMPS = values_of(Stamp)


def bodies(kind: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401
    """Legal messages of a kind."""
    if kind is Will:
        return st.builds(Will, STAMPS.map(lambda stamp: replace(stamp, seq=0)))
    further = {Status: {"model": MODELS, "is_birth": st.booleans()}, Metrics: {"kv_tokens_free": st.just(0)}}
    return values_of(kind, stamp=STAMPS, **further.get(kind, {}))


@pytest.mark.parametrize("kind", [Status, Will, Metrics, Event])
def test_every_legal_message_arrives_as_it_left(kind: type[Body]) -> None:
    @settings(max_examples=15)
    @given(bodies(kind))
    def arrives(body: Body) -> None:
        payload = seal_body(body, topic(body), identity(0))
        assert open_payload("canopy", topic(body), payload).body == body

    arrives()


@pytest.mark.parametrize("kind", [Status, Metrics, Event])
def test_every_illegal_value_is_refused_by_the_name_of_its_field(kind: type[Body]) -> None:
    form = _FORMS[kind]

    @settings(max_examples=4)
    @given(bodies(kind))
    def refused(body: Body) -> None:
        for name, broken in broken_facts(kind, form.encode(body), is_json=True):
            with pytest.raises(TelemetryError) as caught:
                form.decode(broken)
            assert caught.value.field == name

    refused()


def test_every_kind_has_a_form() -> None:
    assert {declared for _, declared in KINDS.values()} == set(_FORMS)
