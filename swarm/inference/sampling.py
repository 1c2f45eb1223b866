"""Picks: the token the target chooses after a tree node. Pure; owns no noise law and no tree.

A pick is the argmax of `score = logit / T + g(seed, position, token)` over what the filters leave; g is Gumbel noise
(`swarm.inference.gumbel`), so a pick is a draw from the filtered softmax that anyone who knows the seed can repeat.
Temperature 0 means no noise. Filters apply in the order top-k, top-p, min-p; each keeps a prefix of the order (−logit,
id). All arithmetic behind the logits is float64, and every tie goes to the lowest id.

Source: Maddison et al., "A* sampling", NeurIPS 2014, section 2 (the Gumbel-max trick).
Design: docs/design/session-protocol.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.inference.gumbel import gumbel_row
from swarm.protocol.pick_rules import Sampling

Noise = npt.NDArray[np.float64]
PickLogProbs = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of a pick; the likeliest tokens with theirs, best first."""

MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0: logit / T stays finite for every float32 logit."""

_HEAD_TOKENS = 1024  # top-p first looks at this many best tokens, and sorts a whole row only if they do not suffice
_BATCH_ROWS = 8  # float64 rows scored at once: 8 MB at a vocabulary of 128k


def check(sampling: Sampling, vocab_size: int = 1) -> None:
    """Refuse sampling options that have no meaning.

    Raises:
        ConfigError: its message names the field.
    """
    temperature, top_k, top_p, min_p = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    rules = (
        ("vocab_size", vocab_size, 1 <= vocab_size <= 2**33, "must lie in [1, 2**33]"),
        ("seed", sampling.seed, 0 <= sampling.seed < 2**64, "must lie in [0, 2**64)"),
        (
            "temperature",
            temperature,
            temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf,
            "must be 0 or 1e-6 and more",
        ),
        ("top_k", top_k, top_k is None or 1 <= top_k < 2**32, "must lie in [1, 2**32)"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "must lie in (0, 1]"),
        ("min_p", min_p, min_p is None or 0 <= min_p <= 1, "must lie in [0, 1]"),
    )
    for field, value, fits, law in rules:
        if not fits:
            raise ConfigError(f"{field} {law}, got {value}")
    problem = None if sampling.rules is None else sampling.rules.problem(vocab_size)
    if problem is not None:
        raise ConfigError(" ".join(problem))


def pick(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sampling,
    valid_tokens: int | None = None,
    noise: Callable[[int, int, int], Noise] = gumbel_row,
) -> list[int]:
    """The target's pick after each tree node.

    Args:
        logits: [rows, vocab_size], float32 or less, on any device that has float64.
        positions: [rows], each the position of the token to be picked, not of the node before it.
        sampling: the rule.
        valid_tokens: ids from here on are padding and are never picked; None for no padding.
        noise: makes a row of noise from (seed, position, vocab_size), once per distinct position; pass a cached
            `gumbel_row` where sweeps share positions.

    Returns:
        [rows] token ids.

    Raises:
        ConfigError: a row holds NaN or has no finite maximum.
    """
    logits = logits[:, :valid_tokens]
    _check_finite(logits)
    best = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    if sampling.temperature == 0:
        best = logits.argmax(dim=1)  # torch promises the first of equal maxima, here and below
    else:
        for rows, scores in _scored(logits, positions, sampling, noise):
            best[rows] = scores.argmax(dim=1)
    picks: list[int] = best.tolist()
    return picks


def ranking_scores(
    draft_logits: Tensor,
    positions: Sequence[int],
    sampling: Sampling,
    noise: Callable[[int, int, int], Noise] = gumbel_row,
) -> Tensor:
    """What a drafter ranks candidates by: the target's own score, computed from the draft's logits.

    Args:
        draft_logits: [rows, vocab_size]
        positions: as in `pick`.
        sampling: as in `pick`.
        noise: as in `pick`.

    Returns:
        float64 [rows, vocab_size]: filtered tokens are -inf; at temperature 0 the scores are the logits themselves.
    """
    if sampling.temperature == 0:
        return draft_logits.to(torch.float64, copy=True)
    ranking = torch.empty(draft_logits.shape, dtype=torch.float64, device=draft_logits.device)
    for rows, scores in _scored(draft_logits, positions, sampling, noise):
        ranking[rows] = scores
    return ranking


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law of a pick: the softmax of what the filters leave; temperature above 0.

    Returns:
        float64 [rows, vocab_size]

    Raises:
        ConfigError: a row holds NaN or has no finite maximum.
    """
    _check_finite(logits)
    return _filtered(logits, sampling).softmax(dim=1)


