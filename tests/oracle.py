"""The specification of sampling in plain Python, one token at a time. Shares no code with `swarm`.

Whole-system tests compare the swarm's tokens with these picks over a reference's logits.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt


class SamplingLike(Protocol):
    """The fields of `swarm.protocol.messages.Sampling`."""

    @property
    def seed(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...


def oracle_pick(logits_row: npt.NDArray[np.floating], position: int, sampling: SamplingLike) -> int:
    """The token picked for `position` (that of the picked token) from one row of logits [vocab]."""
    scores = oracle_scores(logits_row, position, sampling)
    return min(scores, key=lambda token: (-scores[token], token))


def oracle_scores(logits_row: npt.NDArray[np.floating], position: int, sampling: SamplingLike) -> dict[int, float]:
    """Scores by token; tokens that top-k, top-p or min-p remove are missing."""
    logits = [float(logit) for logit in logits_row]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.temperature == 0:
        return dict(enumerate(logits))
    scaled = [logit / sampling.temperature for logit in logits]
    weight = [math.exp(value - scaled[ranked[0]]) for value in scaled]

    kept = ranked if sampling.top_k is None else ranked[: sampling.top_k]
    if sampling.top_p is not None and sampling.top_p < 1:
        total = math.fsum(weight[token] for token in kept)
        before = 0.0
        nucleus = []
        for token in kept:
            if before < sampling.top_p * total:
                nucleus.append(token)
            before += weight[token]
        kept = nucleus
    if sampling.min_p is not None:
        kept = [token for token in kept if weight[token] >= sampling.min_p]
    return {token: scaled[token] + oracle_gumbel(sampling.seed, position, token) for token in kept}


def oracle_gumbel(seed: int, position: int, token: int) -> float:
    """The Gumbel noise of one token."""
    block = oracle_philox((position, token >> 1, 0, 0), (seed % 2**32, seed >> 32))
    low, high = block[2:] if token % 2 else block[:2]
    uniform = min((float(high * 2**32 + low) + 0.5) * 2.0**-64, 1 - 2.0**-53)
    return -math.log(-math.log1p(-uniform))


def oracle_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one block."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * word0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * word2, 2**32)
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return word0, word1, word2, word3
