"""The fields of signed records: msgpack values, each checked where it is read. Pure.

Every reader raises `RecordError` with the name of the field that is at fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgpack

from swarm.discovery.identity import is_peer_id
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.protocol.limits import MAX_SWEEP_ROWS, SWEEP_MS
from swarm.runtime.version import UPDATE, VERSION


class RecordError(RemoteProtocolError):
    """A record that is not valid; `field` names the part at fault."""


def unpack_list(data: bytes, length: int, *, or_more: bool = False) -> list[Any]:
    """Decode a msgpack list of exactly `length` values, or of at least so many.

    Raises:
        RecordError: it is none.
    """
    try:
        values = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("data", "malformed") from error
    if not isinstance(values, list) or len(values) < length or (len(values) > length and not or_more):
        raise RecordError("data", "malformed")
    return values


def quoted(value: object) -> str:
    """A value that nobody here knows, as a message may show it."""
    return repr(value[:32] if isinstance(value, str) else type(value).__name__)


def another_format(what: str, found: object, own: int) -> str:
    """Why what was signed in another format is not read, and which side is to be updated."""
    if type(found) is not int:
        return f"{what} of no format"
    side = f"update this machine ({UPDATE})" if found > own else "its machine is to be updated"
    return f"{what} of format {found}; release {VERSION} reads format {own}: {side}"


def text(field: str, value: object, limit: int) -> str:
    """Printable text of at most `limit` characters."""
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise RecordError(field, f"must be printable text of at most {limit} characters")
    return value


def formed(field: str, value: object, limit: int, form: re.Pattern[str]) -> str:
    """Printable text that has a form."""
    found = text(field, value, limit)
    if form.fullmatch(found) is None:
        raise RecordError(field, f"{found!r} has not the form of one")
    return found


def whole(field: str, value: object, bounds: tuple[int, int]) -> int:
    """A whole number within bounds, both included."""
    if type(value) is not int or not bounds[0] <= value <= bounds[1]:
        raise RecordError(field, f"must be a whole number in [{bounds[0]}, {bounds[1]}]")
    return value


def real(field: str, value: object) -> float:
    """A finite number."""
    if type(value) is not float or not math.isfinite(value):
        raise RecordError(field, "must be a finite number")
    return value


def flag(field: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RecordError(field, "must be true or false")
    return value


def within(field: str, value: object, bounds: tuple[float, float]) -> float:
    """A finite number within bounds, both included."""
    number = real(field, value)
    if not bounds[0] <= number <= bounds[1]:
        raise RecordError(field, f"must be a number in [{bounds[0]:g}, {bounds[1]:g}]")
    return number


def items(field: str, value: object, limit: int, read: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    """A list of at most `limit`, each read by `read`."""
    if not isinstance(value, list) or len(value) > limit:
        raise RecordError(field, f"must be a list of at most {limit}")
    return tuple(read(field, item) for item in value)


def pair(field: str, value: object) -> list[Any]:
    """A list of two."""
    if not isinstance(value, list) or len(value) != 2:
        raise RecordError(field, "must be pairs")
    return value


def peer_id(value: object, field: str = "peer") -> PeerId:
    """A peer id."""
    found = text(field, value, 64)
    if not is_peer_id(found):
        raise RecordError(field, "not a peer id")
    return PeerId(found)


def speeds(field: str, value: object, limit: int, *, bucketed: bool) -> tuple[tuple[int, float], ...]:
    """At most `limit` pairs (tree nodes, milliseconds per sweep), tree nodes rising.

    Args:
        field: its name.
        value: as it was signed.
        limit: pairs, at most.
        bucketed: whether rows are padded to these sizes: then no larger one takes less.
    """
    found = tuple(
        (whole(field, nodes, (1, MAX_SWEEP_ROWS)), within(field, milliseconds, SWEEP_MS))
        for nodes, milliseconds in items(field, value, limit, pair)
    )
    if any(before >= after for (before, _), (after, _) in pairwise(found)):
        raise RecordError(field, "sizes must rise")
    if bucketed and any(before > after for (_, before), (_, after) in pairwise(found)):
        raise RecordError(field, "times of buckets must not fall")
    return found