def log_probs(logits: Tensor, picks: Sequence[int], top: int, valid_tokens: int | None = None) -> list[PickLogProbs]:
    """What the target itself thinks of its picks: of its own distribution, before any rule, temperature or filter.

    Args:
        logits: float32 [rows, vocab_size], as the head made them.
        picks: [rows] token ids.
        top: how many of the likeliest tokens are given too.
        valid_tokens: as in `pick`.

    Returns:
        [rows] natural logarithms, finite and at most 0.
    """
    logs = logits[:, :valid_tokens].float().log_softmax(dim=1).clamp_(torch.finfo(torch.float32).min, 0.0)
    own = logs.gather(1, torch.tensor(picks, device=logs.device)[:, None])[:, 0].tolist()
    best = logs.topk(min(top, logs.shape[1]), dim=1)
    rows = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [(value, tuple(zip(ids, values, strict=True))) for value, ids, values in rows]


def _check_finite(logits: Tensor) -> None:
    if not bool(logits.amax(dim=1).isfinite().all()):
        raise ConfigError("the model's logits are not finite: its weights or its dtype are not fit for use")


def _scored(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, noise: Callable[[int, int, int], Noise]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and their scores, few rows at a time, position after position: one row of noise is in memory."""
    if len(positions) != len(logits):
        raise ValueError(f"{len(positions)} positions for {len(logits)} rows of logits")
    rows_of: dict[int, list[int]] = {}
    for row, position in enumerate(positions):
        rows_of.setdefault(position, []).append(row)
    for position, rows in rows_of.items():
        gumbel = torch.from_numpy(noise(sampling.seed, position, logits.shape[1])).to(logits.device)
        for start in range(0, len(rows), _BATCH_ROWS):
            part = torch.tensor(rows[start : start + _BATCH_ROWS], device=logits.device)
            yield part, _filtered(logits[part], sampling).add_(gumbel)


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Float64 `logit / T`, -inf where a filter drops the token."""
    scaled = _scaled(logits, sampling)
    vocab_size = logits.shape[1]
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    if sampling.top_p is not None and sampling.top_p < 1:
        scaled.masked_fill_(_dropped(logits, *_nucleus(logits, scaled, top_k, sampling)), -math.inf)
    elif top_k < vocab_size:
        last = logits.topk(top_k).values[:, -1]
        scaled.masked_fill_(_dropped(logits, last, torch.full_like(last, top_k, dtype=torch.long)), -math.inf)
    if sampling.min_p:
        scaled.masked_fill_(_weights(scaled, scaled.amax(dim=1)) < sampling.min_p, -math.inf)
    return scaled


def _scaled(logits: Tensor, sampling: Sampling) -> Tensor:
    """`logit / T` in fresh float64."""
    return logits.to(torch.float64, copy=True).div_(sampling.temperature)


def _nucleus(logits: Tensor, scaled: Tensor, top_k: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Top-p after top-k: each row's last kept logit and its number of kept tokens, both [rows].

    A token stays while the mass before it is below top_p, so the first one always does. How ties are ordered
    changes neither result, so values alone are sorted.
    """
    assert sampling.top_p is not None
    top = scaled.amax(dim=1)
    no_top_k = top_k == logits.shape[1]
    best = logits.topk(min(top_k, _HEAD_TOKENS) if no_top_k else top_k).values
    weights = _weights(_scaled(best, sampling), top)
    mass = sampling.top_p * (_weights(scaled, top) if no_top_k else weights).sum(dim=1, keepdim=True)
    counts = (weights.cumsum(dim=1) < mass).sum(dim=1) + 1
    lasts = best.gather(1, (counts[:, None] - 1).clamp(max=best.shape[1] - 1))[:, 0]
    short = (counts > best.shape[1]).nonzero()[:, 0]
    if no_top_k and best.shape[1] < top_k and len(short):
        best = _sorted(logits[short])
        weights = _weights(_scaled(best, sampling), top[short])
        counts[short] = (weights.cumsum(dim=1) < mass[short]).sum(dim=1) + 1
        lasts[short] = best.gather(1, (counts[short, None] - 1).clamp(max=top_k - 1))[:, 0]
    return lasts, counts.clamp(max=top_k)


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


def _weights(scaled: Tensor, top: Tensor) -> Tensor:
    """Softmax over each row, times a constant that makes the best token weigh exactly 1."""
    return (scaled - top[:, None]).exp_()
