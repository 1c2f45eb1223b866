"""A draft on a card: by kernels at fixed addresses it grows the tree of the plain path. Triton interprets here."""

from __future__ import annotations

import pytest
import torch

from client.base.options import DraftOptions
from client.base.target import load_target
from client.draft import loading
from client.draft.drafter import ModelDrafter
from client.draft.search import ranking
from client.draft.search.calibration import SoftmaxPrior
from client.draft.search.ranking import Ranker
from swarm.compute.picks.device_picks import noise_rows
from swarm.compute.static_forward import StaticForward, StaticLimits
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling
from tests.model.tiny_models import FEW, tiny_model, whole_model

VOCAB, WINDOW = 128, 96
WARM = Sampling(seed=5, temperature=1.0)


def test_a_static_draft_grows_the_plain_drafts_trees() -> None:
    """Tree after tree, with KV that is kept; rounds are one bucket of 16 rows."""
    small = tiny_model("llama", changes=FEW | {"num_hidden_layers": 1})
    plain, static = whole_model(small), whole_model(small)
    static.static = StaticForward(static, StaticLimits(WINDOW, 1, (16,)))
    static.static.record()
    drafters = [ModelDrafter(model, VOCAB, WINDOW) for model in (plain, static)]
    sequence = [7, 9, 30]
    for _ in range(2):
        wanted, tree = (drafter.grow(sequence, 6, 2, WARM) for drafter in drafters)
        assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
        assert tree.acceptance_probs == pytest.approx(wanted.acceptance_probs, rel=1e-4)
        sequence = [*sequence, tree.tokens[0], 3]
    assert static.forwards == plain.forwards > 2


def test_a_draft_is_loaded_for_the_fastest_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int | None]] = []
    monkeypatch.setattr(loading, "use_static", lambda model, tokens: asked.append((model.num_layers, tokens)))
    loading.load_drafter(TARGET, load_target(TARGET), DraftOptions((DRAFT,), "cpu"))
    assert len(asked) == 1


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), WARM, Sampling(seed=5, temperature=0.7, top_k=30, min_p=0.01)],
    ids=["greedy", "sampled", "filtered"],
)
@pytest.mark.parametrize("coupled", [True, False])
def test_candidates_are_ranked_alike_where_noise_is_made_on_the_device(
    sampling: Sampling, coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(5, 140, generator=torch.Generator().manual_seed(3)) * 3
    positions = [4, 5, 5, 9, 4]
    wanted = Ranker(VOCAB, SoftmaxPrior(), coupled=coupled).rank(logits, positions, sampling)
    asked: list[object] = []

    def counted(*given: object) -> torch.Tensor:
        asked.append(given)
        return noise_rows(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(ranking, "noise_rows", counted)
    monkeypatch.setattr(ranking, "picks_on", lambda _: True)
    monkeypatch.setattr("swarm.compute.sampling.picks_on", lambda _: True)
    found = Ranker(VOCAB, SoftmaxPrior(), coupled=coupled).rank(logits, positions, sampling)
    assert (found.tokens == wanted.tokens).all()
    assert found.tokens.dtype == wanted.tokens.dtype
    assert found.candidates.scores == pytest.approx(wanted.candidates.scores, abs=2e-4)
    assert len(asked) == (3 if coupled and sampling == WARM else 0)
