"""Mixers by the kernels against the class's own steps: trees of ragged sessions, long texts, going back, the proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
import torch
from transformers import PreTrainedModel

import swarm.compute.static_forward
from swarm.base.ids import TreeNodeId
from swarm.compute.fast_path import GRAPHS, KERNELS, use_row_invariant_products, use_static
from swarm.compute.kernels.support import KERNEL_VERSION
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.recurrent.mixer import RecurrentMixer
from swarm.compute.static_forward import GraphKey, StaticForward, StaticLimits
from swarm.compute.tree_attention import StaticStep
from tests.devices import DEVICE
from tests.model.recurrent_models import RECURRENT, recurrent_model
from tests.model.tiny_models import reference, whole_model

FORCED: Final = DEVICE == "cpu"
FAST: Final = KERNELS if FORCED else GRAPHS
TOLERANCE: Final = 1e-5
PARENTS: Final = (None, 0, 0, 1, 1, 2, None, 3)
"""A tree, by offset; None is the tip."""
LEAVES: Final = (4, 5, 6, 7)
FAMILIES: Final = ("lfm2", "qwen3_next", "falcon_h1", "nemotron_h")


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def way(offset: int) -> list[int]:
    path = [offset]
    while (parent := PARENTS[path[0]]) is not None:
        path.insert(0, parent)
    return path


class Text:
    """One session."""

    def __init__(self, model: RaggedModel) -> None:
        self.kv_cache = KvCache(model.layout, 128)
        self.tokens: list[int] = []
        self.first = 0

    def rows(self, new: Sequence[int], parents: Sequence[int | None]) -> SessionRows:
        nodes = [TreeNodeId(self.first + offset) for offset in range(len(new))]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        above = [None if parent is None else nodes[parent] for parent in parents]
        positions = [len(self.tokens) + depth for depth in depths]
        return SessionRows(self.kv_cache, nodes, above, positions, torch.tensor(new))

    def chain(self, new: Sequence[int]) -> SessionRows:
        return self.rows(new, [None, *range(len(new) - 1)])

    def commit(self, new: Sequence[int], offsets: Sequence[int]) -> None:
        self.kv_cache.commit([TreeNodeId(self.first + offset) for offset in offsets], [])
        self.kv_cache.check_integrity()
        self.tokens += [new[offset] for offset in offsets]
        self.first += len(new)

    def truncate(self, length: int) -> None:
        self.kv_cache.truncate(length)
        del self.tokens[length:]


def by_kernels(family: str, *buckets: int) -> tuple[RaggedModel, PreTrainedModel]:
    whole = recurrent_model(family)
    model = whole_model(whole)
    use_static(model, 128, sessions=4, buckets=buckets or (16,), forced=FORCED)
    assert model.path == FAST, model.path_reason
    return model, whole


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_of_ragged_sessions_that_go_on_and_back_give_the_whole_models_logits(family: str) -> None:
    model, whole = by_kernels(family, 16, 32)
    assert model.numeric_class.endswith(f"-float32-k{KERNEL_VERSION}") or not FORCED
    texts = [Text(model), Text(model)]
    prompts = [ids(27, 4), ids(4, 5)]
    rows = model.forward([text.chain(new) for text, new in zip(texts, prompts, strict=True)])
    for text, new, own in zip(texts, prompts, torch.split(model.logits(rows).cpu(), [27, 4]), strict=True):
        assert (own - reference(whole, torch.tensor(new))).abs().max() <= TOLERANCE
        text.commit(new, range(len(new)))
    for turn, tip in enumerate((7, 4, 6)):
        trees = [ids(len(PARENTS), 10 * turn + place) for place in range(2)]
        rows = model.forward([text.rows(new, PARENTS) for text, new in zip(texts, trees, strict=True)])
        for text, new, logits in zip(texts, trees, torch.split(model.logits(rows).cpu(), len(PARENTS)), strict=True):
            for leaf in LEAVES:
                path = way(leaf)
                alone = reference(whole, torch.tensor(text.tokens + [new[offset] for offset in path]))
                assert (logits[path] - alone[-len(path) :]).abs().max() <= TOLERANCE
            text.commit(new, way(tip))
        if turn == 1:
            texts[0].truncate(14)
            texts[1].truncate(3)


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next"])
def small(request: pytest.FixtureRequest) -> RaggedModel:
    """One layer with a state and one that attends, unproven, in one bucket: a CPU's own functions cut by the rows."""
    own = {"num_hidden_layers": 2}
    kinds = {"lfm2": ["conv", "full_attention"], "qwen3_next": ["linear_attention", "full_attention"]}
    layers = {**RECURRENT[request.param], **own, "layer_types": kinds[request.param]}
    model = whole_model(recurrent_model(request.param, layers))
    use_row_invariant_products(model)
    model.static = static = StaticForward(model, StaticLimits(128, 4, (16,)))
    static.record()
    return model


