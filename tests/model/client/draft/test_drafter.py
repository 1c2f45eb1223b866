"""The drafter with the demo pair: exact text, KV kept across sweeps, and an acceptance that proves the draft works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.simulation.acceptance import Size, accepted, demo_prompts, generate
from client.draft.drafter import ModelDrafter, NoDrafter
from client.draft.search.calibration import Calibration, Candidates
from client.draft.search.ranking import Ranker, RankLesson, Row, gather
from client.draft.search.source import Search
from client.draft.search.tree import PRUNE_RATIO, DraftTree, Picks, StopRule
from client.draft.sources.lookup import Lookup
from client.draft.sources.model import PREFILL_ROWS
from swarm.compute.ragged_batch import RaggedModel
from swarm.compute.sampling import pick
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling
from tests.model.in_process_chain import decoding

GREEDY = Sampling()
WARM = Sampling(seed=5, temperature=1.0)
VOCAB = 4096


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return demo_prompts(4)


def accepted_path(tree: DraftTree) -> list[int]:
    """Tokens from a child of the root down to the deepest node."""
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent is not None else []), token])
    return max(paths, key=len)


def unused_token(tree: DraftTree) -> int:
    return next(token for token in range(3, VOCAB) if token not in tree.tokens)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_text_is_the_plain_text_and_acceptance_is_real(
    target: RaggedModel, draft: RaggedModel, prompts: list[list[int]], sampling: Sampling
) -> None:
    """The bound is far below the demo pair's averages of 2.8 (greedy) and 3.3: it tells a draft from no draft."""
    drafter = ModelDrafter(draft, VOCAB, 256)
    plain = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    lengths = []
    for prompt in prompts:
        run = generate(target, drafter, prompt, sampling, Size(24, 16))
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *run.tokens[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert list(run.tokens) == pick(logits, range(len(prompt), len(prompt) + 24), sampling)
        lengths.append(run.emitted / run.sweeps)
    assert mean(lengths) > 2.0


def test_without_a_drafter_each_sweep_emits_one_token(target: RaggedModel, prompts: list[list[int]]) -> None:
    run = generate(target, NoDrafter(), prompts[0], GREEDY, Size(5, 0))
    assert (run.emitted, run.sweeps) == (4, 4)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_kept_kv_gives_the_tree_of_a_fresh_drafter(
    draft: RaggedModel, prompts: list[list[int]], sampling: Sampling
) -> None:
    """Sequences that go on, stop half-way along a path, are edited, repeated, and cut back."""
    kept = ModelDrafter(draft, VOCAB, 512)
    sequence = prompts[0]
    tree = kept.grow(sequence, 16, 16, sampling)
    path = accepted_path(tree)
    assert len(path) >= 2
    further = [*sequence, *path, unused_token(tree)]
    edited = [*further[:50], *prompts[1][:40]]
    for sequence in (further, further, [*further, 77], [*further, 78, 79], edited, edited[:30]):
        tree = kept.grow(sequence, 16, 16, sampling)
        fresh = ModelDrafter(draft, VOCAB, 512).grow(sequence, 16, 16, sampling)
        assert (tree.tokens, tree.parents) == (fresh.tokens, fresh.parents)
        assert tree.acceptance_probs == pytest.approx(fresh.acceptance_probs, rel=1e-4)
        kept.session.kv_cache.check_integrity()


def test_accepted_nodes_are_not_run_again(draft: RaggedModel, prompts: list[list[int]]) -> None:
    drafter = ModelDrafter(draft, VOCAB, 512)
    sequence = prompts[0]
    tree = drafter.grow(sequence, 16, 16, GREEDY)
    sequence = [*sequence, *accepted_path(tree), unused_token(tree)]
    before = drafter.session.rows
    drafter.grow(sequence, 16, 1, GREEDY)
    assert drafter.session.rows - before == 1, "only the pending token lacks KV"


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lookup", [False, True])
def test_a_search_goes_on_below_what_was_picked(
    draft: RaggedModel, prompts: list[list[int]], sampling: Sampling, lookup: bool
) -> None:
    """The picked node and what hangs below it is not run again, and the tree is that of a fresh drafter."""

    def drafter() -> ModelDrafter:
        return ModelDrafter(draft, VOCAB, 512, lookup=Lookup() if lookup else None)

    kept, sequence = drafter(), prompts[0]
    path = accepted_path(kept.grow(sequence, 96, 16, sampling))
    assert len(path) >= 3
    for token in path[:-1]:
        sequence = [*sequence, token]
        fresh, before = drafter(), kept.session.rows
        wanted = fresh.grow(sequence, 32, 16, sampling)
        assert kept.grow(sequence, 1, 1, sampling).tokens == wanted.tokens[:1]
        assert kept.session.rows == before, "the last token is not run again for its candidates"
        tree = kept.grow(sequence, 32, 16, sampling)
        assert kept.session.rows - before < fresh.session.rows - len(sequence)
        assert tree.rounds < wanted.rounds
        assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
        assert tree.acceptance_probs == pytest.approx(wanted.acceptance_probs, rel=1e-4)
        kept.session.kv_cache.check_integrity()
    before = kept.session.rows
    kept.grow(sequence, 4, 1, replace(sampling, temperature=0.7, seed=9))
    assert kept.session.rows - before == 1, "ranked for another noise, it is of no use"


def test_what_was_expanded_comes_back_in_one_batch(
    draft: RaggedModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep it is, and whatever small tree was asked for meanwhile."""
    batches: list[int] = []
    recalled = Ranker.add_remembered

    def recall(ranker: Ranker, search: Search, known: Mapping[int, Row]) -> None:
        batches.append(len(known))
        recalled(ranker, search, known)

    monkeypatch.setattr(Ranker, "add_remembered", recall)
    drafter = ModelDrafter(draft, VOCAB, 512, Calibration())
    tree = drafter.grow(prompts[0], 96, 16, GREEDY)
    sequence = [*prompts[0], tree.tokens[0]]
    drafter.grow(sequence, 1, 1, GREEDY)
    batches.clear()
    again = drafter.grow(sequence, 64, 15, GREEDY)
    root, *rest = batches
    assert root == 1
    assert rest[0] > 16
    assert rest[0] > 0.9 * sum(rest)
    assert again.depth >= 3


def test_what_was_left_out_is_searched_for_where_it_is_wanted_after_all(
    draft: RaggedModel, prompts: list[list[int]]
) -> None:
    drafter, fresh = (ModelDrafter(draft, VOCAB, 512) for _ in range(2))
    drafter.grow(prompts[0], 64, 16, WARM, StopRule(min_probability=0.2))
    wanted = fresh.grow(prompts[0], 64, 16, WARM, StopRule(min_probability=0.01))
    found = drafter.grow(prompts[0], 64, 16, WARM, StopRule(min_probability=0.01))
    assert (found.tokens, found.parents) == (wanted.tokens, wanted.parents)
    assert min(found.acceptance_probs) < 0.2 * PRUNE_RATIO


def test_what_is_recalled_is_believed_as_far_as_was_learned_since(draft: RaggedModel, prompts: list[list[int]]) -> None:
    class Doubting(Calibration):
        factor = 1.0

        def acceptance_probs(self, candidates: Candidates) -> NDArray[np.float64]:
            return self.factor * super().acceptance_probs(candidates)

    doubting = Doubting()
    drafter = ModelDrafter(draft, VOCAB, 512, doubting)
    tree = drafter.grow(prompts[0], 64, 16, GREEDY)
    sequence = [*prompts[0], tree.tokens[0]]
    before = drafter.grow(sequence, 1, 1, GREEDY).acceptance_probs[0]
    doubting.factor = 0.5
    again = ModelDrafter(draft, VOCAB, 512, doubting)
    again.grow(prompts[0], 64, 16, GREEDY)
    doubting.factor = 0.25
    assert again.grow(sequence, 1, 1, GREEDY).acceptance_probs[0] == pytest.approx(before / 4)


def test_a_tree_says_whether_the_text_had_to_be_read_for_it(draft: RaggedModel, prompts: list[list[int]]) -> None:
    """Which takes as long as the text is: it is no measure of what trees take."""
    drafter, (one, other, *_) = ModelDrafter(draft, VOCAB, 512), prompts
    said = [*one, 7, 8]
    grown = [drafter.grow(text, 8, 8, GREEDY).has_read for text in (one, said, [*said, 9], other, [*other, 7], one)]
    assert grown == [True, False, False, True, False, True]


def test_only_what_follows_an_edit_is_run_again(draft: RaggedModel, prompts: list[list[int]]) -> None:
    drafter = ModelDrafter(draft, VOCAB, 512)
    drafter.grow(prompts[0], 16, 16, GREEDY)
    before = drafter.session.rows
    drafter.grow([*prompts[0][:60], *prompts[1][:20]], 16, 1, GREEDY)
    assert drafter.session.rows - before == 20


def test_long_prompts_run_in_chunks(draft: RaggedModel, prompts: list[list[int]]) -> None:
    drafter = ModelDrafter(draft, VOCAB, 2048)
    sequence = [token for prompt in prompts * 3 for token in prompt][: 2 * PREFILL_ROWS + 7]
    forwards = draft.forwards
    tree = drafter.grow(sequence, 4, 1, GREEDY)
    assert draft.forwards - forwards == 3
    whole = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    with torch.no_grad():
        logits = whole(torch.tensor([sequence]), use_cache=False).logits[0, -1]
    assert list(tree.tokens) == logits.topk(4).indices.tolist()


def test_siblings_differ_and_the_tree_keeps_its_size(draft: RaggedModel, prompts: list[list[int]]) -> None:
    drafter = ModelDrafter(draft, VOCAB, 512)
    for sampling in (GREEDY, WARM, Sampling(seed=5, temperature=0.6, top_k=3)):
        tree = drafter.grow(prompts[2], 64, 5, sampling)
        named = list(zip(tree.parents, tree.tokens, strict=True))
        assert len(named) == len(set(named)) == 64
        depths: list[int] = []
        for parent in tree.parents:
            depths.append(1 + (depths[parent] if parent is not None else 0))
        assert max(depths) <= 5


def test_filters_bound_the_children(draft: RaggedModel, prompts: list[list[int]]) -> None:
    tree = ModelDrafter(draft, VOCAB, 512).grow(prompts[2], 16, 4, Sampling(seed=5, temperature=0.6, top_k=1))
    assert tree.parents == (None, 0, 1, 2), "top-k 1 leaves one child per node"


def test_padded_ids_are_never_drafted(draft: RaggedModel, prompts: list[list[int]]) -> None:
    shared = 300
    sequence = [token % shared for token in prompts[0]]
    tree = ModelDrafter(draft, shared, 512).grow(sequence, 64, 16, GREEDY)
    assert len(tree) == 64
    assert max(tree.tokens) < shared


def test_no_nodes_and_no_drafter_run_nothing(draft: RaggedModel, prompts: list[list[int]]) -> None:
    forwards = draft.forwards
    assert ModelDrafter(draft, VOCAB, 512).grow(prompts[0], 0, 16, GREEDY) == DraftTree()
    assert NoDrafter().grow(prompts[0], 16, 16, GREEDY) == DraftTree()
    assert draft.forwards == forwards


def test_beyond_its_window_the_drafter_falls_silent(draft: RaggedModel, prompts: list[list[int]]) -> None:
    window = 90
    drafter = ModelDrafter(draft, VOCAB, window)
    sequence = prompts[0]
    assert len(drafter.grow(sequence[: window - 2], 16, 16, GREEDY)) == 16
    assert set(drafter.grow(sequence[:window], 8, 16, GREEDY).parents) == {None}
    assert drafter.grow(sequence[: window + 1], 16, 16, GREEDY) == DraftTree()


def test_an_interrupted_tree_leaves_the_drafter_usable(
    draft: RaggedModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = ModelDrafter(draft, VOCAB, 512)
    drafter.grow(prompts[0], 16, 16, GREEDY)
    cut_off = [*prompts[0], 5]

    def interrupt(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(draft, "head_output", interrupt)
        with pytest.raises(KeyboardInterrupt):
            drafter.grow(cut_off, 16, 16, GREEDY)
    fresh = ModelDrafter(draft, VOCAB, 512).grow([*cut_off, 6], 16, 16, GREEDY)
    assert drafter.grow([*cut_off, 6], 16, 16, GREEDY).tokens == fresh.tokens


class Pupil(Calibration):
    """A calibration that remembers its lessons."""

    def __init__(self) -> None:
        super().__init__()
        self.lessons: list[tuple[Candidates, NDArray[np.bool_]]] = []

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        self.lessons.append((candidates, hits))
        super().learn(candidates, hits)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_labels_belong_to_the_candidates_that_the_tree_was_made_of(
    draft: RaggedModel, prompts: list[list[int]], sampling: Sampling
) -> None:
    pupil = Pupil()
    drafter = ModelDrafter(draft, VOCAB, 512, acceptance_model=pupil)
    tree = drafter.grow(prompts[1], 24, 16, sampling)
    [lesson] = tree.lessons
    assert isinstance(lesson, RankLesson)
    nodes, evidence = gather(lesson.known((None, *range(len(tree)))))
    assert len(set(nodes)) == len(nodes)
    assert {None, *tree.parents} <= set(nodes)
    probabilities = pupil.acceptance_probs(evidence.candidates)
    for token, parent, probability in zip(tree.tokens, tree.parents, tree.acceptance_probs, strict=True):
        row = nodes.index(parent)
        [column] = np.flatnonzero(evidence.tokens[row] == token)
        before = tree.acceptance_probs[parent] if parent is not None else 1.0
        assert probability == pytest.approx(before * probabilities[row, column])

    known = [node for node in nodes if node != 0]
    picks = {node: int(evidence.tokens[nodes.index(node), 2]) for node in known}
    drafter.learn(tree, {**picks, None: unused_token(tree)})
    [(candidates, hits)] = pupil.lessons
    assert len(candidates.scores) == len(hits) == len(known), "node 0 has no pick and teaches nothing"
    for node, row in zip(known, hits, strict=True):
        assert row.tolist() == [column == 2 and node is not None for column in range(8)]


def test_a_tree_without_known_picks_teaches_nothing(draft: RaggedModel, prompts: list[list[int]]) -> None:
    pupil = Pupil()
    drafter = ModelDrafter(draft, VOCAB, 512, acceptance_model=pupil)
    drafter.learn(drafter.grow(prompts[0], 16, 16, GREEDY), {})
    drafter.learn(DraftTree(), {None: 5})
    assert pupil.lessons == []


def test_lessons_raise_acceptance_and_leave_the_text(
    target: RaggedModel, draft: RaggedModel, prompts: list[list[int]]
) -> None:
    """Another passage teaches; measured: 13 sweeps instead of 18, and the bound tells learning from none."""
    taught = ModelDrafter(draft, VOCAB, 256, acceptance_model=Calibration())
    [lesson] = demo_prompts(1, first=1)
    generate(target, taught, lesson, GREEDY, Size(24, 16))
    before, after = 0, 0
    for prompt in prompts[:2]:
        prior = generate(target, ModelDrafter(draft, VOCAB, 256), prompt, GREEDY, Size(24, 16))
        learned = generate(target, taught, prompt, GREEDY, Size(24, 16))
        assert learned.tokens == prior.tokens
        before, after = before + prior.sweeps, after + learned.sweeps
    assert after < 0.85 * before


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
async def test_every_sweep_of_the_decode_loop_is_a_lesson(
    target: RaggedModel,
    draft: RaggedModel,
    prompts: list[list[int]],
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the picks are told of the right nodes: following them goes as far as the sweep's tokens say."""
    drafter = ModelDrafter(draft, VOCAB, 256, acceptance_model=Calibration())
    lessons: list[tuple[DraftTree, Picks, Picks]] = []

    def learn(tree: DraftTree, picks: Picks, others: Picks) -> None:
        lessons.append((tree, picks, others))
        ModelDrafter.learn(drafter, tree, picks, others)

    monkeypatch.setattr(drafter, "learn", learn)
    async with decoding(target, drafter, prompts[0], sampling) as (job, pieces):
        text = "".join([piece async for piece in pieces])
    async with decoding(target, NoDrafter(), prompts[0], sampling) as (_, pieces):
        assert text == "".join([piece async for piece in pieces])
    drafted = [sweep for sweep in job.sweeps if sweep.nodes]
    assert [len(picks) for _, picks, _ in lessons] == [sweep.emitted for sweep in drafted]
    for tree, picks, others in lessons:
        assert picks.keys().isdisjoint(others)
        assert {*picks, *others} == {None, *range(len(tree))}
        on_path = accepted(tree, {**others, **picks})
        assert picks.keys() == {None, *(node for node in range(len(tree)) if on_path[node])}
    assert any(others for _, _, others in lessons)
    assert max(sweep.emitted for sweep in drafted) > 2


@pytest.mark.asyncio
async def test_a_lesson_that_fails_is_not_hidden(
    target: RaggedModel, draft: RaggedModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn(tree: DraftTree, picks: Picks, others: Picks) -> None:
        raise ZeroDivisionError

    drafter = ModelDrafter(draft, VOCAB, 256)
    monkeypatch.setattr(drafter, "learn", learn)
    async with decoding(target, drafter, prompts[0], GREEDY) as (_, pieces):
        with pytest.raises(ZeroDivisionError):
            async for _ in pieces:
                pass
