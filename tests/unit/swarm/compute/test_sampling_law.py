"""The law of what is emitted, by chi-square tests at a level of 1e-6 each.

The seeds are fixed, so a test here gives the same answer on every run; under fresh seeds the 8 tests that must pass
would together raise a false alarm less than once in 100,000 runs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import pytest
import torch

from swarm.compute.gumbel import gumbel_row
from swarm.compute.sampling import pick, ranking_scores
from swarm.protocol.messages import Sampling

LEVEL = 1e-6

Probs = Sequence[float]
Tree = dict[tuple[int, ...], list[int]]
"""Children's tokens of each tree node; a node is its path from the tip."""


def chi_square_odds(counts: Counter[int], probs: Probs) -> float:
    """Chance of a worse fit than this one if the counts were drawn from `probs`."""
    total = sum(counts.values())
    assert all(prob * total >= 5 or prob == 0 for prob in probs), "too few draws for the chi-square law"
    if any(probs[token] == 0 for token in counts):
        return 0.0
    cells = [(counts[token], prob * total) for token, prob in enumerate(probs) if prob > 0]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def softmax(scaled: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(scaled)) for value in scaled]
    return [weight / sum(weights) for weight in weights]


LOGITS = [0.3, 1.1, -0.4, 1.9, 0.3, 1.5, -0.2, 0.8]


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(temperature=1.0), range(8)),
        (Sampling(temperature=1.6, top_k=5), (0, 1, 3, 5, 7)),
        (Sampling(temperature=0.8, top_p=0.8), (1, 3, 5, 7)),
        (Sampling(temperature=1.2, top_p=0.97, min_p=0.25), (0, 1, 3, 4, 5, 7)),
    ],
)
def test_picks_follow_the_filtered_softmax(sampling: Sampling, left: Sequence[int]) -> None:
    """1,200 positions of one seed."""
    probs = [0.0] * 8
    for token, prob in zip(left, softmax([LOGITS[token] / sampling.temperature for token in left]), strict=True):
        probs[token] = prob
    counts = Counter(pick(torch.tensor([LOGITS] * 1_200), range(1_200), sampling))
    assert chi_square_odds(counts, probs) > LEVEL
    assert chi_square_odds(counts, softmax([value / 4 for value in LOGITS])) < LEVEL  # the test can fail


noise = cache(gumbel_row)  # the three sources below walk through the same seeds
VOCAB_SIZE, DEPTH = 3, 3
NUMBERS = random.Random(8)
TARGET_LOGITS = {
    path: [NUMBERS.gauss(0, 0.5) for _ in range(VOCAB_SIZE)]
    for depth in range(DEPTH + 1)
    for path in product(range(VOCAB_SIZE), repeat=depth)
}
"""A random target: the next token's logits after every path."""


def random_tree(root: tuple[int, ...], sampling: Sampling) -> Tree:
    numbers = random.Random(f"{root} {sampling.seed}")
    paths = [path for path in TARGET_LOGITS if path[: len(root)] == root and len(path) < DEPTH]
    return {path: [token for token in range(VOCAB_SIZE) if numbers.random() < 0.4] for path in paths}


def stubborn_tree(root: tuple[int, ...], sampling: Sampling) -> Tree:
    """A draft that always bets on token 0."""
    return {path: [0] for path in random_tree(root, sampling)}


def coupled_tree(root: tuple[int, ...], sampling: Sampling) -> Tree:
    """A wrong draft that knows the noise, so its trees depend on the picks: the source most likely to bias a walk."""
    paths = list(random_tree(root, sampling))
    draft = torch.tensor([TARGET_LOGITS[path] for path in paths]).roll(1, dims=1)
    scores = ranking_scores(draft, [len(path) for path in paths], sampling, noise)
    return {path: [int(token)] for path, token in zip(paths, scores.argmax(dim=1), strict=True)}


def decode(source: Callable[[tuple[int, ...], Sampling], Tree], sampling: Sampling) -> tuple[tuple[int, ...], int]:
    """The first DEPTH tokens, and the number of sweeps they took."""
    text: tuple[int, ...] = ()
    sweeps = 0
    while len(text) < DEPTH:
        children = source(text, sampling)
        nodes = [path for path in TARGET_LOGITS if path in children]
        logits = torch.tensor([TARGET_LOGITS[path] for path in nodes])
        picks = dict(zip(nodes, pick(logits, [len(path) for path in nodes], sampling, noise=noise), strict=True))
        sweeps += 1
        while len(text) < DEPTH:
            text, node = (*text, picks[text]), text
            if text[-1] not in children[node]:
                break
    return text, sweeps


@pytest.mark.parametrize(("source", "most_sweeps"), [(random_tree, 2.4), (stubborn_tree, 2.6), (coupled_tree, 1.8)])
def test_walks_emit_the_targets_law(source: Callable[[tuple[int, ...], Sampling], Tree], most_sweeps: float) -> None:
    """Joint law of three tokens over 800 seeds, whatever grows the tree; and each text is the one of plain decoding."""
    probs = []
    for path in product(range(VOCAB_SIZE), repeat=DEPTH):
        steps = [softmax(TARGET_LOGITS[path[:depth]])[path[depth]] for depth in range(DEPTH)]
        probs.append(math.prod(steps))
    counts: Counter[int] = Counter()
    sweeps = 0
    for seed in range(800):
        sampling = Sampling(seed=seed, temperature=1.0)
        text, used = decode(source, sampling)
        counts[text[0] * 9 + text[1] * 3 + text[2]] += 1
        sweeps += used
        if seed % 40 == 0:
            assert text == decode(lambda root, _: {root: []}, sampling)[0]
    assert chi_square_odds(counts, probs) > LEVEL
    assert sweeps / 800 < most_sweeps  # trees were walked, not only tips


def multi_step_speculative_sampling(
    target_probs: Probs, draft_probs: Probs, children: list[int], numbers: random.Random
) -> int:
    """SpecInfer's verification of one node's children, algorithm 2 of arXiv 2305.09781."""
    residual = list(target_probs)
    waiting = list(children)
    while waiting:
        child = waiting.pop(numbers.randrange(len(waiting)))
        if numbers.random() * draft_probs[child] <= residual[child]:
            return child
        residual = [max(0.0, target - draft) for target, draft in zip(residual, draft_probs, strict=True)]
        residual = [prob / sum(residual) for prob in residual]
    return numbers.choices(range(len(residual)), residual)[0]


def speculative_odds(children_of: Callable[[Probs, random.Random], list[int]]) -> float:
    """Fit of 20,000 emitted tokens to the target, by multi-step speculative sampling."""
    target_probs = [0.30, 0.25, 0.15, 0.12, 0.10, 0.08]
    draft_probs = [0.35, 0.15, 0.20, 0.05, 0.15, 0.10]
    numbers = random.Random(1)
    emitted = (
        multi_step_speculative_sampling(target_probs, draft_probs, children_of(draft_probs, numbers), numbers)
        for _ in range(20_000)
    )
    return chi_square_odds(Counter(emitted), target_probs)


def test_speculative_sampling_is_exact_over_sampled_children() -> None:
    assert speculative_odds(lambda probs, numbers: numbers.choices(range(6), probs, k=2)) > LEVEL


def test_negative_control_speculative_sampling_is_biased_over_top_k_children() -> None:
    assert speculative_odds(lambda probs, _: sorted(range(6), key=lambda token: -probs[token])[:2]) < 1e-100
