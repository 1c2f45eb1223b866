"""Every legal record is read as it was made; every illegal value of any field is refused, and the field named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.ids import ModelIdentity
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import POINTERS, ModelPointer
from swarm.directory.node_record import RECORDS
from swarm.directory.sealing import RecordError, Seal
from tests.broken_values import broken_facts
from tests.declarations import values_of
from tests.record_strategies import NOW, models, records

ME = Identity.ephemeral()
POINTER = ModelPointer(ME.peer_id, ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 12), NOW + 60)


@settings(max_examples=40)
@given(st.data())
def test_every_legal_record_and_pointer_comes_back(data: st.DataObject) -> None:
    record = data.draw(records(data.draw(models()), ME.peer_id, (ME.peer_id,)))
    sealed = RECORDS.close(record, ME)
    found = RECORDS.open(sealed, NOW)
    assert (found, found.swarm, found.sealed) == (record, record.swarm, sealed)
    here = {"peer": st.just(ME.peer_id), "model": models(), "expires_at": st.floats(NOW + 1, NOW + 90)}
    pointer = data.draw(values_of(ModelPointer, **here))
    assert POINTERS.open(POINTERS.close(pointer, ME), NOW) == pointer


def refused(seal: Seal[Any], values: list[Any]) -> str:
    """The part at fault of what hostile software signs."""
    with pytest.raises(RecordError) as caught:
        seal.form.decode(values)
    assert str(caught.value).isprintable()
    return caught.value.field


@settings(max_examples=8)
@given(st.data())
def test_every_illegal_value_is_refused_by_the_name_of_its_field(data: st.DataObject) -> None:
    record = data.draw(records(data.draw(models()), ME.peer_id, (ME.peer_id,)))
    pairs: list[tuple[Seal[Any], Any]] = [(RECORDS, record), (POINTERS, POINTER)]
    for seal, fact in pairs:
        values = seal.form.encode(fact)
        broken = list(broken_facts(type(fact), values))
        assert len({name for name, _ in broken}) == len(values)
        for name, other in broken:
            assert refused(seal, other) == name


@given(models(), st.integers(1, 5), st.sampled_from(["0" * 64, "zz" * 32, "ff" * 16, "", None, 7]))
def test_a_model_that_contradicts_itself_is_refused(model: ModelIdentity, place: int, other: object) -> None:
    values = POINTERS.form.encode(ModelPointer(ME.peer_id, model, NOW + 1))
    values[2][place] = other if place < 5 else model.num_layers % 512 + 1
    assert refused(POINTERS, values) == "model"
