"""Rows as int8 in blocks of 32 along the row: lossy, an opt-in, part of the numeric class. Values only.

    row   = scales, bf16 little-endian, one per block ‖ values, int8 in [-127, 127], one per column
    block = 32 columns of one row; a row's last block may be shorter

A scale is the block's largest magnitude / 127, rounded to bf16, which has fp32's range in two bytes; fp16 would lose
the digits of rows with small values. The rounding moves the largest value to at most 127.25 scales, which is still 127.
Value × scale has 15 bits, so it is exact in float32 on every device, and decoded rows encode to the same bytes again.
Nothing here looks beyond one row. Design: docs/design/session-protocol.md.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.compute.devices import with_float64
from swarm.protocol.messages import INT8_BLOCK, INT8_SCALE_BYTES

LEVELS = 127
MIN_SCALE = torch.finfo(torch.bfloat16).tiny
"""Smallest scale, also that of a block of zeros: 2^-126."""
MAX_SCALE = {torch.float32: 2.0**121 * 129 / 128, torch.bfloat16: 2.0**121, torch.float16: 512.0}
"""Largest scale of which 127 times is finite in a compute dtype: finite values stay finite."""
SCALE_DTYPE = np.dtype("<i2")


def pack(rows: torch.Tensor) -> NDArray[np.uint8]:
    """Quantise `rows` [n, d] on their device, each value to the nearest step, ties to even; [n, row bytes] on the CPU.

    Raises:
        LocalProtocolError: a value is not finite.
    """
    count, width = rows.shape
    steps = _blocks(rows.detach().to(torch.float32, copy=True))  # the one large temporary: the rest is done in place
    largest = torch.maximum(steps.amax(dim=-1), steps.amin(dim=-1).neg_())
    if not math.isfinite(with_float64(largest).sum(dtype=torch.float64).item()):
        raise LocalProtocolError("rows", "a value is not finite, int8 cannot hold it")
    scales = (largest / LEVELS).clamp_(MIN_SCALE, MAX_SCALE[rows.dtype]).to(torch.bfloat16)
    steps.div_(scales.float()[..., None]).round_().clamp_(-LEVELS, LEVELS)
    split = scales.shape[1] * INT8_SCALE_BYTES
    packed = torch.empty(count, split + width, dtype=torch.uint8, device=rows.device)
    packed[:, split:].view(torch.int8).copy_(steps.view(count, -1)[:, :width])
    octets: NDArray[np.uint8] = packed.cpu().numpy()
    octets[:, :split] = scales.view(torch.int16).cpu().numpy().astype(SCALE_DTYPE, copy=False).view(np.uint8)
    return octets


def unpack(octets: NDArray[np.uint8], width: int, device: torch.device | str) -> torch.Tensor:
    """The rows [n, width] in float32 on `device`; a scale that is not finite makes its block's values so.

    Raises:
        RemoteProtocolError: a scale is not positive.
    """
    count, split = len(octets), octets.shape[1] - width
    bits = octets[:, :split].copy().view(SCALE_DTYPE).astype(SCALE_DTYPE.newbyteorder("="), copy=False)
    if (bits <= 0).any():
        raise RemoteProtocolError("rows", "an int8 block's scale is not positive")
    scales = torch.from_numpy(bits).view(torch.bfloat16).to(device)
    values = torch.from_numpy(octets[:, split:].copy().view(np.int8)).to(device)
    return _blocks(values.float()).mul_(scales.float()[..., None]).view(count, -1)[:, :width]


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """[n, d] as [n, blocks, 32], n > 0, padded with zeros."""
    missing = -rows.shape[1] % INT8_BLOCK
    filled = torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()
    return filled.view(len(rows), -1, INT8_BLOCK)
