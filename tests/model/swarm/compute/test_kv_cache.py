"""KV after random truncations and commits against a plain prefill; what a commit moves and what it leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from swarm.base.errors import LocalProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache, KvLayout, LayerKv
from swarm.compute.ragged_batch import RaggedModel, SessionRows, load_whole
from swarm.demo import TARGET
from tests.model.tiny_models import chain

LAYOUT = KvLayout((LayerKv(3, 2, 4, 6), LayerKv(4, 1, 4, 4)), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def model() -> RaggedModel:
    return load_whole(TARGET, torch.float32)


def numbered(count: int) -> KvCache:
    """An kv_cache whose row i holds the number i everywhere: nodes 0…count-1, all below the root."""
    kv_cache = KvCache(LAYOUT, 16)
    kv_cache.append([TreeNodeId(node) for node in range(count)], [None] * count, [0] * count)
    for layer in LAYOUT.layers:
        numbers = torch.arange(float(count))[None, :, None]
        keys = numbers.expand(layer.kv_heads, -1, layer.key_width)
        kv_cache.store(layer.index, 0, keys, numbers.expand(layer.kv_heads, -1, layer.value_width))
    return kv_cache


def held(kv_cache: KvCache, layer: int) -> list[float]:
    """What `numbered` rows are now, keys and values agreeing."""
    keys, values = kv_cache.view(layer, kv_cache.slots.used)
    assert torch.equal(keys[..., :1].expand_as(keys), keys)
    assert torch.equal(values[..., :1], keys[..., :1])
    return keys[0, :, 0].tolist()


def test_a_layout_counts_bytes_per_layer_used() -> None:
    assert LAYOUT.bytes_per_token == 4 * (2 * (4 + 6) + 8)
    assert KvCache(LAYOUT.within(Span(4, 9)), 2).bytes_per_token == 4 * 8


def test_a_commit_moves_rows_to_the_front_and_keeps_their_order() -> None:
    kv_cache = numbered(6)
    kv_cache.commit([TreeNodeId(2)], [TreeNodeId(3), TreeNodeId(5)])
    assert held(kv_cache, 3) == held(kv_cache, 4) == [2.0, 3.0, 5.0]
    assert kv_cache.slots.committed == 1


def test_a_refused_append_changes_nothing() -> None:
    kv_cache = numbered(6)
    with pytest.raises(LocalProtocolError, match="do not fit 16 slots"):
        kv_cache.append([TreeNodeId(node) for node in range(6, 17)], [None] * 11, [0] * 11)
    kv_cache.append([TreeNodeId(6)], [None], [0])
    assert kv_cache.slots.used == 7


@dataclass
class Tree:
    """What a session's client knows: the committed text, and each node's token and parent."""

    text: list[int] = field(default_factory=list)
    tokens: dict[TreeNodeId, int] = field(default_factory=dict)
    parents: dict[TreeNodeId, TreeNodeId | None] = field(default_factory=dict)

    def path(self, node: TreeNodeId) -> list[TreeNodeId]:
        path = [node]
        while (parent := self.parents[path[0]]) is not None:
            path.insert(0, parent)
        return path


def grow(model: RaggedModel, kv_cache: KvCache, tree: Tree, rng: random.Random) -> None:
    """Run 1 to 8 new nodes below random live nodes or the tip."""
    nodes = [TreeNodeId(len(tree.tokens) + offset) for offset in range(rng.randint(1, 8))]
    for node in nodes:
        live = [other for other in nodes if other < node]
        tree.parents[node] = rng.choice([None, *kv_cache.slots.ids, *live])
        tree.tokens[node] = rng.randrange(3, 4_000)
    positions = [len(tree.text) + len(tree.path(node)) - 1 for node in nodes]
    ids = torch.tensor([tree.tokens[node] for node in nodes])
    model.forward([SessionRows(kv_cache, nodes, [tree.parents[node] for node in nodes], positions, ids)])


def commit(kv_cache: KvCache, tree: Tree, rng: random.Random) -> None:
    """Commit the path to a random live node; what is below it stays live."""
    tip = rng.choice(kv_cache.slots.ids)
    path = tree.path(tip)
    survivors = [node for node in kv_cache.slots.ids if node != tip and tip in tree.path(node)]
    kv_cache.commit(path, survivors)
    tree.text += [tree.tokens[node] for node in path]
    tree.parents.update({node: None for node in survivors if tree.parents[node] == tip})


@pytest.mark.parametrize("at_first", [None, 1])
@pytest.mark.parametrize("seed", range(4))
def test_after_random_commits_and_truncations_the_kv_is_a_plain_prefills(
    model: RaggedModel, seed: int, at_first: int | None
) -> None:
    rng, kv_cache, tree = random.Random(seed), KvCache(model.layout, 160, at_first=at_first), Tree()
    for _ in range(12):
        grow(model, kv_cache, tree, rng)
        commit(kv_cache, tree, rng)
        if rng.random() < 0.3:
            kv_cache.truncate(rng.randint(0, len(tree.text)))
            del tree.text[kv_cache.slots.committed :]
        kv_cache.check_integrity()
        assert kv_cache.slots.committed == len(tree.text)
    kv_cache.truncate(len(tree.text))
    assert len(tree.text) > 3, "the text is too short to say anything"
    assert (kv_cache.version > 1) == (at_first is not None), "it grew"
    plain = KvCache(model.layout, len(tree.text))
    model.forward([chain(plain, torch.tensor(tree.text))])
    assert kv_cache.slots.positions.tolist() == plain.slots.positions.tolist() == list(range(len(tree.text)))
    for layer in model.layout.layers:
        for got, wanted in zip(
            kv_cache.view(layer.index, kv_cache.slots.used), plain.view(layer.index, plain.slots.used), strict=True
        ):
            assert (got - wanted).abs().max() <= 1e-4


def test_a_session_goes_on_from_what_was_cut_of_another_one(model: RaggedModel) -> None:
    text = torch.arange(100, 180)
    whole, begun = KvCache(model.layout, 96), KvCache(model.layout, 96, at_first=8)
    hidden = model.forward([chain(whole, text)])
    whole.commit([TreeNodeId(node) for node in range(80)], [])
    for start, end in ((0, 16), (16, 64)):
        kv, states = whole.cut(start, end)
        begun.adopt(kv, states, end - start)
    begun.check_integrity()
    with pytest.raises(LocalProtocolError, match="committed tokens"):
        whole.cut(64, 81)
    nodes = [TreeNodeId(node) for node in range(64, 80)]
    rest = SessionRows(begun, nodes, [None, *nodes[:-1]], list(range(64, 80)), text[64:])
    assert (model.forward([rest]) - hidden[64:]).abs().max() <= 1e-4
    for layer in model.layout.layers:
        for got, wanted in zip(begun.view(layer.index, 64), whole.view(layer.index, 64), strict=True):
            assert torch.equal(got, wanted)
    with pytest.raises(LocalProtocolError, match="beside 80"):
        begun.adopt(kv, {}, 48)
