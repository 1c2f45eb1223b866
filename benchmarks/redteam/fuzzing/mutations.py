"""Structure-aware mutations of what travels: protobuf field by field, msgpack value by value. Pure and seeded.

No schema is needed: protobuf's wire format says where a field begins and ends, so a mutation keeps a message readable
and changes what it says. Only some mutations break the format itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgpack

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
HUGE: Final = (0, 1, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers at the edges; the last ones are negative to whoever reads them as signed."""
REALS: Final = (0.0, -0.0, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
MAX_BYTES: Final = 1 << 16
"""No mutant is longer: a fuzz measures parsers, and not the memory that carries its input."""
MAX_DEPTH: Final = 4


@dataclass(frozen=True, slots=True)
class WireField:
    """One field as it lies in the bytes: its number, its wire type, and its value (bytes, or a number)."""

    number: int
    kind: int
    value: int | bytes


def parse_wire(data: bytes) -> list[WireField] | None:
    """The fields of a protobuf message; None where the bytes are none."""
    fields, at = [], 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == VARINT:
            value, at = _read_varint(data, at)
        elif kind in {FIXED64, FIXED32}:
            size = 8 if kind == FIXED64 else 4
            value, at = data[at : at + size], at + size
        elif kind == LENGTH:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            return None
        if at < 0 or at > len(data) or number == 0:
            return None
        fields.append(WireField(number, kind, value))
    return fields


def build_wire(fields: list[WireField]) -> bytes:
    out = bytearray()
    for one in fields:
        out += write_varint(one.number << 3 | one.kind)
        if isinstance(one.value, int):
            out += write_varint(one.value)
        else:
            out += write_varint(len(one.value)) if one.kind == LENGTH else b""
            out += one.value
    return bytes(out)


def mutate_wire(rng: random.Random, data: bytes, depth: int = 0) -> bytes:
    """A mutant of a protobuf message, of itself or of one nested in it."""
    fields = parse_wire(data)
    if not fields:
        return mutate_bytes(rng, data)
    if depth < MAX_DEPTH and rng.random() < 0.6:
        nested = [place for place, one in enumerate(fields) if _is_message(one)]
        if nested:
            place = rng.choice(nested)
            inner = fields[place]
            assert isinstance(inner.value, bytes)
            fields[place] = WireField(inner.number, LENGTH, mutate_wire(rng, inner.value, depth + 1))
            return build_wire(fields)[:MAX_BYTES]
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    rng.choice(_CHANGES)(rng, fields)
    return build_wire(fields)[:MAX_BYTES]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """A mutant that knows no structure: flipped bits, a piece cut out or doubled, another length."""
    changed = bytearray(data or b"\x00")
    at = rng.randrange(len(changed))
    match rng.randrange(4):
        case 0:
            changed[at] ^= 1 << rng.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 2, 9)))
        case _:
            changed[at:at] = changed[at : at + 64] * rng.choice((1, 3, 40))
    return bytes(changed[:MAX_BYTES])


def mutate_packed(rng: random.Random, data: bytes) -> bytes:
    """A mutant of a msgpack message; the bytes inside it are often changed as messages of their own."""
    try:
        value = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException):
        return mutate_bytes(rng, data)
    try:
        packed: bytes = msgpack.packb(mutate_value(rng, value))
    except (ValueError, TypeError, OverflowError):
        return mutate_bytes(rng, data)
    return packed[:MAX_BYTES]


def mutate_value(rng: random.Random, value: Any, depth: int = 0) -> Any:  # noqa: ANN401 (whatever msgpack has)
    """Another value in place of one, or somewhere inside it."""
    if isinstance(value, list | tuple) and value and (depth == 0 or rng.random() < 0.7):
        items = list(value)
        at = rng.randrange(len(items))
        match rng.randrange(8):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[rng.randrange(len(items))])
            case 2:
                items = items * rng.choice((2, 50))
            case 3:
                other = rng.randrange(len(items))
                items[at], items[other] = items[other], items[at]
            case _:
                items[at] = mutate_value(rng, items[at], depth + 1)
        return items
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        match rng.randrange(4):
            case 0:
                return {other: kept for other, kept in value.items() if other != key}
            case 1:
                return {**value, f"{key}x": value[key]}
            case _:
                return {**value, key: mutate_value(rng, value[key], depth + 1)}
    return _other(rng, value, depth)


