"""Picks: the token the target chooses after a tree node. Pure; owns no noise law, no filter and no tree.

A pick is the argmax of `score = logit / T + g(seed, position, token)` over what the filters leave; g is Gumbel noise
(`swarm.compute.gumbel`), so a pick is a draw from the filtered softmax that anyone who knows the seed can repeat.
Temperature 0 means no noise. Filters apply in the order top-k, top-p, min-p (`swarm.compute.picks.filters`). All
arithmetic behind the logits is float64, and every tie goes to the lowest id. Picks after logits on a card are made
there (`swarm.compute.picks.device_picks`).

Source: Maddison et al., "A* sampling", NeurIPS 2014, section 2 (the Gumbel-max trick).
Design: docs/design/session-protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarm.base.errors import ConfigError
from swarm.compute.gumbel import gumbel_row
from swarm.compute.picks.device_picks import PickRequest, device_picks, noise_rows, picks_on, to_device
from swarm.compute.picks.filters import filtered
from swarm.protocol.pick_rules import Sampling

Noise = npt.NDArray[np.float64]
NoiseSource = Callable[[int, int, int], Noise]
"""Makes a row of noise from seed, position and vocabulary size, as `swarm.compute.gumbel.gumbel_row`."""
PickLogProbs = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of a pick; the likeliest tokens with theirs, best first."""


_BATCH_ROWS = 8  # float64 rows scored at once: 8 MB at a vocabulary of 128k


def check(sampling: Sampling, vocab_size: int = 1) -> None:
    """Refuse sampling options that have no meaning.

    Raises:
        ConfigError: its message names the field.
    """
    if not 1 <= vocab_size <= 2**33:
        raise ConfigError(f"vocab_size must lie in [1, 2**33], got {vocab_size}")
    if (problem := sampling.problem(vocab_size)) is not None:
        raise ConfigError(" ".join(problem))


def pick(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sampling,
    valid_tokens: int | None = None,
    noise: NoiseSource | None = None,
) -> list[int]:
    """The target's pick after each tree node.

    Args:
        logits: [rows, vocab_size], float32 or less, on any device.
        positions: [rows], each the position of the token to be picked, not of the node before it.
        valid_tokens: ids from here on are padding and are never picked; None for no padding.
        noise: makes a row of noise, once per distinct position; pass a cached `gumbel_row` where sweeps share
            positions. None is the law itself, on a card made there.

    Returns:
        [rows] token ids.

    Raises:
        ConfigError: a row holds NaN or has no finite maximum.
    """
    if len(positions) != len(logits):
        raise ValueError(f"{len(positions)} positions for {len(logits)} rows of logits")
    (picks,) = pick_together(logits, [PickRequest(0, positions, sampling)], valid_tokens, noise)
    if isinstance(picks, ConfigError):
        raise picks
    return picks


def pick_together(
    logits: Tensor,
    requests: Sequence[PickRequest],
    valid_tokens: int | None = None,
    noise: NoiseSource | None = None,
) -> list[list[int] | ConfigError]:
    """The picks of several sessions, on a card with one wait for all of them; arguments as in `pick`.

    Returns:
        One entry per request: [rows] token ids, or what `pick` would raise for it.
    """
    logits = logits[:, :valid_tokens]
    if noise is None and picks_on(logits.device):
        found = device_picks(logits, requests)
    else:
        if noise is None:
            logits = logits.cpu()  # of a device without float64
        parts = ((logits[request.first : request.end], request) for request in requests)
        found = [_picks(part, request.positions, request.sampling, noise or gumbel_row) for part, request in parts]
    return [_not_finite() if picks is None else picks for picks in found]


def _picks(logits: Tensor, positions: Sequence[int], sampling: Sampling, noise: NoiseSource) -> list[int] | None:
    """Picks by rows of noise; None where a row is not finite."""
    if not _are_finite(logits):
        return None
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
    noise: NoiseSource | None = None,
) -> Tensor:
    """What a drafter ranks candidates by: the target's own score, computed from the draft's logits.

    Args:
        draft_logits: [rows, vocab_size]

    Returns:
        float64 [rows, vocab_size]: filtered tokens are -inf; at temperature 0 the scores are the logits themselves.
    """
    if sampling.temperature == 0:
        return draft_logits.to(torch.float64, copy=True)
    if noise is None and picks_on(draft_logits.device):
        places = sorted(set(positions))
        device, vocab_size = draft_logits.device, draft_logits.shape[1]
        gumbel = noise_rows(sampling.seed, places, vocab_size, device, torch.float64)
        rows_of = to_device([places.index(position) for position in positions], device)
        return filtered(draft_logits, sampling).add_(gumbel[rows_of])
    ranking = torch.empty(draft_logits.shape, dtype=torch.float64, device=draft_logits.device)
    for rows, scores in _scored(draft_logits, positions, sampling, noise or gumbel_row):
        ranking[rows] = scores
    return ranking


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law of a pick: the softmax of what the filters leave; temperature above 0.

    Returns:
        float64 [rows, vocab_size]

    Raises:
        ConfigError: a row holds NaN or has no finite maximum.
    """
    if not _are_finite(logits):
        raise _not_finite()
    return filtered(logits, sampling).softmax(dim=1)


def log_probs(logits: Tensor, picks: Sequence[int], top: int, valid_tokens: int | None = None) -> list[PickLogProbs]:
    """What the target itself thinks of its picks: of its own distribution, before any rule, temperature or filter.

    Args:
        logits: float32 [rows, vocab_size], as the head made them.
        picks: [rows] token ids.
        top: how many of the likeliest tokens are given too.

    Returns:
        [rows] natural logarithms, finite and at most 0.
    """
    logs = logits[:, :valid_tokens].float().log_softmax(dim=1).clamp_(torch.finfo(torch.float32).min, 0.0)
    own = logs.gather(1, to_device(picks, logits.device)[:, None])
    best = logs.topk(min(top, logs.shape[1]), dim=1)
    # One copy from a card; float64 holds every id and every value exactly.
    table = torch.cat([own.double(), best.values.double(), best.indices.double()], dim=1).tolist()
    count = best.values.shape[1]
    return [(row[0], tuple(zip(map(int, row[1 + count :]), row[1 : 1 + count], strict=True))) for row in table]


def _are_finite(logits: Tensor) -> bool:
    return bool(logits.amax(dim=1).isfinite().all())


def _not_finite() -> ConfigError:
    return ConfigError("the model's logits are not finite: its weights or its dtype are not fit for use")


def _scored(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, noise: NoiseSource
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
            yield part, filtered(logits[part], sampling).add_(gumbel)
