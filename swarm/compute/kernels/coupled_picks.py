"""Coupled picks on a card: the argmax of `logit / T + g(seed, position, token)`, with the noise made where it is used.

The law is `swarm.compute.gumbel`'s: integers are the same, and so are the float64 operations but for the logarithms'
last bits. Consumer cards have one float64 unit for 64 of float32, so a pick takes two kernels:

    _bounds   every token in float32: how high and how low its score may lie; per block of tokens the highest of both
    _settle   one program a row, in float64: the blocks whose upper bound reaches the best lower bound, mostly one

The token with the best float64 score lies in a block that is settled, so the bounds change what is computed and never
what is picked. They are far wider than float32's errors: 2⁻¹² around the best score, which for one row in thousands
makes a second block be settled. Equal scores go to the lowest id. Every row has a seed, a position and a temperature of
its own, so the picks of several sessions are one launch. Oracle: `swarm.compute.picks.device_picks.plain_picks`.
Design: docs/design/session-protocol.md. Runs on a CPU with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

DeviceWords = Any
"""Several tensors."""

BLOCK = 1024
"""Tokens whose bounds are kept together."""
MAX_BLOCKS = 4096
"""Blocks of a row that one program looks through."""

_SLACK = tl.constexpr(2.0**-12)
"""Bound on the float32 noise's error where 1 − u ≥ 2⁻²⁰; the error is below 2⁻¹⁶ even by a card's quick log2."""
_SLACK_BELOW = tl.constexpr(1.0)
"""The same where 1 − u is smaller: the law's own u is rounded there, to what only float64 shows; g lies below −2.6."""
_SLACK_SCALED = tl.constexpr(2.0**-20)
"""Bound on the relative error of `logit / T` in float32: three roundings and a quick division."""
_SLACK_FLUSHED = tl.constexpr(2.0**-125)
"""Bound on the error of 1 / T where it is so small that a card makes it 0."""


@triton.jit
def _philox(position: tl.tensor, block: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> DeviceWords:
    """Philox4x32-10 of the counters (position, block, 0, 0), uint32."""
    word0, word1 = position, block
    word2, word3 = tl.zeros_like(block), tl.zeros_like(block)
    for _ in tl.static_range(10):
        product0 = word0.to(tl.uint64) * 0xD2511F53
        product1 = word2.to(tl.uint64) * 0xCD9E8D57
        word0 = (product1 >> 32).to(tl.uint32) ^ word1 ^ key0
        word2 = (product0 >> 32).to(tl.uint32) ^ word3 ^ key1
        word1, word3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 = tl.add(key0, 0x9E3779B9, sanitize_overflow=False)
        key1 = tl.add(key1, 0xBB67AE85, sanitize_overflow=False)
    return word0, word1, word2, word3


@triton.jit
def _words(seed: tl.tensor, position: tl.tensor, start: tl.tensor, tokens: tl.constexpr) -> DeviceWords:
    """The law's (lo, hi) of the ids [start, start + tokens), start even."""
    block = (start // 2 + tl.arange(0, tokens // 2)).to(tl.uint32)
    key = seed.to(tl.uint64)
    at = tl.zeros_like(block) + position.to(tl.uint32)
    word0, word1, word2, word3 = _philox(at, block, key.to(tl.uint32), (key >> 32).to(tl.uint32))
    return tl.interleave(word0, word2), tl.interleave(word1, word3)


@triton.jit
def _rough_gumbel(lo: tl.tensor, hi: tl.tensor) -> DeviceWords:
    """The law's g in float32, and a bound on its error.

    Both −log1p(−u) below ½ and −log(1 − u) above it are sums of one sign, so their relative errors stay small.
    """
    u = (hi.to(tl.float32) * 4294967296.0 + lo.to(tl.float32) + 0.5) * 5.421010862427522e-20  # 2⁻⁶⁴
    z = u / (2.0 - u)  # −log1p(−u) = 2 artanh z
    square = z * z
    series = 1.0 / 11 + square * (1.0 / 13)
    series = 1.0 / 7 + square * (1.0 / 9 + square * series)
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * series))
    rest = (
        (hi ^ 0xFFFFFFFF).to(tl.float32) * 4294967296.0 + (lo ^ 0xFFFFFFFF).to(tl.float32) + 0.5
    ) * 5.421010862427522e-20
    rate = tl.where(hi < 0x80000000, 2.0 * z * series, -tl.log(rest))
    return -tl.log(rate), tl.where(hi < 0xFFFFF000, _SLACK, _SLACK_BELOW)