def _other(rng: random.Random, value: Any, depth: int) -> Any:  # noqa: ANN401
    chance = rng.random()
    if chance < 0.3 and isinstance(value, bytes):
        return mutate_packed(rng, value) if depth < MAX_DEPTH and rng.random() < 0.5 else mutate_bytes(rng, value)
    if chance < 0.3 and isinstance(value, str):
        odd = ("\x1b]0;x\x07", "\n", "\u202e", "é" * 99, "", "-" * 4_000, "\udcff", "../x", "--mqtt=x")
        return (value + rng.choice(odd))[rng.choice((0, 1)) :]
    if chance < 0.7 and isinstance(value, int | float) and not isinstance(value, bool):
        return rng.choice((*HUGE, *(-number for number in HUGE[:-2]), *REALS, value + 1, -value))
    return rng.choice((None, True, 0, -1, 2**63, 1.5, float("nan"), "", b"", [], {}, [[[[]]]], "x" * 300, [value] * 9))


Change = Callable[[random.Random, list[WireField]], None]


def _drop(rng: random.Random, fields: list[WireField]) -> None:
    del fields[rng.randrange(len(fields))]


def _double(rng: random.Random, fields: list[WireField]) -> None:
    fields.insert(rng.randrange(len(fields) + 1), rng.choice(fields))


def _repeat(rng: random.Random, fields: list[WireField]) -> None:
    one = rng.choice(fields)
    size = len(one.value) if isinstance(one.value, bytes) else 4
    fields += [one] * min(rng.choice((10, 300, 5_000)), MAX_BYTES // (size + 4))


def _swap(rng: random.Random, fields: list[WireField]) -> None:
    at, other = rng.randrange(len(fields)), rng.randrange(len(fields))
    one, two = fields[at], fields[other]
    fields[at], fields[other] = WireField(one.number, two.kind, two.value), WireField(two.number, one.kind, one.value)


def _renumber(rng: random.Random, fields: list[WireField]) -> None:
    at = rng.randrange(len(fields))
    number = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 100, 2**28))
    fields[at] = WireField(number, fields[at].kind, fields[at].value)


def _retype(rng: random.Random, fields: list[WireField]) -> None:
    at = rng.randrange(len(fields))
    value: tuple[int, int | bytes] = rng.choice(
        (
            (VARINT, rng.choice(HUGE)),
            (FIXED64, rng.randbytes(8)),
            (FIXED32, rng.randbytes(4)),
            (LENGTH, rng.randbytes(9)),
        )
    )
    fields[at] = WireField(fields[at].number, *value)


def _revalue(rng: random.Random, fields: list[WireField]) -> None:
    at = rng.randrange(len(fields))
    one = fields[at]
    value: int | bytes
    if one.kind == VARINT:
        value = rng.choice((*HUGE, int(one.value) + 1 if isinstance(one.value, int) else 0))
    elif one.kind == LENGTH:
        assert isinstance(one.value, bytes)
        value = rng.choice((b"", one.value[:-1], one.value * 2, mutate_bytes(rng, one.value), b"\xff" * 9 + b"\x01"))
    else:
        import struct

        value = struct.pack("<d" if one.kind == FIXED64 else "<f", _small(rng.choice(REALS), one.kind))
    fields[at] = WireField(one.number, one.kind, value)


def _nest(rng: random.Random, fields: list[WireField]) -> None:
    at = rng.randrange(len(fields))
    inner = build_wire(fields)
    for _ in range(rng.choice((1, 20, 120))):
        inner = build_wire([WireField(fields[at].number, LENGTH, inner)])
        if len(inner) > MAX_BYTES:
            return
    fields[at] = WireField(fields[at].number, LENGTH, inner)


_CHANGES: Final[tuple[Change, ...]] = (_drop, _double, _repeat, _swap, _renumber, _retype, _revalue, _revalue, _nest)


def _is_message(one: WireField) -> bool:
    return isinstance(one.value, bytes) and one.kind == LENGTH and len(one.value) > 1 and bool(parse_wire(one.value))


def _small(value: float, kind: int) -> float:
    return value if kind == FIXED64 or abs(value) < 1e38 or value != value or abs(value) == float("inf") else 3e38


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number and where it ends; a place beyond the data where it does not end."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, len(data) + 1


def write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
