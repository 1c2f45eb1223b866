"""First texts over synthetic cards, by the real decode loop: near the best fixed tree."""

from __future__ import annotations

from statistics import harmonic_mean

import pytest
from transformers import AutoTokenizer

from benchmarks.control.replay import replay_texts
from benchmarks.simulation.profiles import CARDS
from client.decode.goodput import Goodput
from client.decode.policy import FixedPolicy
from client.decode.text_stream import FastTokenizer
from swarm.demo import TARGET
from tests.property.client.decode.test_pipeline import recorded

FIXED = tuple(FixedPolicy(nodes, flights) for nodes in (8, 15, 31) for flights in (1, 8))


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    found: FastTokenizer = AutoTokenizer.from_pretrained(TARGET)
    return found


@pytest.mark.parametrize("name", CARDS)
def test_first_texts_over_cards_come_near_the_best_fixed_tree(name: str, tokenizer: FastTokenizer) -> None:
    """Each text is a client's first."""
    costs, texts = CARDS[name], [recorded(seed, 0.8) for seed in range(3)]
    best = max(replay_texts(texts, costs, fixed, tokenizer).tokens_per_s for fixed in FIXED)
    ours = harmonic_mean([replay_texts([text], costs, Goodput(512), tokenizer).tokens_per_s for text in texts])
    assert ours >= 0.9 * best