@triton.jit
def _exact_gumbel(lo: tl.tensor, hi: tl.tensor) -> tl.tensor:
    """The law's g in float64; log1p by Kahan's identity, whose divisor is exact."""
    one = tl.full(lo.shape, 1.0, tl.float64)
    u = (hi.to(tl.float64) * 4294967296.0 + lo.to(tl.float64) + 0.5) * 5.421010862427522e-20
    u = tl.minimum(u, one - 1.1102230246251565e-16)  # 1 − 2⁻⁵³
    rest = one - u
    below = tl.where(rest == one, -one, rest - one)
    rate = tl.where(rest == one, u, tl.log(rest) * (u / below))
    return -tl.log(rate)


@triton.jit
def _request(requests: tl.tensor, row: tl.tensor) -> DeviceWords:
    """A row's seed, position and temperature, which is 0 for no noise."""
    seed, position = tl.load(requests + row * 3), tl.load(requests + row * 3 + 1)
    return seed, position, tl.load(requests + row * 3 + 2).to(tl.float64, bitcast=True)


@triton.jit
def _bounds(  # noqa: PLR0913 - a kernel's
    logits: tl.tensor,
    row_stride: tl.tensor,
    requests: tl.tensor,
    highs: tl.tensor,
    lows: tl.tensor,
    vocab_size: tl.tensor,
    blocks: tl.tensor,
    tokens: tl.constexpr,
) -> None:
    """Per row and block of tokens, bounds on its best score; the lower one is NaN where a logit is NaN or +∞."""
    row, number = tl.program_id(1).to(tl.int64), tl.program_id(0)
    seed, position, temperature = _request(requests, row)
    start = number.to(tl.int64) * tokens
    ids = start + tl.arange(0, tokens)
    read = tl.load(logits + row * row_stride + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
    is_out, is_bad = read == float("-inf"), (read != read) | (read == float("inf"))
    logit = tl.where(is_out | is_bad, 0.0, read)
    high, low = logit, logit
    if temperature > 0:
        inverse = 1.0 / temperature.to(tl.float32)
        lo, hi = _words(seed, position, start, tokens)
        gumbel, slack = _rough_gumbel(lo, hi)
        scaled = logit * inverse
        slack += tl.abs(scaled) * _SLACK_SCALED + tl.abs(logit) * _SLACK_FLUSHED
        high, low = scaled + gumbel + slack, scaled + gumbel - slack
        high = tl.where(high == high, high, -3.0e38)  # a finite logit whose scaled value lies below all float32
        low = tl.where(low == low, low, float("-inf"))
    spoilt = tl.max(is_bad.to(tl.int32), 0) > 0
    lowest = tl.max(tl.where(is_out, float("-inf"), low), 0)
    tl.store(highs + row * blocks + number, tl.max(tl.where(is_out, float("-inf"), high), 0))
    tl.store(lows + row * blocks + number, tl.where(spoilt, float("nan"), lowest))


@triton.jit
def _settle(  # noqa: PLR0913 - a kernel's
    logits: tl.tensor,
    row_stride: tl.tensor,
    requests: tl.tensor,
    highs: tl.tensor,
    lows: tl.tensor,
    picks: tl.tensor,
    vocab_size: tl.tensor,
    blocks: tl.tensor,
    tokens: tl.constexpr,
    room: tl.constexpr,
) -> None:
    """One row: the best token of the blocks that may hold it; −1 where the row has no finite maximum."""
    row = tl.program_id(0).to(tl.int64)
    seed, position, temperature = _request(requests, row)
    number = tl.arange(0, room)
    there = number < blocks
    high = tl.load(highs + row * blocks + number, there, other=float("-inf"))
    low = tl.load(lows + row * blocks + number, there, other=float("-inf"))
    is_bad = tl.max((low != low).to(tl.int32), 0)
    able = there & (high >= tl.max(tl.where(low == low, low, float("-inf")), 0))
    best = tl.full([], float("-inf"), tl.float64)
    pick = tl.full([], -1, tl.int64)
    at = tl.min(tl.where(able, number, room), 0)
    while at < blocks:
        start = at.to(tl.int64) * tokens
        ids = start + tl.arange(0, tokens)
        logit = tl.load(logits + row * row_stride + ids, ids < vocab_size, other=float("-inf"))
        score = logit.to(tl.float32).to(tl.float64)
        if temperature > 0:
            lo, hi = _words(seed, position, start, tokens)
            score = score / temperature + _exact_gumbel(lo, hi)
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, ids, vocab_size), 0).to(tl.int64)
        pick = tl.where(top > best, first, pick)
        best = tl.maximum(top, best)
        at = tl.min(tl.where(able & (number > at), number, room), 0)
    tl.store(picks + row, tl.where(is_bad > 0, -1, pick))


