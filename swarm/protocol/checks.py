"""Edge checks on decoded values: each returns its value or raises `RemoteProtocolError` with the field's name. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sized
from typing import TypeVar, cast

from google.protobuf.message import Message

from swarm.errors import LayersError, RemoteProtocolError
from swarm.ids import PeerId, SessionId, TreeNodeId
from swarm.layers import Span
from swarm.protocol.limits import MAX_HOP_MS, MAX_LAYERS, MAX_NODES, PEER_ID, SESSION_BYTES

ID_END = 1 << 63
"""Ids, sequences and lengths are below it."""
TOKEN_END = 1 << 31
"""Token ids are below it."""
TIP = -1
"""The tip as a parent on the wire."""

MAX_FLOAT32 = 3.5e38
"""More than any finite float32."""

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


def positive(value: int, field: str, end: int = ID_END) -> int:
    """`value` in `[1, end)`."""
    if not 1 <= value < end:
        raise RemoteProtocolError(field, f"{value} is not in 1 … {end - 1}")
    return value


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


def between(value: float, field: str, low: float, high: float) -> float:
    """In `[low, high]`, so never infinite and never NaN."""
    if not low <= value <= high:
        raise RemoteProtocolError(field, f"{value} is not in {low:g} … {high:g}")
    return value


def milliseconds(value: float, field: str) -> float:
    """What one hop reports of one sweep."""
    return between(value, field, 0.0, MAX_HOP_MS)


def fraction(value: float, field: str) -> float:
    """In `[0, 1]`."""
    return between(value, field, 0.0, 1.0)


def log_probability(value: float, field: str) -> float:
    """The logarithm of a probability: at most 0, and finite."""
    return between(value, field, -MAX_FLOAT32, 0.0)


def session_id(value: bytes) -> SessionId:
    """A session's id: 128 bits."""
    return SessionId(exactly(value, SESSION_BYTES, "session"))


def printable(text: str, field: str) -> str:
    """A text that may be shown: no control characters, no line ends."""
    if not text.isprintable():
        raise RemoteProtocolError(field, "must be printable")
    return text


def peer_id(text: str, field: str) -> PeerId:
    """A machine's name: the base58 form of a SHA-256 multihash."""
    if not PEER_ID.fullmatch(text):
        raise RemoteProtocolError(field, "is no peer id")
    return PeerId(text)


def layers(start: int, end: int, num_layers: int = MAX_LAYERS) -> Span:
    """A half-open range of a model's layers; without their number, of those that some model could have."""
    try:
        return Span(start, end).within(num_layers)
    except LayersError as error:
        raise RemoteProtocolError("span", str(error)) from error


def present(message: Message, field: str) -> None:
    """A nested message that must not be left out."""
    if not message.HasField(field):
        raise RemoteProtocolError(field, f"is missing in {message.DESCRIPTOR.name}")
