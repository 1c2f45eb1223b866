"""Coupled picks on a device: noise is made there, and nothing of the vocabulary's size crosses the bus.

    requests ──one pinned copy──▶ device: filters, noise, argmax for all sessions ──one copy of ids──▶ host

With Triton the kernels of `swarm.compute.kernels.coupled_picks` do it, else plain torch, which is their oracle. Both
follow the law of `swarm.compute.gumbel`: the same integers, and logarithms that may differ in their last bits. So a
device picks otherwise than a CPU only where two scores are within some 10⁻¹⁵ of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.compute.kernels.support import kernel_support
from swarm.compute.picks.filters import filtered, filtered_at_once, filters
from swarm.protocol.pick_rules import Sampling

HostNumbers = Sequence[int] | NDArray[np.int64]


_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_BELOW_ONE = 1.0 - 2.0**-53
_AT_ONCE = 1 << 21  # numbers of noise that plain torch makes together: some 200 MB of temporaries
_FILTERED_ROWS = 16  # rows filtered at once: 20 MB per float64 temporary at a vocabulary of 152k
_NOT_FINITE, _OUTGROWN = -1, -2  # in the one copy that comes back, in place of ids


def to_device(numbers: HostNumbers, device: torch.device) -> torch.Tensor:
    """Integers as an int64 tensor on a device.

    A plain `torch.tensor(…, device=…)` waits until the card has done all that was asked of it before. Pinned memory is
    kept until the copy is done.
    """
    values = torch.as_tensor(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PickRequest:
    """How to pick after some rows of logits.

    Attributes:
        positions: of the tokens to be picked, one per row from there on.
    """

    first: int
    positions: Sequence[int]
    sampling: Sampling

    @property
    def end(self) -> int:
        """The row behind its last one."""
        return self.first + len(self.positions)


def picks_on(device: torch.device) -> bool:
    """Whether picks after logits on this device are made there: it has float64, and is not the CPU."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in ("cpu", "mps")


def device_picks(logits: Tensor, requests: Sequence[PickRequest]) -> list[list[int] | None]:
    """The picks after rows of some sessions, in one wait for the device; one more where a nucleus outgrows the head.

    Args:
        logits: float32 or less [rows, vocab_size]
        requests: in the order of their rows; what lies between them is not picked after.

    Returns:
        One entry per request: [rows] ids; None where a row holds NaN or has no finite maximum.
    """
    if not sum(len(request.positions) for request in requests):
        return [[] for _ in requests]
    table = to_device(_table(requests), logits.device)
    found: list[Tensor] = []
    done = 0
    for first, end, sampling in _pieces(requests):
        part = table[done : done + end - first]
        found.append(_picked(logits[first:end], part, sampling))
        done += end - first
    flat: list[int] = torch.cat(found).tolist()  # the one wait
    picks: list[list[int] | None] = []
    for request in requests:
        own, flat = flat[: len(request.positions)], flat[len(request.positions) :]
        picks.append(_settled(own, logits, request))
    return picks