def forward(model: RaggedModel, text: Text, new: Sequence[int], parents: Sequence[int | None] = ()) -> torch.Tensor:
    return model.forward([text.rows(new, parents) if parents else text.chain(new)])


def test_a_session_that_went_back_computes_the_bits_of_one_that_never_was_further(
    small: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    run_again = RecurrentMixer.run_again

    def noting(own: RecurrentMixer, kv_cache: KvCache, slots: torch.Tensor, bucket: int, step: StaticStep) -> None:
        again.append(len(slots))
        run_again(own, kv_cache, slots, bucket, step)

    monkeypatch.setattr(RecurrentMixer, "run_again", noting)
    tokens, more, tree = ids(40, 1), ids(9, 2), ids(len(PARENTS), 3)
    far, near = Text(small), Text(small)
    forward(small, far, tokens)
    far.commit(tokens, range(40))
    forward(small, far, more)
    far.commit(more, range(9))
    assert not again
    far.truncate(33)
    forward(small, near, tokens[:33])
    near.commit(tokens[:33], range(33))
    assert torch.equal(forward(small, far, tree, PARENTS), forward(small, near, tree, PARENTS))
    assert sum(again) > 0, "the state after 33 tokens was not kept"
    assert max(again) <= 16
    far.commit(tree, way(7))
    near.commit(tree, way(7))
    assert torch.equal(forward(small, far, more), forward(small, near, more)), "and nothing of it stays behind"


def test_rows_depend_on_no_piece_and_no_other_session(small: RaggedModel) -> None:
    tokens, tree = ids(20, 4), ids(len(PARENTS), 5)
    whole, cut, other = Text(small), Text(small), Text(small)
    rows = forward(small, whole, tokens)
    made = []
    for start, end in ((0, 3), (3, 4), (4, 17), (17, 20)):
        made.append(forward(small, cut, tokens[start:end]))
        cut.commit(tokens[start:end], range(end - start))
    assert torch.equal(torch.cat(made), rows)
    whole.commit(tokens, range(20))
    together = small.forward([other.chain(tokens[:5]), whole.rows(tree, PARENTS)])
    assert torch.equal(together[:5], rows[:5])
    for offset in way(7):
        assert torch.equal(forward(small, cut, tree[offset : offset + 1]), together[5 + offset : 6 + offset])
        cut.commit(tree[offset : offset + 1], [0])


def test_a_tree_that_grows_goes_on_from_states_of_live_nodes(small: RaggedModel) -> None:
    tokens, tree = ids(6, 6), ids(len(PARENTS), 7)
    whole, grown = Text(small), Text(small)
    for text in (whole, grown):
        forward(small, text, tokens)
        text.commit(tokens, range(6))
    rows = forward(small, whole, tree, PARENTS)
    both = grown.rows(tree, PARENTS)
    for start, end in ((0, 3), (3, 8)):
        assert both.token_ids is not None
        nodes, above, at = both.node_ids[start:end], both.parents[start:end], both.positions[start:end]
        work = replace(both, node_ids=nodes, parents=above, positions=at, token_ids=both.token_ids[start:end])
        assert torch.equal(small.forward([work]), rows[start:end])


def test_rows_of_nobody_touch_no_state(small: RaggedModel) -> None:
    """As they run before a graph is recorded while sessions live."""
    static, text = small.static, Text(small)
    assert isinstance(static, StaticForward)
    forward(small, text, ids(9, 9))
    held = [tensor.clone() for tensor in text.kv_cache.state_tensors()]
    with torch.inference_mode():
        static._put_nobody(16)
        static._start(GraphKey(small.span, 16))
    for before, now in zip(held, text.kv_cache.state_tensors(), strict=True):
        assert torch.equal(before.view(torch.int32), now.view(torch.int32))


def test_more_branches_than_the_scratch_holds_are_cut(small: RaggedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = (None, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5)
    tokens = ids(len(parents), 8)
    rows = forward(small, Text(small), tokens, parents)
    monkeypatch.setattr(swarm.compute.static_forward, "SPILL_BYTES", 0)
    monkeypatch.setattr(swarm.compute.static_forward, "MIN_SPILLS", 2)
    whole = small.static
    tight = StaticForward(small, StaticLimits(128, 4, (16,)))
    tight.record()
    small.static = tight
    try:
        assert torch.equal(forward(small, Text(small), tokens, parents), rows)
    finally:
        for mixer in small.mixers:
            mixer.static = None
        small.static = whole
        assert isinstance(whole, StaticForward)
        for mixer in small.mixers:
            whole._make_ready(mixer)
