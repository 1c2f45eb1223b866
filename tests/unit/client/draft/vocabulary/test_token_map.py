"""From the draft's distribution to that over shared tokens."""

from __future__ import annotations

import pytest
import torch

from client.draft.vocabulary.matching import TokenMap
from swarm.compute.sampling import target_probs
from swarm.protocol.messages import Sampling

ALIGNED = [(0, 0), (1, 1), (3, 3), (4, 4)]
OTHER = [(0, 5), (4, 1), (2, 6), (7, 0)]


@pytest.mark.parametrize("pairs", [ALIGNED, OTHER], ids=["aligned", "other ids"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_distribution_is_the_drafts_own_renormalised(pairs: list[tuple[int, int]], temperature: float) -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    token_map = TokenMap(pairs, draft_rows=8)
    probs = target_probs(token_map.target_logits(logits), Sampling(temperature=temperature))
    whole = (logits.double() / temperature).softmax(dim=1)
    for row in range(5):
        mass = sum(whole[row, own] for _, own in pairs)
        expected = {token: float(whole[row, own] / mass) for token, own in pairs}
        found = {token: float(prob) for token, prob in enumerate(probs[row]) if prob > 0}
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("pairs", [ALIGNED, OTHER], ids=["aligned", "other ids"])
def test_ids_go_there_and_back(pairs: list[tuple[int, int]]) -> None:
    token_map = TokenMap(pairs, draft_rows=8)
    assert {token: own for token in range(20) if (own := token_map.draft_id(token)) is not None} == dict(pairs)
    assert {own: token for own in range(8) if (token := token_map.target_id(own)) is not None} == {
        own: token for token, own in pairs
    }


def test_logits_of_equal_ids_are_not_copied() -> None:
    logits = torch.randn(2, 8)
    same = TokenMap([(token, token) for token in range(6)], draft_rows=8).target_logits(logits)
    assert same.data_ptr() == logits.data_ptr()
    assert same.shape == (2, 6)
