"""The adapter: a matrix that learns where a target picks otherwise than its draft. Simulated drafts, seeded rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from client.draft.search.ranking import Adapter, Hidden

WIDTH, VOCAB, BEST = 16, 64, 8
ROWS = 12


@dataclass(frozen=True)
class Lesson:
    """What a draft says after some rows, and what its target picks, which sees every row turned a little."""

    rows: torch.Tensor
    tokens: NDArray[np.int64]
    scores: NDArray[np.float64]
    picks: NDArray[np.int64]

    def share(self, adapter: Adapter) -> float:
        """Of the picks that the draft ranks first, with what the adapter adds."""
        best = (self.scores + adapter.logit_delta(self.rows, self.tokens)).argmax(axis=1)
        return float((self.tokens[np.arange(len(best)), best] == self.picks).mean())


class Pair:
    """A draft and its target, which differ by a matrix. noise: scale of what coupled scores hold beside the logits."""

    def __init__(self, seed: int, *, noise: float = 0.0, width: int = WIDTH) -> None:
        self.random = np.random.default_rng(seed)
        self.noise, self.width = noise, width
        self.output = torch.from_numpy(self.random.normal(size=(VOCAB, width))).float()
        self.turn = torch.from_numpy(self.random.normal(size=(width, width)) / width**0.5).float()

    def lesson(self, count: int = ROWS) -> Lesson:
        rows = torch.from_numpy(self.random.normal(size=(count, self.width))).float()
        noise = torch.from_numpy(self.noise * self.random.gumbel(size=(count, VOCAB))).float()
        scores, tokens = (rows @ self.output.T + noise).topk(BEST)
        picks = ((rows + rows @ self.turn) @ self.output.T + noise).argmax(dim=1)
        return Lesson(rows, tokens.numpy(), scores.double().numpy(), picks.numpy())


def teach(adapter: Adapter, lesson: Lesson, temperature: float = 0.0) -> None:
    adapter.learn(lesson.rows, lesson.tokens, lesson.scores, lesson.picks, temperature)


@pytest.mark.parametrize(("temperature", "noise"), [(0.0, 0.0), (1.0, 1.0)])
def test_learns_where_the_target_picks_otherwise(temperature: float, noise: float) -> None:
    pair = Pair(1, noise=noise)
    adapter, unseen = Adapter(pair.output), pair.lesson(400)
    before = unseen.share(adapter)
    for _ in range(200):
        teach(adapter, pair.lesson(), temperature)
    assert adapter.lessons == 200
    assert before < 0.6
    assert unseen.share(adapter) > before + 0.2


def test_scales_of_rows_and_matrix_do_not_matter() -> None:
    pair = Pair(3)
    lessons, unseen = [pair.lesson() for _ in range(20)], pair.lesson()
    one, other = Adapter(pair.output), Adapter(pair.output / 50)
    for lesson in lessons:
        teach(one, lesson)
        teach(other, Lesson(lesson.rows * 50, lesson.tokens, lesson.scores, lesson.picks))
    shift = one.logit_delta(unseen.rows, unseen.tokens)
    assert np.abs(shift).max() > 1
    np.testing.assert_allclose(other.logit_delta(unseen.rows * 50, unseen.tokens), shift, rtol=1e-3, atol=1e-4)


def test_the_same_lesson_again_and_again_stays_bounded() -> None:
    pair = Pair(4)
    adapter, lesson = Adapter(pair.output), pair.lesson(1)
    tokens, scores, picks = (np.repeat(part, 64, axis=0) for part in (lesson.tokens, lesson.scores, lesson.picks))
    alike = Lesson(
        lesson.rows.repeat(64, 1), tokens.astype(np.int64), scores.astype(np.float64), picks.astype(np.int64)
    )
    for _ in range(3_000):
        teach(adapter, alike)
    shift = adapter.logit_delta(lesson.rows, lesson.tokens)
    assert np.isfinite(shift).all()
    assert lesson.share(adapter) == 1
    assert np.abs(shift).max() < 200


def test_what_cannot_be_learned_from_teaches_nothing() -> None:
    pair = Pair(5)
    adapter, good = Adapter(pair.output), pair.lesson()
    broken = np.full_like(good.scores, np.nan)
    teach(adapter, Lesson(good.rows, good.tokens, broken, good.picks))
    teach(adapter, Lesson(good.rows * torch.inf, good.tokens, good.scores, good.picks))
    ruled_out = np.where(good.tokens == good.tokens[:, :1], -np.inf, good.scores)
    teach(adapter, Lesson(good.rows, good.tokens, ruled_out, good.tokens[:, 0]))
    assert adapter.lessons == 0
    assert not adapter.logit_delta(good.rows, good.tokens).any()


def test_a_pick_that_is_no_candidate_is_learned_too() -> None:
    pair = Pair(6)
    adapter, lesson = Adapter(pair.output), pair.lesson(1)
    outside = next(token for token in range(VOCAB) if token not in lesson.tokens)
    for _ in range(50):
        teach(adapter, Lesson(lesson.rows, lesson.tokens, lesson.scores, np.array([outside])))
    told = np.array([[outside, lesson.tokens[0, 0], -1, VOCAB]])
    wanted, first, none, unknown = adapter.logit_delta(lesson.rows, told)[0]
    assert wanted > first
    assert none == unknown == 0


def test_a_pick_that_the_draft_does_not_know_teaches_nothing() -> None:
    pair = Pair(7)
    adapter, lesson = Adapter(pair.output), pair.lesson(2)
    teach(adapter, Lesson(lesson.rows, lesson.tokens, lesson.scores, np.array([VOCAB, VOCAB + 5])))
    assert adapter.lessons == 0
    teach(adapter, Lesson(lesson.rows, lesson.tokens, lesson.scores, np.array([VOCAB, lesson.tokens[1, 1]])))
    assert adapter.lessons == 1


def test_tokens_may_have_other_numbers_than_rows() -> None:
    """As where a draft has another tokenizer: the same lessons, by the target's numbers, of which one has no row."""
    pair, renamed = Pair(8), np.random.default_rng(8).permutation(VOCAB)
    rows_of = np.full(VOCAB + 3, -1)
    rows_of[renamed + 3] = np.arange(VOCAB)
    plain, mapped, lesson = Adapter(pair.output), Adapter(pair.output, rows_of), pair.lesson()
    teach(plain, lesson)
    teach(mapped, Lesson(lesson.rows, renamed[lesson.tokens] + 3, lesson.scores, renamed[lesson.picks] + 3))
    delta = plain.logit_delta(lesson.rows, lesson.tokens)
    assert delta.any()
    np.testing.assert_array_equal(mapped.logit_delta(lesson.rows, renamed[lesson.tokens] + 3), delta)
    assert not mapped.logit_delta(lesson.rows, np.full((len(lesson.rows), 2), [0, VOCAB + 5])).any()


def test_hidden_rows_of_some_nodes_and_of_all() -> None:
    adapter = Adapter(torch.ones(3, 2))
    hidden = Hidden(adapter, torch.arange(6.0).reshape(3, 2))
    assert hidden.at([2, 0]).rows.tolist() == [[4, 5], [0, 1]]
    together = Hidden.together([hidden.at([0]), hidden.at([1, 2])])
    assert together is not None
    assert torch.equal(together.rows, hidden.rows)
    assert Hidden.together([hidden, None]) is None
    assert Hidden.together([]) is None
