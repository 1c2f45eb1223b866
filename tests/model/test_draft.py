"""The drafter with the demo pair: exact text, KV kept across sweeps, and an acceptance that proves the draft works."""

from __future__ import annotations

import re
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.acceptance import Size, demo_prompts, generate
from client.draft import PREFILL_ROWS, ModelDrafter, NoDrafter, check_compatible
from swarm.demo import DRAFT, TARGET
from swarm.errors import IncompatibleDraft
from swarm.messages import Sampling
from swarm.ragged import RaggedModel, load_whole
from swarm.sampling import pick
from swarm.tree import DraftTree

GREEDY = Sampling()
WARM = Sampling(seed=5, temperature=1.0)
VOCAB = 4096


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> RaggedModel:
    return load_whole(TARGET, torch.float32)


@pytest.fixture(scope="module")
def draft() -> RaggedModel:
    return load_whole(DRAFT, torch.float32)


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
        assert tree.chances == pytest.approx(fresh.chances, rel=1e-4)
        kept.session.arena.check_integrity()


def test_accepted_nodes_are_not_run_again(draft: RaggedModel, prompts: list[list[int]]) -> None:
    drafter = ModelDrafter(draft, VOCAB, 512)
    sequence = prompts[0]
    tree = drafter.grow(sequence, 16, 16, GREEDY)
    sequence = [*sequence, *accepted_path(tree), unused_token(tree)]
    before = drafter.session.rows
    drafter.grow(sequence, 16, 1, GREEDY)
    assert drafter.session.rows - before == 1, "only the pending token lacks KV"


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
        patch.setattr(draft, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            drafter.grow(cut_off, 16, 16, GREEDY)
    fresh = ModelDrafter(draft, VOCAB, 512).grow([*cut_off, 6], 16, 16, GREEDY)
    assert drafter.grow([*cut_off, 6], 16, 16, GREEDY).tokens == fresh.tokens


class Vocabulary:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}


def test_equal_tokenizers_are_compatible_whatever_the_padding() -> None:
    check_compatible(Vocabulary("a", "b"), Vocabulary("a", "b"), 64, 2)


@pytest.mark.parametrize(
    ("draft_tokens", "draft_rows", "message"),
    [
        (("a", "c", "d"), 64, "token id 1 is 'b' to the target and 'c' to the draft"),
        (("a", "b"), 64, "token id 2 is 'd' to the target and unknown to the draft"),
        (("a", "b", "d"), 2, "token id 2 has no embedding: the target has 64, the draft 2"),
    ],
)
def test_other_tokenizers_are_refused_in_one_line(draft_tokens: tuple[str, ...], draft_rows: int, message: str) -> None:
    with pytest.raises(IncompatibleDraft, match=re.escape(message)) as refused:
        check_compatible(Vocabulary("a", "b", "d"), Vocabulary(*draft_tokens), 64, draft_rows)
    assert "\n" not in str(refused.value)