def noise_rows(
    seed: int, positions: Sequence[int], vocab_size: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Rows of the picks' noise on a device.

    Args:
        positions: of the picked tokens.
        vocab_size: ids of a row.
        device: one with float64.
        dtype: float64; or float32, for guesses, which may be off by 2⁻¹⁶.

    Returns:
        [positions, vocab_size]
    """
    requests = _table([PickRequest(0, positions, Sampling(seed))])
    return _noise(to_device(requests, device), vocab_size, dtype)


def _table(requests: Sequence[PickRequest]) -> NDArray[np.int64]:
    """[rows, 3]: seed, position, and the bits of the temperature, as the kernels read them."""
    rows = [(one.sampling.seed, at, one.sampling.temperature) for one in requests for at in one.positions]
    table = np.empty((len(rows), 3), dtype=np.int64)
    table[:, 0] = np.array([seed for seed, _, _ in rows], dtype=np.uint64).view(np.int64)
    table[:, 1] = [position for _, position, _ in rows]
    table[:, 2] = np.array([temperature for _, _, temperature in rows], dtype=np.float64).view(np.int64)
    return table


def _pieces(requests: Sequence[PickRequest]) -> Iterator[tuple[int, int, Sampling | None]]:
    """Rows [first, end) that are picked together: neighbours without filters, and rows of one filter.

    Returns:
        The sampling too, where it filters.
    """
    for is_plain, group in groupby(requests, lambda request: not _is_filtered(request.sampling)):
        if not is_plain:
            for request in group:
                for first in range(request.first, request.end, _FILTERED_ROWS):
                    yield first, min(first + _FILTERED_ROWS, request.end), request.sampling
            continue
        start = end = -1
        for request in group:
            if request.first != end and start < end:
                yield start, end, None
            start, end = request.first if request.first != end else start, request.end
        yield start, end, None


def _is_filtered(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and filters(sampling)


def _picked(logits: Tensor, table: Tensor, sampling: Sampling | None) -> Tensor:
    """Ids int64 [rows] after rows that are filtered alike, on the device; negative ones for rows without."""
    if sampling is None:
        return _argmax(logits, table)
    kept, outgrown = filtered_at_once(logits, sampling)
    return torch.where(outgrown, _OUTGROWN, _argmax(kept, table))


def _settled(own: list[int], logits: Tensor, request: PickRequest) -> list[int] | None:
    """Picks as they are, with those of rows whose nucleus outgrew the head made by sorting them."""
    if _NOT_FINITE in own:
        return None
    late = [row for row, token in enumerate(own) if token == _OUTGROWN]
    if late:
        table = to_device(
            _table([PickRequest(0, [request.positions[row] for row in late], request.sampling)]), logits.device
        )
        rows = logits[to_device([request.first + row for row in late], logits.device)]
        kept = rows.masked_fill(filtered(rows, request.sampling).isneginf(), -torch.inf)
        for row, token in zip(late, _argmax(kept, table).tolist(), strict=True):
            own[row] = token
    return None if _NOT_FINITE in own else own


def _argmax(logits: Tensor, table: Tensor) -> Tensor:
    """The token of the highest score after each row, the lowest id of equals: int64 [rows], `_NOT_FINITE` for none."""
    if kernel_support(logits.device).kernels:
        from swarm.compute.kernels import coupled_picks

        if coupled_picks.takes(logits):
            picks: Tensor = coupled_picks.coupled_picks(logits, table)
            return picks
    return plain_picks(logits, table)


def plain_picks(logits: Tensor, table: Tensor) -> Tensor:
    """What the kernel gives, in plain torch.

    Args:
        logits: [rows, vocab_size]
        table: int64 [rows, 3]: seed, position, and the bits of the float64 temperature.
    """
    best = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    temperatures = table[:, 2].contiguous().view(torch.float64)[:, None]
    is_greedy = temperatures == 0
    step = max(1, _AT_ONCE // logits.shape[1])
    for first in range(0, len(logits), step):
        part = slice(first, first + step)
        greedy = is_greedy[part]
        noise = _plain_noise(table[part], logits.shape[1]).masked_fill_(greedy, 0.0)
        scores = logits[part].double() / temperatures[part].masked_fill(greedy, 1.0)
        best[part] = scores.add_(noise).argmax(dim=1)
    return torch.where(logits.amax(dim=1).isfinite(), best, _NOT_FINITE)


def _noise(table: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    if kernel_support(table.device).kernels:
        from swarm.compute.kernels import coupled_picks

        noise: Tensor = coupled_picks.gumbel_rows(table, vocab_size, exact=dtype == torch.float64)
        return noise
    step = max(1, _AT_ONCE // vocab_size)
    rows = [_plain_noise(part, vocab_size).to(dtype) for part in torch.split(table, step)]
    return torch.cat(rows)


def _plain_noise(table: Tensor, vocab_size: int) -> Tensor:
    """The law in int64, whose products wrap as 64-bit words do: float64 [rows, vocab_size]."""
    blocks = torch.arange((vocab_size + 1) // 2, device=table.device)[None]
    key0, key1 = table[:, :1] & _WORD, (table[:, :1] >> 32) & _WORD
    word0, word1 = table[:, 1:2].expand(-1, blocks.shape[1]), blocks
    word2 = word3 = torch.zeros_like(blocks)
    for _ in range(_ROUNDS):
        product0, product1 = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]
        word0 = (product1 >> 32 & _WORD) ^ word1 ^ key0
        word2 = (product0 >> 32 & _WORD) ^ word3 ^ key1
        word1, word3 = product1 & _WORD, product0 & _WORD
        key0, key1 = key0 + _KEY_STEPS[0] & _WORD, key1 + _KEY_STEPS[1] & _WORD
    pairs = torch.stack([_uniform(word0, word1), _uniform(word2, word3)], dim=2)  # [rows, blocks, 2]
    return pairs.flatten(1)[:, :vocab_size].neg().log1p_().neg_().log_().neg_()


def _uniform(lo: Tensor, hi: Tensor) -> Tensor:
    return hi.double().mul_(2.0**32).add_(lo).add_(0.5).mul_(2.0**-64).clamp_(max=_BELOW_ONE)
