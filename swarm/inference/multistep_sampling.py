"""Multi-step speculative sampling: an alternative rule for picks, exact over children that were drawn. Pure.

A draft draws children of a node from its own probabilities and says what it drew from; the tail tries the draws one
after another and gives a pick whose law is the target's own:

    draw x is picked with chance min(1, target_probs[x] / draft_probs[x])
    else    target_probs ← max(0, target_probs − draft_probs), normalised, and the next draw is tried
    at last the pick is drawn from what is left of target_probs

Every draw counts, repeats too: without them the rule is biased, as it is over the draft's best tokens. Draft
probabilities are cut to `TOP` tokens, rounded to float32 and renormalised before anything is drawn, so that what
travels is what was drawn from. The numbers here are fresh for each sweep, and neither draws nor trees know them: where
a child was cut from the tree, or a node has no guess, the law is the same. Where the coupled rule makes a text a
function of the seed, here it depends on trees too. Source: SpecInfer (arXiv 2305.09781), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.inference.gumbel import MULTISTEP_DOMAIN, uniforms
from swarm.protocol.proposal import MOST_DRAWS, TOP, DraftDistribution

Probs = NDArray[np.float64]


def guess(offset: int, draft_probs: torch.Tensor, count: int, rng: np.random.Generator) -> DraftDistribution:
    """Cut one row of draft probabilities [vocab_size] to the best, and draw so many tokens from it."""
    best = draft_probs.topk(min(TOP, len(draft_probs)))
    weights = best.values.cpu().numpy().astype(np.float32).astype(np.float64)
    kept = int((weights > 0).sum())
    tokens = tuple(best.indices[:kept].tolist())
    undrawn = DraftDistribution(offset, tokens, tuple(weights[:kept].tolist()), ())
    return replace(undrawn, draws=tuple(rng.choice(kept, size=count, p=draft_probs_of(undrawn)).tolist()))


def draft_probs_of(guessed: DraftDistribution) -> Probs:
    """[n], of its tokens: as the draft drew from them, bit for bit."""
    weights = np.array(guessed.weights, dtype=np.float64)
    shares: Probs = weights / weights.sum()
    return shares


def emit(target_probs: Probs, guessed: DraftDistribution | None, numbers: Iterator[float]) -> int:
    """The pick after one node.

    target_probs: [vocab_size]; changed in place. numbers: fresh ones in (0, 1).
    """
    if guessed is not None:
        tokens, draft_probs = np.array(guessed.tokens), draft_probs_of(guessed)
        for draw in guessed.draws:
            if next(numbers) * draft_probs[draw] <= target_probs[tokens[draw]]:
                return guessed.tokens[draw]
            target_probs[tokens] = np.maximum(target_probs[tokens] - draft_probs, 0.0)
            left = target_probs.sum()
            if left <= 0:  # both laws are the same, and rounding alone refused
                return guessed.tokens[draw]
            target_probs /= left
    sums = target_probs.cumsum()
    token = int(np.searchsorted(sums, next(numbers) * sums[-1], side="left"))
    return min(token, int(target_probs.nonzero()[0][-1]))


def picks(
    target_probs: torch.Tensor,
    positions: Sequence[int],
    guesses: Sequence[DraftDistribution | None],
    seed: int,
    sequence: int,
) -> list[int]:
    """The picks after some nodes of a sweep.

    target_probs: float64 [rows, vocab_size]. positions: of the picked tokens. sequence: the sweep's, so that no number
    is used in two sweeps. Two nodes at one position share numbers: a text goes through one of them at most.
    """
    found: list[int] = []
    made: dict[int, list[float]] = {}
    for row, position, guessed in zip(target_probs, positions, guesses, strict=True):
        if position not in made:
            made[position] = uniforms(
                seed, position, (MULTISTEP_DOMAIN, sequence & 0xFFFFFFFF), MOST_DRAWS + 1
            ).tolist()
        found.append(emit(row.cpu().numpy().copy(), guessed, iter(made[position])))
    return found


def by_offset(guesses: Sequence[DraftDistribution]) -> Mapping[int, DraftDistribution]:
    """Guesses by their nodes' places in the sweep."""
    return {guessed.offset: guessed for guessed in guesses}
