"""Drafts whose vocabulary is not the target's: what they propose, what they send, what they keep from tree to tree."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.drafting.other_tokenizers import demo_tokenizer
from benchmarks.simulation.acceptance import Size, demo_prompts, generate
from client.base.options import DraftOptions
from client.base.target import Target, load_target
from client.draft.drafter import TreeDrafter
from client.draft.loading import load_drafter
from client.draft.search.tree import DraftTree
from client.draft.sources.model import ModelSource
from client.draft.vocabulary.matching import ModelVocabulary, SharedVocabulary, match_vocabularies
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

GREEDY = Sampling()
WARM = Sampling(seed=5, temperature=1.0)
FILTERED = Sampling(seed=6, temperature=0.8, top_k=20, top_p=0.9)
DRAWN = Sampling(seed=7, temperature=1.0, multistep=True)
SAMPLINGS = {"greedy": GREEDY, "sampled": WARM, "filtered": FILTERED, "multi-step": DRAWN}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return demo_prompts(3, tokens=40)


@pytest.fixture(scope="module")
def demo() -> Target:
    return load_target(TARGET)


@pytest.fixture(scope="module")
def foreign(foreign_draft: Path, demo: Target) -> tuple[RaggedModel, SharedVocabulary]:
    model, own = load_whole(foreign_draft, torch.float32), load_target(foreign_draft).tokenizer
    return model, match_vocabularies(
        ModelVocabulary(demo.tokenizer, demo.vocab_size), ModelVocabulary(own, model.vocab_size)
    )


def drafter_of(foreign: tuple[RaggedModel, SharedVocabulary]) -> TreeDrafter:
    return TreeDrafter([ModelSource(*foreign, 512, adapt=True)])


def path_to_the_deepest(tree: DraftTree) -> list[int]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent is not None else []), token])
    return max(paths, key=len)


Grown = Iterator[tuple[list[int], DraftTree]]


def growing(prompts: list[list[int]], drafter: TreeDrafter, sampling: Sampling) -> Grown:
    """Texts that go on along the tree, leave it, hold what the draft cannot spell, end within a word, and are cut."""
    text = prompts[0]
    tree = drafter.grow(text, 24, 16, sampling)
    yield text, tree
    snowman = demo_tokenizer().encode(" ☃")
    path = path_to_the_deepest(tree)
    for further in (path, [4_000], [1, 2, 0], snowman[:2], snowman[2:], [77, 78, 79, 80, 81]):
        text = [*text, *further]
        yield text, drafter.grow(text, 24, 16, sampling)
    for edited in (text[:45], text[:45], [*text[:30], *prompts[1]], [2]):
        yield edited, drafter.grow(edited, 24, 16, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_only_shared_tokens_are_drafted_and_sent(
    foreign: tuple[RaggedModel, SharedVocabulary], prompts: list[list[int]], sampling: Sampling
) -> None:
    translation = foreign[1].translation
    assert translation is not None
    shared = {token for token in range(4_096) if translation.token_map.draft_id(token) is not None}
    assert len(shared) < 2_000
    drafted = 0
    for _, tree in growing(prompts, drafter_of(foreign), sampling):
        drafted += len(tree)
        assert set(tree.tokens) <= shared
        assert {token for guess in tree.guesses for token in guess.tokens} <= shared
        assert bool(tree.guesses) == sampling.multistep
    assert drafted > 100


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_kept_kv_gives_the_tree_of_a_fresh_drafter(
    foreign: tuple[RaggedModel, SharedVocabulary], prompts: list[list[int]], sampling: Sampling
) -> None:
    """Also where the text's tokens and the draft's do not go one by one, so that positions of noise move."""
    kept = drafter_of(foreign)
    for sequence, tree in growing(prompts, kept, sampling):
        fresh = drafter_of(foreign).grow(sequence, 24, 16, sampling)
        assert (tree.tokens, tree.parents) == (fresh.tokens, fresh.parents)
        assert tree.acceptance_probs == pytest.approx(fresh.acceptance_probs, rel=1e-3)


def test_a_word_that_the_target_spells_out_moves_positions(
    foreign: tuple[RaggedModel, SharedVocabulary], prompts: list[list[int]]
) -> None:
    """The draft reads the same text as before, but the noise of what follows is that of another position."""
    kept, target = drafter_of(foreign), demo_tokenizer()
    vocab = target.get_vocab()
    text, spelt = ([*prompts[0], *(vocab[token] for token in tokens)] for tokens in (["Ġthe"], ["Ġ", "t", "h", "e"]))
    kept.grow(text, 24, 16, WARM)
    again, fresh = (drafter.grow(spelt, 24, 16, WARM) for drafter in (kept, drafter_of(foreign)))
    assert (again.tokens, again.parents) == (fresh.tokens, fresh.parents)
    assert again.tokens != kept.grow(text, 24, 16, WARM).tokens


def test_what_is_sent_is_the_drafts_distribution_over_shared_tokens(
    foreign: tuple[RaggedModel, SharedVocabulary], foreign_draft: Path, demo: Target, prompts: list[list[int]]
) -> None:
    """Against Hugging Face's logits of the draft, after the text as the draft's own tokenizer has it."""
    model, shared = foreign
    assert shared.translation is not None
    own = load_target(foreign_draft).tokenizer
    sampling = Sampling(seed=7, temperature=0.9, multistep=True)
    tree = drafter_of(foreign).grow(prompts[0], 12, 4, sampling)
    plain = AutoModelForCausalLM.from_pretrained(foreign_draft, dtype=torch.float32)
    ids = own(demo.tokenizer.decode(prompts[0]), return_tensors="pt").input_ids
    with torch.no_grad():
        probs = (plain(ids).logits[0, -1].double() / 0.9).softmax(dim=0)
    able = {token: float(probs[shared.translation.token_map.draft_id(token)]) for token in tree.guesses[0].tokens}
    sent = dict(zip(tree.guesses[0].tokens, tree.guesses[0].weights, strict=True))
    total, whole = sum(sent.values()), sum(able.values())
    assert len(sent) == 32
    assert {token: weight / total for token, weight in sent.items()} == pytest.approx(
        {token: prob / whole for token, prob in able.items()}, rel=1e-4
    )
    strings = [shared.translation.token_map.target_id(token) for token in range(model.vocab_size)]
    best = max((prob, token) for prob, token in zip(probs.tolist(), strings, strict=True) if token is not None)
    assert best[1] in sent


def without_a_row(folder: Path) -> Path:
    """The demo draft without the row of its last token, with two tokens of its own, one named otherwise."""
    shutil.copytree(DRAFT, folder)
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    model.resize_token_embeddings(4_095)
    model.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for added in content["added_tokens"]:
        if added["content"] == "<unk>":
            content["model"]["vocab"]["<reserved>"] = content["model"]["vocab"].pop("<unk>")
            added["content"] = "<reserved>"
    path.write_text(json.dumps(content))
    return folder


def test_ids_without_a_row_and_renamed_ones_are_never_drafted(
    demo: Target, target: RaggedModel, prompts: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = without_a_row(tmp_path / "draft")
    with caplog.at_level(logging.INFO, "client.draft.loading"):
        made = load_drafter(TARGET, demo, DraftOptions((folder,), "cpu", lookup=False, siblings=False))
    assert "draft draft knows 99.9 % of the target's tokens (4,094 of 4,096), and drafts no others" in caplog.messages
    drafter = made.drafter
    for sampling in SAMPLINGS.values():
        for sequence in (prompts[0], [*prompts[0], 4_095], [*prompts[0], 4_095, 0, 5], [0, *prompts[1]]):
            tree = drafter.grow(sequence, 24, 8, sampling)
            assert len(tree) > 4, "a text with ids that the draft lacks is drafted for, too"
            assert not {0, 4_095} & set(tree.tokens)
    run = generate(target, drafter, [*prompts[0], 4_095], GREEDY, Size(12, 12))
    assert run.emitted / run.sweeps > 1.4


def test_the_user_is_told_how_much_is_shared(
    foreign_draft: Path, demo: Target, caplog: pytest.LogCaptureFixture
) -> None:
    made = load_drafter(TARGET, demo, DraftOptions((foreign_draft, DRAFT), "cpu"))
    [line] = [message for message in caplog.messages if "tokenizer" in message]
    assert "another tokenizer than the target's; it knows " in line
    foreign, own = made.notes
    assert re.search(r" knows \d\d\.\d % of the target's tokens \(1,\d+ of 4,096\), and drafts no others$", foreign)
    assert foreign.partition(" knows ")[2] in line
    assert own == "draft demo-draft knows all of the target's 4,096 tokens"
