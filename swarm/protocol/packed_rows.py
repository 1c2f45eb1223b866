"""Hidden rows in fewer bytes, bit for bit: exponents by a Huffman code, the rest as it is. Pure.

    word      a value's upper 16 bits, turned left by one: the exponent comes first, the sign last
    packed    [fp32: lower 16 bits of all values] ‖ low bytes of all words ‖ DEFLATE of their high bytes

Exponents of a frame are few and alike. Mantissas are noise, which no coder makes smaller: 0.67 of bf16 and 0.84 of fp32
are the order-0 bound. What is not coded travels in full, so that packed rows grow to twice their bytes at most.
Design: docs/design/session-protocol.md.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.base.errors import RemoteProtocolError
from swarm.protocol.messages import Codec, Rows

LEAST_ROWS: Final = 16
"""Fewer rows travel as they are: their code would hardly be shorter than they are."""
WORTH: Final = 15 / 16
"""Rows that packing leaves larger travel as they are."""
BLOCK: Final = 1 << 18
"""Values that are turned at a time, so that what lies between stays in a core's cache."""
RAW_DEFLATE: Final = -15
"""zlib's window bits for a stream without header and checksum: TLS has one."""
WORD: Final = np.dtype("<u2")

Octets = NDArray[np.uint8]


def least_packed_bytes(rows: Rows) -> int:
    """What packed rows take at least: all but their exponents."""
    return rows.count * rows.width * (rows.codec.item_bytes - 1)


def pack(rows: Rows) -> Rows:
    """The same rows packed; or as they are, where that does not pay."""
    if rows.is_packed or rows.codec is Codec.INT8 or rows.count < LEAST_ROWS:
        return rows
    words, lower = _halves(rows.data, rows.codec)
    coder = zlib.compressobj(1, zlib.DEFLATED, RAW_DEFLATE, zlib.DEF_MEM_LEVEL, zlib.Z_HUFFMAN_ONLY)
    raw, codes = [] if lower is None else [lower.tobytes()], list[bytes]()
    for start in range(0, words.size, BLOCK):
        part = words[start : start + BLOCK]
        octets = ((part << 1) | (part >> 15)).astype(WORD, copy=False).view(np.uint8)
        raw.append(octets[0::2].tobytes())
        codes.append(coder.compress(octets[1::2].tobytes()))
    data = b"".join((*raw, *codes, coder.flush()))
    return replace(rows, data=data, is_packed=True) if len(data) < WORTH * rows.size_bytes else rows


def unpack(rows: Rows) -> Rows:
    """The rows that were packed; rows that were not, as they are.

    Raises:
        RemoteProtocolError: what is there is not exactly `count` rows.
    """
    if not rows.is_packed:
        return rows
    packed, values = np.frombuffer(rows.data, np.uint8), rows.count * rows.width
    coded = least_packed_bytes(rows)
    exponents, low = _inflated(packed[coded:], values), packed[coded - values : coded]
    made = bytearray(rows.size_bytes)
    words, lower = _halves(made, rows.codec)
    if lower is not None:
        lower[:] = packed[: 2 * values].view(WORD)
    for start in range(0, values, BLOCK):
        octets = np.stack((low[start : start + BLOCK], exponents[start : start + BLOCK]), axis=1)
        part = octets.view(WORD).reshape(-1)
        words[start : start + BLOCK] = (part >> 1) | (part << 15)
    return replace(rows, data=made, is_packed=False)


def _halves(data: bytes | bytearray | memoryview, codec: Codec) -> tuple[NDArray[np.uint16], NDArray[np.uint16] | None]:
    """The upper 16 bits of each value, and the lower ones where there are any; views of `data`."""
    words: NDArray[Any] = np.frombuffer(data, WORD)
    return (words, None) if codec.item_bytes == WORD.itemsize else (words[1::2], words[0::2])


def _inflated(codes: Octets, size: int) -> Octets:
    """Exactly `size` bytes; no more than one further byte is ever made."""
    decoder = zlib.decompressobj(RAW_DEFLATE)
    try:
        made = decoder.decompress(codes.data, size + 1)
    except zlib.error as error:
        raise RemoteProtocolError("rows", f"packed values cannot be read: {error}") from error
    if len(made) != size or not decoder.eof or decoder.unused_data:
        raise RemoteProtocolError("rows", f"packed values are not exactly {size}")
    return np.frombuffer(made, np.uint8)
