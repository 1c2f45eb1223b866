"""Edge checks on decoded values: each returns its value or raises `RemoteProtocolError` with the field's name. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sized
from typing import TypeVar, cast

from google.protobuf.message import Message

from swarm.errors import LayersError, RemoteProtocolError
from swarm.ids import SessionId, TreeNodeId
from swarm.layers import Span
from swarm.protocol.limits import MAX_LAYERS, MAX_NODES, SESSION_BYTES

ID_END = 1 << 63
"""Ids, sequences and lengths are below it."""
TOKEN_END = 1 << 31
"""Token ids are below it."""
TIP = -1
"""The tip as a parent on the wire."""

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=Sized)


def number(value: int, field: str, end: int = ID_END) -> int:
    """`value` in `[0, end)`."""
    if not 0 <= value < end:
        raise RemoteProtocolError(field, f"{value} is not in 0 … {end - 1}")
    return value


def node_id(value: int, field: str) -> TreeNodeId:
    """A tree node's id."""
    return TreeNodeId(number(value, field))


def at_most(values: S, limit: int, field: str) -> S:
    """No more than `limit` values (or characters)."""
    if len(values) > limit:
        raise RemoteProtocolError(field, f"{len(values)} are too many, the limit is {limit}")
    return values


def exactly(value: bytes, length: int, field: str) -> bytes:
    """So many bytes."""
    if len(value) != length:
        raise RemoteProtocolError(field, f"{len(value)} bytes instead of {length}")
    return value


def numbers(values: Collection[int], field: str, end: int = ID_END) -> tuple[int, ...]:
    """At most `MAX_NODES` values in `[0, end)`."""
    found = tuple(at_most(values, MAX_NODES, field))
    if found:
        number(min(found), field, end)
        number(max(found), field, end)
    return found


def node_ids(values: Collection[int], field: str) -> tuple[TreeNodeId, ...]:
    """Ids of tree nodes."""
    return cast("tuple[TreeNodeId, ...]", numbers(values, field))


def parents(values: Collection[int], field: str) -> tuple[TreeNodeId | None, ...]:
    """Ids of parents; the wire's -1, the tip, becomes None."""
    found = tuple(at_most(values, MAX_NODES, field))
    if found and not TIP <= min(found) <= max(found) < ID_END:
        raise RemoteProtocolError(field, "a parent is -1 (the tip) or an id below 2^63")
    return tuple(None if parent == TIP else TreeNodeId(parent) for parent in found)


def same_length(count: int, expected: int, field: str, of: str) -> None:
    """That a list has one entry per `of`."""
    if count != expected:
        raise RemoteProtocolError(field, f"{count}, but there are {expected} {of}")


def finite(value: float, field: str) -> float:
    """Neither NaN nor infinite."""
    if not math.isfinite(value):
        raise RemoteProtocolError(field, f"{value} is not finite")
    return value


def non_negative(value: float, field: str) -> float:
    """Finite and >= 0."""
    if finite(value, field) < 0:
        raise RemoteProtocolError(field, f"{value} is negative")
    return value


def fraction(value: float, field: str) -> float:
    """In `[0, 1]`."""
    if not 0 <= value <= 1:
        raise RemoteProtocolError(field, f"{value} is not in 0 … 1")
    return value


def session_id(value: bytes) -> SessionId:
    """A session's id: 128 bits."""
    return SessionId(exactly(value, SESSION_BYTES, "session"))


def layers(start: int, end: int) -> Span:
    """A half-open range of layers that some model could have."""
    try:
        return Span(start, end).within(MAX_LAYERS)
    except LayersError as error:
        raise RemoteProtocolError("span", str(error)) from error


def present(message: Message, field: str) -> None:
    """A nested message that must not be left out."""
    if not message.HasField(field):
        raise RemoteProtocolError(field, f"is missing in {message.DESCRIPTOR.name}")
