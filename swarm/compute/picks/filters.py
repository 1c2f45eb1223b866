"""Filters of picks: top-k, top-p, min-p, in this order; each keeps a prefix of the order (−logit, id). Pure.

Float64 behind the logits. `filtered_at_once` never waits for a device: it names the rows whose nucleus outgrows the
head, which `filtered` sorts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarm.protocol.pick_rules import Sampling

_HEAD_TOKENS = 1024  # top-p first looks at this many best tokens, and sorts a whole row only if they do not suffice


def filters(sampling: Sampling) -> bool:
    """Whether any filter may drop a token."""
    return sampling.top_k is not None or (sampling.top_p or 1) < 1 or bool(sampling.min_p)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Float64 `logit / T`, −∞ where a filter drops the token.

    Args:
        logits: [rows, vocab_size]
        sampling: of a temperature above 0.
    """
    return _filtered(logits, sampling, waits=True)[0]


def filtered_at_once(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The logits with −∞ where a filter drops the token, without waiting for the device.

    Args:
        logits: [rows, vocab_size]
        sampling: of a temperature above 0.

    Returns:
        The logits, and bool [rows]: rows of which too many were dropped, since their nucleus outgrows the head.
    """
    scaled, outgrown = _filtered(logits, sampling, waits=False)
    return logits.masked_fill(scaled == -math.inf, -math.inf), outgrown


def scaled_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """`logit / T` in fresh float64."""
    values = logits.to(torch.float64, copy=True)
    if logits.device.type == "cpu":
        return values.div_(sampling.temperature)
    # A card would multiply by the inverse of a number, which is not the law's last bit.
    return values.div_(torch.full((), sampling.temperature, dtype=torch.float64, device=logits.device))


def _filtered(logits: Tensor, sampling: Sampling, *, waits: bool) -> tuple[Tensor, Tensor]:
    """Scaled and filtered logits, and which rows' nucleus outgrew the head; none of them where this may wait."""
    scaled = scaled_logits(logits, sampling)
    outgrown = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    dropped = _dropped if waits and logits.device.type == "cpu" else _dropped_at_once
    vocab_size = logits.shape[1]
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    if sampling.top_p is not None and sampling.top_p < 1:
        lasts, counts, outgrown = _nucleus(logits, scaled, top_k, sampling, waits=waits)
        scaled.masked_fill_(dropped(logits, lasts, counts), -math.inf)
    elif top_k < vocab_size:
        last = logits.topk(top_k).values[:, -1]
        counts = torch.full_like(last, top_k, dtype=torch.long)
        scaled.masked_fill_(dropped(logits, last, counts), -math.inf)
    if sampling.min_p:
        scaled.masked_fill_(_weights(scaled, scaled.amax(dim=1)) < sampling.min_p, -math.inf)
    return scaled, outgrown


def _nucleus(
    logits: Tensor, scaled: Tensor, top_k: int, sampling: Sampling, *, waits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-p after top-k: each row's last kept logit, its number of kept tokens, and whether it outgrew the head.

    A token stays while the mass before it is below top_p, so the first one always does. How ties are ordered
    changes neither result, so values alone are sorted.
    """
    assert sampling.top_p is not None
    top = scaled.amax(dim=1)
    no_top_k = top_k == logits.shape[1]
    best = logits.topk(min(top_k, _HEAD_TOKENS) if no_top_k else top_k).values
    weights = _weights(scaled_logits(best, sampling), top)
    mass = sampling.top_p * (_weights(scaled, top) if no_top_k else weights).sum(dim=1, keepdim=True)
    counts = (weights.cumsum(dim=1) < mass).sum(dim=1) + 1
    lasts = best.gather(1, (counts[:, None] - 1).clamp(max=best.shape[1] - 1))[:, 0]
    outgrown = (counts > best.shape[1]) & (best.shape[1] < top_k)
    if waits and no_top_k and best.shape[1] < top_k:
        short = outgrown.nonzero()[:, 0]
        if len(short):
            best = _sorted(logits[short])
            weights = _weights(scaled_logits(best, sampling), top[short])
            counts[short] = (weights.cumsum(dim=1) < mass[short]).sum(dim=1) + 1
            lasts[short] = best.gather(1, (counts[short, None] - 1).clamp(max=top_k - 1))[:, 0]
    return lasts, counts.clamp(max=top_k), outgrown


def _sorted(logits: Tensor) -> Tensor:
    """Whole rows in descending order: slow on a CPU, so only for rows whose nucleus outgrows the head."""
    return logits.sort(dim=1, descending=True).values


def _dropped(logits: Tensor, lasts: Tensor, counts: Tensor) -> Tensor:
    """Mask of the tokens that a filter drops, bool [rows, vocab_size].

    Args:
        logits: [rows, vocab_size]
        lasts: [rows] logit of the last token that stays.
        counts: [rows] how many stay, in the order (−logit, id).
    """
    drop = logits < lasts[:, None]
    surplus = (logits.shape[1] - counts - drop.sum(dim=1)).tolist()
    for row, extra in enumerate(surplus):
        if extra:
            ties = (logits[row] == lasts[row]).nonzero()[:, 0]
            drop[row, ties[-extra:]] = True
    return drop


def _dropped_at_once(logits: Tensor, lasts: Tensor, counts: Tensor) -> Tensor:
    """`_dropped` without a look at the values, for devices that one would wait for: the first ties by id stay."""
    drop, ties = logits < lasts[:, None], logits == lasts[:, None]
    tied = ties.cumsum(dim=1, dtype=torch.int32)  # [rows, vocab_size]: how many up to each id
    above = logits.shape[1] - drop.sum(dim=1) - tied[:, -1]
    return drop | (ties & (tied > (counts - above)[:, None]))


def _weights(scaled: Tensor, top: Tensor) -> Tensor:
    """Softmax over each row, times a constant that makes the best token weigh exactly 1."""
    return (scaled - top[:, None]).exp_()
