"""Values out of untrusted JSON, each checked before it is used. Pure; knows no message and no topic."""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from swarm.errors import RemoteProtocolError
from swarm.protocol.limits import MAX_COUNT, MAX_SWEEP_ROWS

MAX_MS: Final = 1e7
"""Of a wait or a computation: nearly three hours."""


class TelemetryError(RemoteProtocolError):
    """A message that is rejected; `field` is topic, size, v, payload, signature, or a field of its body."""


def parse(field: str, data: bytes | str) -> object:
    """Read JSON text; numbers that JSON does not have are refused."""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise TelemetryError(field, "is not JSON") from error


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def json_object(field: str, value: object) -> dict[str, Any]:
    """The value, if it is a JSON object."""
    if not isinstance(value, dict):
        raise TelemetryError(field, "must be a JSON object")
    return value


def base64_bytes(raw: Mapping[str, Any], field: str) -> bytes:
    """Bytes, encoded as base64."""
    value = raw.get(field)
    if not isinstance(value, str):
        raise TelemetryError(field, "must be base64")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise TelemetryError(field, "must be base64") from error


def text(raw: Mapping[str, Any], field: str, limit: int) -> str:
    """Printable text of at most `limit` characters."""
    value = raw.get(field)
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise TelemetryError(field, f"must be printable text of at most {limit} characters")
    return value


def choice(raw: Mapping[str, Any], field: str, choices: type[enum.StrEnum]) -> str:
    """One of the enum's values."""
    value = raw.get(field)
    if not isinstance(value, str) or value not in set(choices):
        raise TelemetryError(field, f"must be one of {', '.join(choices)}")
    return value


def integer(raw: Mapping[str, Any], field: str, limit: int = MAX_COUNT) -> int:
    """A whole number in `[0, limit]`."""
    value = raw.get(field)
    if type(value) is not int or not 0 <= value <= limit:
        raise TelemetryError(field, f"must be a whole number in [0, {limit}]")
    return value


def number(raw: Mapping[str, Any], field: str, maximum: float, minimum: float = 0.0) -> float:
    """A number in `[minimum, maximum]`, so never infinite and never NaN."""
    value = raw.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise TelemetryError(field, f"must be a number in [{minimum:g}, {maximum:g}]")
    return float(value)


def temperature(raw: Mapping[str, Any], field: str) -> float:
    """Degrees Celsius."""
    return number(raw, field, 1_000.0, -273.15)


def pairs(raw: Mapping[str, Any], field: str) -> tuple[tuple[int, float], ...]:
    """At most 8 pairs of (tree nodes of a sweep, milliseconds), tree nodes rising from 1 on."""
    value = raw.get(field)
    if not isinstance(value, list) or len(value) > 8 or not all(isinstance(p, list) and len(p) == 2 for p in value):
        raise TelemetryError(field, "must be at most 8 pairs")
    found = tuple(
        (integer({field: nodes}, field, MAX_SWEEP_ROWS), number({field: ms}, field, MAX_MS)) for nodes, ms in value
    )
    if not all(before < after for before, after in pairwise([0, *(nodes for nodes, _ in found)])):
        raise TelemetryError(field, "sizes must rise from 1 on")
    return found
