"""States after random commits, going back and failures are those of the text alone, however few are kept."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

import swarm.compute.recurrent.plan
from swarm.base.errors import UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute import state_slots
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.tree_attention import use_canopy
from tests.devices import DEVICE
from tests.model.recurrent_models import recurrent_model
from tests.model.tiny_models import chain, reference


@pytest.fixture(scope="module")
def model() -> RaggedModel:
    whole = recurrent_model("falcon_h1")
    use_canopy(whole.config)
    return RaggedModel(whole.to(DEVICE), Span(0, whole.config.num_hidden_layers))  # type: ignore[arg-type]


@dataclass
class Session:
    """A session and what its client knows of it."""

    model: RaggedModel
    kv_cache: KvCache
    text: list[int] = field(default_factory=list)
    tokens: dict[TreeNodeId, int] = field(default_factory=dict)
    parents: dict[TreeNodeId, TreeNodeId | None] = field(default_factory=dict)

    def path(self, node: TreeNodeId) -> list[TreeNodeId]:
        path = [node]
        while (parent := self.parents[path[0]]) is not None:
            path.insert(0, parent)
        return path

    def rows(self, rng: random.Random) -> SessionRows:
        """New nodes below random live ones or the tip, now and then a long chain."""
        count = rng.choice([1, 3, 8, 20])
        nodes = [TreeNodeId(len(self.tokens) + offset) for offset in range(count)]
        for node in nodes:
            live = [None, *self.kv_cache.slots.ids, *(other for other in nodes if other < node)]
            self.parents[node] = live[-1] if count == 20 else rng.choice(live)
            self.tokens[node] = rng.randrange(3, 128)
        positions = [len(self.text) + len(self.path(node)) - 1 for node in nodes]
        ids = torch.tensor([self.tokens[node] for node in nodes])
        return SessionRows(self.kv_cache, nodes, [self.parents[node] for node in nodes], positions, ids)

    def commit(self, rng: random.Random) -> None:
        tip = rng.choice(self.kv_cache.slots.ids)
        path = self.path(tip)
        survivors = [node for node in self.kv_cache.slots.ids if node != tip and tip in self.path(node)]
        self.kv_cache.commit(path, survivors)
        self.text += [self.tokens[node] for node in path]
        self.parents.update({node: None for node in survivors if self.parents[node] == tip})

    def check(self, hidden: torch.Tensor, work: SessionRows) -> None:
        """Each new row is what its path gives in a session of its own."""
        node = work.node_ids[-1]
        ids = self.text + [self.tokens[each] for each in self.path(node)]
        alone = self.model.forward([chain(KvCache(self.model.layout, len(ids)), torch.tensor(ids))])
        assert (hidden[-1] - alone[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize("pool_bytes", [0, 100 << 20])
def test_rows_do_not_depend_on_which_states_are_kept(
    model: RaggedModel, pool_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_slots, "POOL_BYTES", pool_bytes)
    rng = random.Random(3)
    sessions = [Session(model, KvCache(model.layout, 400, 100)) for _ in range(2)]
    for _ in range(12):
        works = [session.rows(rng) for session in sessions]
        hidden = torch.split(model.forward(works), [len(work.node_ids) for work in works])
        for session, work, rows in zip(sessions, works, hidden, strict=True):
            session.check(rows, work)
            session.commit(rng)
            if rng.random() < 0.3:
                session.kv_cache.truncate(rng.randint(0, len(session.text)))
                del session.text[session.kv_cache.slots.committed :]
            session.kv_cache.check_integrity()


def test_a_commit_to_a_node_with_a_state_computes_nothing_again(
    model: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    made = swarm.compute.recurrent.plan._RoundLayout.plan

    def noted(self: object) -> object:
        plan = made(self)  # type: ignore[arg-type]
        ran.append(sum(len(run.rows) for turn in plan.rounds for run in turn.runs))
        return plan

    monkeypatch.setattr(swarm.compute.recurrent.plan._RoundLayout, "plan", noted)
    kv_cache = KvCache(model.layout, 64)
    model.forward([chain(kv_cache, torch.arange(3, 23))])
    kv_cache.commit([TreeNodeId(node) for node in range(20)], [])
    nodes = [TreeNodeId(20 + node) for node in range(3)]
    model.forward([SessionRows(kv_cache, nodes, [None, nodes[0], nodes[0]], [20, 21, 21], torch.tensor([5, 6, 7]))])
    kv_cache.commit(nodes[:2], [])
    model.forward([chain(kv_cache, torch.tensor([8]), first=23)])
    assert ran == [20, 3, 1]
    kv_cache.truncate(15)
    model.forward([chain(kv_cache, torch.tensor([9]), first=24)])
    assert ran[-1] == 16, "no state was kept within the prompt, so all of it runs again"


def test_a_forward_that_fails_leaves_no_state_behind(model: RaggedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_cache = KvCache(model.layout, 64)
    model.forward([chain(kv_cache, torch.arange(3, 9))])
    kv_cache.commit([TreeNodeId(node) for node in range(6)], [])
    wanted = model.forward([chain(KvCache(model.layout, 64), torch.arange(3, 10))])[-1]
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[-1].get_submodule("mamba.in_proj"), "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward([chain(kv_cache, torch.tensor([50, 51]), first=6)])
    kv_cache.check_integrity()
    assert (kv_cache.slots.used, kv_cache.states.slots.live) == (6, {})  # type: ignore[union-attr]
    got = model.forward([chain(kv_cache, torch.tensor([9]), first=6)])[-1]
    assert (got - wanted).abs().max() <= 1e-5


def test_rows_that_reach_each_other_by_a_way_of_their_own_are_refused() -> None:
    whole = recurrent_model("recurrent_gemma", {"lru_width": 32})
    use_canopy(whole.config)
    with pytest.raises(UnsupportedModel, match="rows reach each other"):
        RaggedModel(whole, Span(0, 6))


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_a_whole_model_gives_the_last_nodes_logits_in_one_call(family: str) -> None:
    """As drafts are run; a class may hand its layers less than the model below it does."""
    whole = recurrent_model(family)
    ids = torch.arange(5, 25)
    wanted = reference(whole, ids)[-3:]
    use_canopy(whole.config)
    model = RaggedModel(whole.to(DEVICE), Span(0, whole.config.num_hidden_layers))  # type: ignore[arg-type]
    output = model.head_output(chain(KvCache(model.layout, 32), ids), 3)
    assert (output.logits.cpu() - wanted).abs().max() <= 1e-5
    assert output.rows is not None
    assert len(output.rows) == 3


def test_projections_at_a_mixers_ends_run_once_for_all_levels_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the class's own forward is back afterwards, also where a call failed."""
    whole = recurrent_model("lfm2")
    use_canopy(whole.config)
    model = RaggedModel(whole.to(DEVICE), Span(0, 6))  # type: ignore[arg-type]
    ran: list[int] = []
    linear = torch.nn.functional.linear

    def counted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ran.append(id(weight))
        return linear(rows, weight, bias)

    kv_cache = KvCache(model.layout, 64)
    model.forward([chain(kv_cache, torch.arange(3, 9))])
    kv_cache.commit([TreeNodeId(node) for node in range(6)], [])
    nodes = [TreeNodeId(6 + node) for node in range(4)]
    tree = SessionRows(kv_cache, nodes, [None, nodes[0], nodes[0], nodes[2]], [6, 7, 7, 8], torch.arange(4) + 5)
    ends = [part for name, part in model.layers[0].named_modules() if name in {"conv.in_proj", "conv.out_proj"}]
    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    model.forward([tree])
    assert [ran.count(id(part.weight)) for part in ends] == [1, 1]
    kv_cache.truncate(6)
    monkeypatch.setattr(torch.nn.functional, "conv1d", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.forward([tree])
    assert not any("forward" in part.__dict__ for part in ends)
