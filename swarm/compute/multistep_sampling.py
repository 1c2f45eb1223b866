"""Multi-step speculative sampling: an alternative rule for picks, exact over children that were drawn. Pure.

A draft draws children of a node from its own probabilities and sends what it drew from; the tail tries the draws one
after another and makes a pick whose law is the target's own:

    draw x is picked with probability min(1, target_probs[x] / draft_probs[x])
    else    target_probs ← max(0, target_probs − draft_probs), normalised, and the next draw is tried
    at last the pick is drawn from what is left of target_probs

Every draw counts, repeats too: without them the rule is biased, and so it is over the draft's best tokens. Draft
probabilities are cut to `MAX_CANDIDATES` tokens, rounded to float32 and renormalised before anything is drawn, so that
what travels is what was drawn from. The random numbers here are new in each sweep and independent of draws and trees:
where a child was cut from the tree, or a node has no draws, the law is the same. The coupled rule makes a text a
function of the seed; with this rule it depends on the trees too. Source: SpecInfer (arXiv 2305.09781), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.compute.gumbel import MULTISTEP_DOMAIN, uniforms
from swarm.protocol.pick_rules import MAX_CANDIDATES, MAX_DRAWS, DraftDistribution

Probs = NDArray[np.float64]


def draw_children(offset: int, draft_probs: torch.Tensor, count: int, rng: np.random.Generator) -> DraftDistribution:
    """Cut one row of draft probabilities to its most probable tokens, and draw children from them.

    Args:
        offset: the node's place in its sweep.
        draft_probs: [vocab_size]
        count: how many to draw, with replacement.
    """
    best = draft_probs.topk(min(MAX_CANDIDATES, len(draft_probs)))
    weights = best.values.cpu().numpy().astype(np.float32).astype(np.float64)
    kept = int((weights > 0).sum())
    tokens = tuple(best.indices[:kept].tolist())
    undrawn = DraftDistribution(offset, tokens, tuple(weights[:kept].tolist()), ())
    return replace(undrawn, draws=tuple(rng.choice(kept, size=count, p=draft_probs_of(undrawn)).tolist()))


def draft_probs_of(drafted: DraftDistribution) -> Probs:
    """Float64 [n]: the probabilities of its tokens, bit for bit as the draft drew from them."""
    weights = np.array(drafted.weights, dtype=np.float64)
    draft_probs: Probs = weights / weights.sum()
    return draft_probs


def multistep_pick(target_probs: Probs, drafted: DraftDistribution | None, numbers: Iterator[float]) -> int:
    """The pick after one node.

    Args:
        target_probs: float64 [vocab_size]; changed in place.
        drafted: what the draft drew after the node; None makes the pick an ordinary draw from the target.
        numbers: uniform in (0, 1), each used once: at most one per draw, and one more.
    """
    if drafted is not None:
        tokens, draft_probs = np.array(drafted.tokens), draft_probs_of(drafted)
        for draw in drafted.draws:
            if next(numbers) * draft_probs[draw] <= target_probs[tokens[draw]]:
                return drafted.tokens[draw]
            target_probs[tokens] = np.maximum(target_probs[tokens] - draft_probs, 0.0)
            left = target_probs.sum()
            if left <= 0:  # both laws are the same, and rounding alone refused
                return drafted.tokens[draw]
            target_probs /= left
    sums = target_probs.cumsum()
    token = int(np.searchsorted(sums, next(numbers) * sums[-1], side="left"))
    return min(token, int(target_probs.nonzero()[0][-1]))


def multistep_picks(
    target_probs: torch.Tensor,
    positions: Sequence[int],
    guesses: Sequence[DraftDistribution | None],
    seed: int,
    sequence: int,
) -> list[int]:
    """The picks after some nodes of a sweep.

    Two nodes at one position share random numbers: a text goes through at most one of them.

    Args:
        target_probs: float64 [rows, vocab_size]
        positions: [rows] of the picked tokens.
        guesses: [rows] what the draft drew after each node, None for nothing.
        sequence: the sweep's, so that no number is used in two sweeps.
    """
    picks: list[int] = []
    numbers: dict[int, list[float]] = {}  # by position
    rows = target_probs.cpu().numpy()  # from a card in one copy
    for row, position, drafted in zip(rows, positions, guesses, strict=True):
        if position not in numbers:
            numbers[position] = uniforms(
                seed, position, (MULTISTEP_DOMAIN, sequence & 0xFFFFFFFF), MAX_DRAWS + 1
            ).tolist()
        picks.append(multistep_pick(row.copy(), drafted, iter(numbers[position])))
    return picks


def by_offset(guesses: Sequence[DraftDistribution]) -> Mapping[int, DraftDistribution]:
    """Guesses by their nodes' places in the sweep."""
    return {drafted.offset: drafted for drafted in guesses}
