"""Hidden rows as tensors and as bytes: fp32, fp16, bf16, int8 blocks. Owns values; no header and no I/O.

Encoding into the tensor's own dtype is exact; a narrower one rounds to nearest, which belongs to the numeric class.
Each row is encoded by itself: its bytes are the same whatever rows travel with it.
Design: docs/design/session-protocol.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.compute import int8
from swarm.protocol.messages import Codec, Rows

DTYPES = {Codec.FP32: torch.float32, Codec.FP16: torch.float16, Codec.BF16: torch.bfloat16}
LOSSLESS = {dtype: codec for codec, dtype in DTYPES.items()}
BITS: dict[int, tuple[torch.dtype, np.dtype[Any]]] = {  # bytes per value → integers of that size, here and on the wire
    4: (torch.int32, np.dtype("<i4")),
    2: (torch.int16, np.dtype("<i2")),
}


def lossless_codec(dtype: torch.dtype) -> Codec:
    """The codec that keeps every bit of a compute dtype.

    Raises:
        LocalProtocolError: no codec holds this dtype.
    """
    if dtype not in LOSSLESS:
        raise LocalProtocolError("codec", f"no lossless codec for {dtype}; compute in float32, float16 or bfloat16")
    return LOSSLESS[dtype]


def encode_rows(rows: torch.Tensor, codec: Codec) -> Rows:
    """Encode rows for the wire. The result may share memory with `rows`: do not write to them afterwards.

    Args:
        rows: [n, d], of any float dtype, on CPU or CUDA.

    Raises:
        LocalProtocolError: not a matrix, or a value that is not finite and a codec that cannot carry it.
    """
    if rows.ndim != 2:
        raise LocalProtocolError("rows", f"a tensor of shape {tuple(rows.shape)} instead of [n, d]")
    count, width = rows.shape
    if codec is Codec.INT8:
        return Rows(codec, count, width, int8.pack(rows).reshape(-1).data if rows.numel() else b"")
    bits, wire = BITS[codec.item_bytes]
    values = rows.detach().to(DTYPES[codec]).cpu().contiguous()
    octets = values.view(bits).numpy().astype(wire, copy=False).reshape(-1).view(np.uint8)
    return Rows(codec, count, width, octets.data)


def decode_rows(rows: Rows, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Decode to [n, d] of `dtype` on `device`; on the CPU the tensor may share memory with `rows.data`.

    Raises:
        RemoteProtocolError: a value is not finite in `dtype`, a scale is not positive, or the size is wrong.
    """
    if len(rows.data) != rows.size_bytes:
        raise RemoteProtocolError("rows", f"{len(rows.data)} bytes of values instead of {rows.size_bytes}")
    if rows.size_bytes == 0:
        return torch.empty(rows.count, rows.width, dtype=dtype, device=device)
    if rows.codec is Codec.INT8:
        octets = np.frombuffer(rows.data, np.uint8).reshape(rows.count, -1)
        values = int8.unpack(octets, rows.width, device).to(dtype)
    else:
        values = _floats(rows).to(device).to(dtype)
    if not all_finite(values):
        raise RemoteProtocolError("rows", f"a value is not finite in {dtype}")
    return values


def _floats(rows: Rows) -> torch.Tensor:
    """Values of a codec that is a dtype, on the CPU."""
    _, wire = BITS[rows.codec.item_bytes]
    writable = rows.data if isinstance(rows.data, bytearray) else bytearray(rows.data)
    native = np.frombuffer(writable, dtype=wire).astype(wire.newbyteorder("="), copy=False)
    return torch.from_numpy(native).view(DTYPES[rows.codec]).reshape(rows.count, rows.width)


def check_width(rows: Rows, hidden_size: int) -> None:
    """Refuse rows of another model's width.

    Raises:
        RemoteProtocolError: the width is not `hidden_size`.
    """
    if rows.width != hidden_size:
        raise RemoteProtocolError("rows", f"width {rows.width} instead of the model's {hidden_size}")


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass without a temporary: aminmax passes NaN on."""
    if values.numel() == 0:
        return True
    smallest, largest = torch.aminmax(values)
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))