@triton.jit
def _noise(
    requests: tl.tensor, rows: tl.tensor, vocab_size: tl.tensor, tokens: tl.constexpr, exact: tl.constexpr
) -> None:
    """Rows of noise alone, in float64 or float32."""
    row, start = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * tokens
    seed, position, _ = _request(requests, row)
    lo, hi = _words(seed, position, start, tokens)
    ids = start + tl.arange(0, tokens)
    if exact:
        gumbel = _exact_gumbel(lo, hi)
    else:
        gumbel, _ = _rough_gumbel(lo, hi)
    tl.store(rows + row * vocab_size + ids, gumbel, ids < vocab_size)


def takes(logits: torch.Tensor) -> bool:
    """Whether the kernels pick after such logits."""
    is_float = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_float and logits.stride(1) == 1 and logits.shape[1] <= BLOCK * MAX_BLOCKS


@torch.library.custom_op("canopy::coupled_picks", mutates_args=())
def coupled_picks(logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
    """The pick after each row, without a word to the host.

    Args:
        logits: [rows, vocab_size] as `takes` wants them; −∞ for tokens that must not be picked.
        requests: int64 [rows, 3]: seed, position of the picked token, and the bits of the float64 temperature.

    Returns:
        int64 [rows]; −1 for a row that holds NaN or +∞, or nothing finite.
    """
    rows, vocab_size = logits.shape
    picks = torch.empty(rows, dtype=torch.long, device=logits.device)
    if rows == 0:
        return picks
    blocks = triton.cdiv(vocab_size, BLOCK)
    highs = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    common = logits, logits.stride(0), requests
    _bounds[blocks, rows](*common, highs[0], highs[1], vocab_size, blocks, tokens=BLOCK)
    room = triton.next_power_of_2(blocks)
    _settle[rows,](*common, highs[0], highs[1], picks, vocab_size, blocks, tokens=BLOCK, room=room)
    return picks


@coupled_picks.register_fake
def _(logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(len(requests), dtype=torch.long)


@torch.library.custom_op("canopy::gumbel_rows", mutates_args=())
def gumbel_rows(requests: torch.Tensor, vocab_size: int, exact: bool) -> torch.Tensor:
    """Rows of noise.

    Args:
        requests: as in `coupled_picks`; the temperatures are not read.
        vocab_size: ids of a row.
        exact: whether in float64, else in float32, right to 2⁻¹⁶ but where g is below −2.6.

    Returns:
        [rows, vocab_size]
    """
    dtype = torch.float64 if exact else torch.float32
    rows = torch.empty(len(requests), vocab_size, dtype=dtype, device=requests.device)
    if rows.numel():
        _noise[triton.cdiv(vocab_size, BLOCK), len(requests)](requests, rows, vocab_size, tokens=BLOCK, exact=exact)
    return rows


@gumbel_rows.register_fake
def _(requests: torch.Tensor, vocab_size: int, exact: bool) -> torch.Tensor:
    dtype = torch.float64 if exact else torch.float32
    return requests.new_empty(len(requests), vocab_size, dtype=dtype)
