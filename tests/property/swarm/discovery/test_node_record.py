"""Every legal record is read as it was made; every illegal value of any field is refused, and the field named."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.discovery.identity import Identity
from swarm.discovery.node_record import _encode, open_sealed, seal
from swarm.discovery.record_fields import RecordError
from swarm.ids import ModelIdentity
from swarm.layers import Span
from tests.record_strategies import NO_NUMBERS, NOW, models, records

ME = Identity.ephemeral()
MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 12)
FIELDS = {
    "span": 4, "address": 5, "numeric_class": 7, "version": 8, "sweep_ms": 10, "kv_tokens_free": 11,
    "kv_tokens_total": 12, "sequence": 13, "expires_at": 14, "delays_ms": 15, "busy": 16, "uplink_mbit_per_s": 17,
    "row_bytes": 18,
}  # fmt: skip
"""Places in a record's body."""
TOO_LARGE: dict[str, list[Any]] = {
    "kv_tokens_free": [2**62],
    "kv_tokens_total": [2**40 + 1],
    "sequence": [2**53 + 1],
    "busy": [1.0000001],
    "uplink_mbit_per_s": [0.0, 1e7],
    "row_bytes": [0, 2**20 + 1],
    "expires_at": [NOW + 96.0],
}
NO_SPEEDS = st.sampled_from(
    [[0, 1.0], [-1, 1.0], [4_097, 1.0], [2**60, 1.0], [1.0, 1.0], [1, 0.0], [1, 0.009], [1, 1_000_001.0], [1, 1], [1]]
) | st.sampled_from([value for value in NO_NUMBERS if value is not True]).map(lambda value: [1, value])


@st.composite
def illegal(draw: st.DrawFn) -> tuple[str, Any]:
    """A field and a value that it must not have."""
    field = draw(st.sampled_from(sorted(FIELDS)))
    match field:
        case "span":
            return field, draw(st.sampled_from([[0, 13], [5, 5], [-1, 3], [0.0, 4], [0], [0, 2**40], None, "0-4"]))
        case "address":
            hosts = [
                "0.0.0.0",
                "[::]",
                "0",
                "00.0.0.0",
                "0x0",
                "224.0.0.1",
                "[ff02::1]",
                "-h",
                ".",
                "a b",
                "",
                "h" * 254,
            ]
            return field, draw(st.sampled_from([*(f"{host}:80" for host in hosts), "h:0", "h:65536", "h", 7, None]))
        case "numeric_class" | "version":
            return field, draw(
                st.sampled_from(["", "-x", "--mqtt=mqtt://x", "a b", "\x1b[2J", "x" * 97, "é", None, 7, b"x"])
            )
        case "sweep_ms":
            bad = draw(NO_SPEEDS)
            lists = [
                [bad],
                [[1, 1.0], bad],
                [[2, 1.0], [2, 1.0]],
                [[2, 1.0], [1, 1.0]],
                [[n, 1.0] for n in range(1, 10)],
            ]
            return field, draw(st.sampled_from([*lists, None, 7, "fast"]))
        case "delays_ms":
            number = draw(st.sampled_from([value for value in NO_NUMBERS if value is not True] + [60_001.0]))
            return field, draw(st.sampled_from([[[ME.peer_id, number]], [["Qm", 1.0]], [[ME.peer_id, 1.0]] * 17, None]))
        case _:
            optional = field in ("uplink_mbit_per_s", "row_bytes")
            values = [value for value in NO_NUMBERS if value is not None or not optional] + TOO_LARGE.get(field, [])
            return field, draw(st.sampled_from(values))


@settings(max_examples=40)
@given(st.data())
def test_every_legal_record_comes_back(data: st.DataObject) -> None:
    record = data.draw(records(data.draw(models()), ME.peer_id, (ME.peer_id,)))
    assert open_sealed(seal(record, ME), NOW).record == record


@given(records(MODEL, ME.peer_id), illegal())
def test_every_illegal_value_is_refused_by_the_name_of_its_field(record: Any, bad: tuple[str, Any]) -> None:  # noqa: ANN401
    field, value = bad
    body = _encode(record, left=False)
    body[FIELDS[field]] = value
    if field == "kv_tokens_total":
        body[FIELDS["kv_tokens_free"]] = 0
    packed = msgpack.packb(body)
    data = msgpack.packb([ME.public_key, packed, ME.sign(b"canopy-record" + packed)])
    with pytest.raises(RecordError) as caught:
        open_sealed(data, NOW)
    assert caught.value.field == field
    assert str(caught.value).isprintable()


@given(models(), st.integers(1, 5), st.sampled_from(["0" * 64, "zz" * 32, "ff" * 16, "", None, 7]))
def test_a_model_that_contradicts_itself_is_refused(model: ModelIdentity, place: int, other: object) -> None:
    parts: list[Any] = [
        *(model.name, model.fingerprint, model.config_digest, model.weights_digest, model.tokenizer_digest),
        model.num_layers,
    ]
    parts[place] = other if place < 5 else model.num_layers % 512 + 1
    honest = _encode(_whole_record(model), left=False)
    honest[3], honest[4] = parts, [0, 1]
    packed = msgpack.packb(honest)
    with pytest.raises(RecordError) as caught:
        open_sealed(msgpack.packb([ME.public_key, packed, ME.sign(b"canopy-record" + packed)]), NOW)
    assert caught.value.field == "model"


def _whole_record(model: ModelIdentity) -> Any:  # noqa: ANN401
    from swarm.discovery.node_record import NodeRecord, NodeState

    about = (ME.peer_id, model, Span(0, 1), "192.0.2.7:1", NodeState.SERVING, "cpu-float32", "0", None, ())
    return NodeRecord(*about, 0, 0, 1, NOW + 1)
