"""Picks and guesses on a GPU that has no float64: computed on the CPU, and the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from client.draft.search.calibration import Calibration
from client.draft.search.ranking import Ranker
from client.draft.search.source import Search
from client.draft.search.tree import TokenTree
from node.model.span import SpanModel
from node.session.sweep_run import HopRole, Picking, SweepRun
from swarm.base.errors import ConfigError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.gumbel import gumbel_row
from swarm.compute.kv_cache import KvCache
from swarm.compute.path_rules import PathRules
from swarm.compute.picks.device_picks import picks_on
from swarm.compute.sampling import pick_together
from swarm.protocol.hop_log import SweepWork
from swarm.protocol.messages import Codec, Sampling, Want
from swarm.protocol.pick_rules import PickRules
from swarm.protocol.session import SessionState
from tests.devices import on_mps

VOCABULARY = 50
LOGITS = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
SAMPLED = Sampling(seed=7, temperature=0.8, top_p=0.9)


def picked(logits: torch.Tensor, sampling: Sampling) -> tuple[object, object]:
    nodes = tuple(map(TreeNodeId, range(3)))
    applied = SimpleNamespace(appended=nodes, positions=(4, 5, 5))
    sweep = SimpleNamespace(want=Want(log_probs=True, top_log_probs=2), guesses=(), sequence=1)
    work = SimpleNamespace(applied=applied, frame=SimpleNamespace(sweep=sweep), run=())
    rules, state = (
        PathRules(PickRules(logit_bias=((3, 5.0),))),
        SimpleNamespace(committed=[], live=dict.fromkeys(nodes)),
    )
    state.path_to = lambda node: ()
    run = SweepRun(
        cast("SpanModel", SimpleNamespace(num_layers=4)),
        cast("KvCache", None),
        HopRole(Span(0, 4), Codec.FP32, VOCABULARY, gumbel_row),
        cast("SweepWork", work),
        Picking(sampling, rules, cast("SessionState", state)),
    )
    logits = logits if picks_on(logits.device) else logits.cpu()
    asked = run.prepare(logits, 0, range(3))
    requests = [] if asked.request is None else [asked.request]
    for tokens in pick_together(logits, requests, VOCABULARY, gumbel_row) or [list(asked.drawn)]:
        assert not isinstance(tokens, ConfigError)
        run.take_picks(asked, tokens)
    return run.picks, run.log_probs


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(seed=7, temperature=1.0), SAMPLED, Sampling(seed=7, temperature=1.0, multistep=True)],
    ids=["greedy", "sampled", "filtered", "multistep"],
)
def test_the_tail_picks_the_same(sampling: Sampling) -> None:
    assert picked(on_mps(LOGITS.clone()), sampling) == picked(LOGITS.clone(), sampling)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=7, temperature=1.0), SAMPLED])
def test_a_draft_guesses_the_same(sampling: Sampling) -> None:
    ranker = Ranker(VOCABULARY, Calibration())
    far, near = (ranker.rank(logits, (4, 5, 5), sampling) for logits in (on_mps(LOGITS), LOGITS))
    assert (far.tokens == near.tokens).all()
    assert (far.candidates.scores == near.candidates.scores).all()


def test_a_draft_draws_the_same() -> None:
    drawn = []
    for logits in (on_mps(LOGITS[:1]), LOGITS[:1]):
        tree = TokenTree(2, 8, 2)
        search = Search((1, 2), 2, Sampling(seed=7, temperature=1.0, multistep=True), tree)
        Ranker(VOCABULARY, Calibration()).add(search, [TokenTree.ROOT], logits)
        drawn.append(tree.guesses[TokenTree.ROOT])
    assert drawn[0] == drawn[1]
