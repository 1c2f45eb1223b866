"""Drafts that learn from the target on the fly, with the demo pair: the same text in fewer sweeps."""

from __future__ import annotations

import torch

from benchmarks.simulation.acceptance import Size, demo_prompts, generate
from benchmarks.simulation.recorded import generate_texts
from client.base.options import DraftOptions
from client.base.target import load_target
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.loading import load_drafter
from client.draft.search.calibration import Calibration
from client.draft.search.ranking import Adapter, Ranker
from client.draft.sources.model import LocalSession, ModelSource
from swarm.base.ids import TreeNodeId
from swarm.compute.ragged_batch import RaggedModel
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling
from swarm.protocol.session import Limits

VOCAB = 8_192
SIZE = Size(64, 32)


def texts(target: RaggedModel, draft: RaggedModel, temperature: float, prompts: int) -> tuple[int, int, ModelSource]:
    """Sweeps of some texts, which are the plain ones, by a client whose draft does not adapt and by one whose does."""
    sources = [ModelSource(draft, VOCAB, 512, Ranker(VOCAB, Calibration()), adapt=adapt) for adapt in (False, True)]
    drafters, sweeps = [TreeDrafter([source]) for source in sources], [0, 0]
    for number, prompt in enumerate(demo_prompts(prompts, tokens=64)):
        sampling = Sampling(31 + number, temperature)
        plain = generate(target, NoDrafter(), prompt, sampling, Size(SIZE.new_tokens, 0))
        for way, drafter in enumerate(drafters):
            made = generate(target, drafter, prompt, sampling, SIZE)
            assert made.tokens == plain.tokens
            sweeps[way] += made.sweeps
    return sweeps[0], sweeps[1], sources[1]


def adapter_of(source: ModelSource) -> Adapter:
    assert source.adapter is not None
    return source.adapter


def test_greedy_text_takes_fewer_sweeps(target: RaggedModel, draft: RaggedModel) -> None:
    alone, told, source = texts(target, draft, 0.0, 3)
    assert adapter_of(source).lessons > told / 2
    assert told < 0.9 * alone, "one that learns the wrong way takes hardly fewer"


def test_sampled_text_takes_hardly_more(target: RaggedModel, draft: RaggedModel) -> None:
    alone, told, source = texts(target, draft, 1.0, 2)
    assert adapter_of(source).lessons > told / 2
    assert told < 1.05 * alone


def test_a_forgotten_text_is_told_as_the_first_time(target: RaggedModel, draft: RaggedModel) -> None:
    source = ModelSource(draft, VOCAB, 512, Ranker(VOCAB, Calibration()), adapt=True)
    drafter, prompt, sweeps = TreeDrafter([source]), demo_prompts(1, tokens=64)[0], list[int]()
    for _ in range(2):
        calibration = Calibration()
        source.ranker.acceptance_model = calibration
        sweeps.append(generate(target, drafter, prompt, Sampling(), SIZE).sweeps)
        assert adapter_of(source).lessons > 0
        drafter.forget()
        assert adapter_of(source).lessons == 0
    assert sweeps[0] == sweeps[1]


def test_logits_come_of_the_rows_that_are_handed_out(draft: RaggedModel) -> None:
    assert draft.output is not None
    session = LocalSession(draft, Limits(VOCAB, 64, sweeps=1, nodes=64))
    scores = session.score(
        session.next([5, 6, 7], [None, TreeNodeId(session.state.next_id), TreeNodeId(session.state.next_id + 1)]),
        last=2,
    )
    assert scores.rows is not None
    assert scores.rows.shape == (2, draft.output.shape[1])
    torch.testing.assert_close(scores.rows @ draft.output.float().T, scores.logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_can_be_left_out(target: RaggedModel) -> None:
    (prompt,) = demo_prompts(1, tokens=64)
    (text,) = generate_texts(target, [prompt], [Sampling()], 24)
    for adapt in (True, False):
        made = load_drafter(TARGET, load_target(TARGET), DraftOptions((DRAFT,), "cpu", adapt=adapt)).drafter
        assert isinstance(made, TreeDrafter)
        run = generate(target, made, prompt, Sampling(), Size(24, 16))
        assert (*prompt, *run.tokens) == text.tokens
        (source,) = (source for source in made.sources if isinstance(source, ModelSource))
        assert (source.adapter is not None and source.adapter.lessons > 0) == adapt
