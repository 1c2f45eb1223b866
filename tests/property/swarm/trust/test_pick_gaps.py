"""Gaps of picks: none of an honest tail, however filters, rules and rounding fall; one of whoever picks otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.ids import TreeNodeId
from swarm.compute.path_rules import NodeMasks, PathRules
from swarm.compute.sampling import pick
from swarm.protocol.pick_rules import PickRules, Sampling
from swarm.protocol.session import Limits, SessionState
from swarm.trust.pick_gaps import NamedPicks, bound_of, pick_gaps, why_unjudged

VOCAB, VALID, ROWS = 40, 37, 12
RULES = PickRules(start=2, frequency_penalty=0.4, repetition_penalty=1.3, logit_bias=((3, 2.0), (9, -100.0)))
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 2, 5]),
    top_p=st.sampled_from([None, 0.1, 0.5, 0.9]),
    min_p=st.sampled_from([None, 0.05, 0.5]),
    rules=st.sampled_from([None, RULES]),
)


def honest(seed: int, sampling: Sampling, ties: bool = False) -> tuple[torch.Tensor, list[int]]:
    """Logits [ROWS, VOCAB] after a text's places, and the text as an honest tail picks it."""
    made = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits = (made * 2).round() / 2 if ties else made
    tokens = [1, 2]
    for row in range(ROWS):
        own = logits[row : row + 1].clone()
        if sampling.rules is not None:
            state = SessionState.begun(Limits(VOCAB, 99, 1, 1), tokens, ())
            PathRules(sampling.rules).apply(own, [TreeNodeId(len(tokens) - 1)], state)
        tokens += pick(own, [len(tokens)], sampling, VALID)
    return logits, tokens


def named(tokens: list[int], sampling: Sampling, masks: NodeMasks | None = None) -> NamedPicks:
    return NamedPicks(tokens, range(1, ROWS + 1), sampling, VALID, masks)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 999), sampling=samplings, bound=st.sampled_from([1e-3, 0.5]), ties=st.booleans())
def test_an_honest_pick_lies_within_the_bound_of_whoever_computed_logits_a_little_otherwise(
    seed: int, sampling: Sampling, bound: float, ties: bool
) -> None:
    logits, tokens = honest(seed, sampling, ties)
    assert max(pick_gaps(logits.clone(), named(tokens, sampling), bound)) <= 0
    apart = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed + 1)) - 0.5
    assert max(pick_gaps(logits + apart * 0.99 * bound, named(tokens, sampling), bound)) <= bound


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_gap_is_how_far_the_best_score_is_above(temperature: float) -> None:
    sampling = Sampling(5, temperature)
    logits, tokens = honest(3, sampling)
    logits[4, tokens[6]] -= 2.5  # what was picked as the fifth; whatever is best now lies at most so far above
    gaps = pick_gaps(logits.clone(), named(tokens, sampling), 1e-3)
    assert 0 < gaps[4] <= 2.5
    assert all(gap <= 0 for place, gap in enumerate(gaps) if place != 4)
    again = [*tokens[:6], tokens[6] + 1, *tokens[7:]]
    assert pick_gaps(logits.clone(), named(again, sampling), 1e-3)[4] > 1e-3


def test_what_filters_padding_or_the_grammar_exclude_is_infinitely_far() -> None:
    sampling = Sampling(5, 1.0, top_k=2)
    logits, tokens = honest(3, sampling)
    worst = int(logits[0, :VALID].argmin())
    assert pick_gaps(logits.clone(), named([*tokens[:2], worst, *tokens[3:]], sampling), 1e-3)[0] == math.inf
    assert pick_gaps(logits.clone(), named([*tokens[:2], VALID, *tokens[3:]], sampling), 1e-3)[0] == math.inf
    rules = Sampling(5, 1.0, rules=PickRules(start=2, frequency_penalty=0.1))
    logits, tokens = honest(3, rules)
    bits = torch.full((1, VOCAB // 8), 255, dtype=torch.uint8).numpy()
    masks = NodeMasks({TreeNodeId(place): 0 for place in range(1, ROWS + 1)}, bits)
    assert max(pick_gaps(logits.clone(), named(tokens, rules, masks), 1e-3)) <= 0
    bits[0, tokens[2] >> 3] &= 255 - (1 << (tokens[2] & 7))
    assert pick_gaps(logits.clone(), named(tokens, rules, masks), 1e-3)[0] == math.inf


def test_numbers_are_as_coarse_as_they_are_large() -> None:
    sampling = Sampling()
    logits = torch.zeros(ROWS, VOCAB)
    logits[:, 3], logits[:, 4] = 64.0, 63.5
    assert pick_gaps(logits, named([1, 2, *([4] * ROWS)], sampling), 0.5)[0] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("numeric_class", "bound"),
    [
        ("cpu-float32", 1e-3),
        ("cuda-sm90-bfloat16-k2", 0.5),
        ("cpu-float32+gguf", 1e-3),
        ("cuda-float16", 0.0625),
        ("cpu-float32+w8", 1e-3),
        ("cpu-bfloat16+w4z", 0.5),
        ("cpu-bfloat16-k2+gguf", 0.5),
        ("cuda-bfloat16+w8", None),
        ("cuda-sm90-bfloat16-k2+gguf", None),
        ("who knows", None),
    ],
)
def test_only_what_was_measured_is_judged(numeric_class: str, bound: float | None) -> None:
    assert bound_of(numeric_class) == bound
    assert bool(why_unjudged(numeric_class)) is (bound is None)
