"""Sweeps of several sessions in one forward: what each gets alone, and whose trouble is whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from node.model.checkpoint import open_checkpoint
from node.model.span import SpanModel, load_span
from node.session.scheduler import Batch, BatchMember
from node.session.sweep_run import HopRole, Picking, SweepRun
from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.gumbel import gumbel_row
from swarm.compute.kv_cache import KvCache
from swarm.compute.picks.device_picks import PickRequest, device_picks
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.compute.sampling import NoiseSource
from swarm.protocol.hop_log import HopLog
from swarm.protocol.messages import Codec, Rows, Sampling, Sweep, SweepFrame, Want
from swarm.protocol.session import Limits
from tests.model.tiny_models import LAYERS, VOCAB

LIMITS = Limits(vocab_size=VOCAB, window_tokens=64, sweeps=8, nodes=64)
PARENTS = (None, 0, 0, 1)
SAMPLINGS = (Sampling(seed=7, temperature=1.0), Sampling(seed=8), Sampling(seed=9, temperature=0.7, top_k=9))


class Hop:
    """One session on one machine, without network and engine: a prompt was run."""

    def __init__(self, model: SpanModel, seed: int, sampling: Sampling, noise: NoiseSource | None = gumbel_row) -> None:
        self.model, self.sampling = model, sampling
        self.kv_cache, self._log = KvCache(model.layout, 128), HopLog(LIMITS)
        self._role = HopRole(model.span, Codec.FP32, VOCAB, noise)
        self._random = torch.Generator().manual_seed(seed)
        self._tip: TreeNodeId | None = None
        assert run_batch(self.next((None, 0, 1, 2, 3), commit=4), 5) == {}

    def next(self, parents: Sequence[int | None] = PARENTS, commit: int = 1, *, spoil: bool = False) -> SweepRun:
        """The next sweep.

        parents: by place in the sweep; None is the tip. commit: the place of the node that the one after it commits.
        spoil: a value of the rows that arrive is no number.
        """
        state, count, commit_to = self._log.executed, len(parents), self._tip
        path = 0 if commit_to is None else len(state.path_to(commit_to))
        first = state.next_id
        self._tip = TreeNodeId(first + commit)
        tokens = torch.randint(3, VOCAB, (count,), generator=self._random)
        sweep = Sweep(
            sequence=state.sequence + 1,
            committed=len(state.committed) + path,
            first_id=first,
            tokens=tuple(tokens.tolist()),
            parents=tuple(None if parent is None else TreeNodeId(first + parent) for parent in parents),
            picks_from=TreeNodeId(first + 1),
            commit_to=commit_to,
            sampling=self.sampling,
            want=Want(log_probs=False, hidden_rows=True),
        )
        frame = SweepFrame(sweep, None, None if self.model.span.start == 0 else self._rows(count, spoil=spoil))
        assert self._log.receive(frame)
        work = self._log.next_work()
        assert work is not None
        return SweepRun(self.model, self.kv_cache, self._role, work, Picking(self.sampling))

    def _rows(self, count: int, *, spoil: bool) -> Rows:
        values = torch.randn(count, self.model.hidden_size, generator=self._random)
        rows = encode_rows(values, Codec.FP32)
        broken = torch.full((1,), torch.nan).numpy().tobytes()
        return Rows(rows.codec, rows.count, rows.width, broken + bytes(rows.data)[4:]) if spoil else rows


@pytest.fixture(scope="module", params=[Span(0, LAYERS), Span(2, LAYERS), Span(2, 4)], ids=["whole", "tail", "middle"])
def model(request: pytest.FixtureRequest, whole: Path) -> SpanModel:
    return load_span(open_checkpoint(whole), request.param, torch.float32)


def run_batch(run: SweepRun, rows: int, others: Sequence[SweepRun] = ()) -> dict[SweepRun, Exception]:
    """Some rows of one sweep and all that is left of others, in one batch."""
    parts = [(run, rows), *((other, other.remaining) for other in others)]
    return Batch([BatchMember(None, part, count) for part, count in parts]).run()


def hops(model: SpanModel) -> list[Hop]:
    return [Hop(model, seed, sampling) for seed, sampling in enumerate(SAMPLINGS)]


def same(one: SweepRun, other: SweepRun) -> bool:
    """The same picks of the same nodes, and rows that only the order of additions tells apart."""
    if one.rows is None or other.rows is None:
        pairs = ((row, other.final[node]) for node, row in one.final.items())
        decoded = ((decode_rows(own, torch.float32), decode_rows(its, torch.float32)) for own, its in pairs)
        close = all(torch.allclose(own, its, atol=1e-5) for own, its in decoded)
        return one.rows is other.rows and one.picks == other.picks and one.final.keys() == other.final.keys() and close
    ours, theirs = (decode_rows(run.rows, torch.float32) for run in (one, other) if run.rows is not None)
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)


def test_a_shared_forward_gives_each_what_it_gets_alone(model: SpanModel) -> None:
    """Sweep after sweep, with commits between; of the first session only a part is run with the others."""
    alone, together = hops(model), hops(model)
    for _ in range(3):
        expected, runs = [[hop.next() for hop in some] for some in (alone, together)]
        for run in expected:
            assert run_batch(run, 4) == {}
        forwards = model.forwards
        assert run_batch(runs[0], 2, runs[1:]) == {}
        assert [run.is_done for run in runs] == [False, True, True]
        assert model.forwards == forwards + 1
        assert run_batch(runs[0], 2) == {}
        for one, other in zip(expected, runs, strict=True):
            assert same(one, other)
            assert other.picks or other.rows is not None
    for hop in together:
        hop.kv_cache.check_integrity()


def test_a_device_picks_for_all_sessions_at_once(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a session whose logits are no numbers is the only one that fails."""
    model = load_span(open_checkpoint(whole), Span(2, LAYERS), torch.float32)
    alone = hops(model)
    together = [Hop(model, seed, sampling, noise=None) for seed, sampling in enumerate(SAMPLINGS)]
    asked: list[int] = []

    def counted(logits: torch.Tensor, requests: Sequence[PickRequest]) -> list[list[int] | None]:
        asked.append(len(requests))
        return device_picks(logits, requests)

    for module in ("node.session.scheduler", "swarm.compute.sampling"):
        monkeypatch.setattr(f"{module}.picks_on", lambda _: True)
    monkeypatch.setattr("swarm.compute.sampling.device_picks", counted)
    expected, runs = [[hop.next() for hop in some] for some in (alone, together)]
    for run in expected:
        assert run_batch(run, 4) == {}
    assert run_batch(runs[0], 4, runs[1:]) == {}
    assert asked == [3]
    assert all(same(*pair) for pair in zip(runs, expected, strict=True))
    logits_of = model.logits

    def spoilt(rows: torch.Tensor) -> torch.Tensor:
        logits = logits_of(rows).clone()
        logits[4] = torch.nan  # of the second session: three rows each are asked for
        return logits

    monkeypatch.setattr(model, "logits", spoilt)
    runs = [hop.next() for hop in together]
    failed = run_batch(runs[0], 4, runs[1:])
    assert list(failed) == [runs[1]]
    assert isinstance(failed[runs[1]], ConfigError)
    assert len(runs[0].picks) == len(runs[2].picks) == 3


def test_rows_that_are_no_numbers_are_their_own_sessions_trouble(whole: Path) -> None:
    model = load_span(open_checkpoint(whole), Span(2, LAYERS), torch.float32)
    alone, together = hops(model), hops(model)
    expected = [hop.next() for hop in alone]
    runs = [hop.next(spoil=place == 1) for place, hop in enumerate(together)]
    for run in expected:
        run_batch(run, 4)
    failed = run_batch(runs[0], 4, runs[1:])
    assert list(failed) == [runs[1]]
    assert isinstance(failed[runs[1]], RemoteProtocolError)
    assert same(runs[0], expected[0])
    assert same(runs[2], expected[2])


def test_where_a_shared_forward_fails_each_is_tried_alone(model: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory for all of them; what one raises alone too is its own."""
    alone, together = hops(model), hops(model)
    expected, runs = [[hop.next() for hop in some] for some in (alone, together)]
    for run in expected:
        run_batch(run, 4)
    run_layers: Callable[..., torch.Tensor] = RaggedModel.run_layers

    def short_of_memory(self: RaggedModel, step: object, sub: Span, entering: torch.Tensor, at: torch.Tensor) -> object:
        kv_caches = [part.kv_cache for part in step.parts]  # type: ignore[attr-defined]
        if len(kv_caches) > 1 or kv_caches[0] is together[2].kv_cache:
            raise RuntimeError("no memory")
        return run_layers(self, step, sub, entering, at)

    monkeypatch.setattr(RaggedModel, "run_layers", short_of_memory)
    failed = run_batch(runs[0], 4, runs[1:])
    assert {run: str(error) for run, error in failed.items()} == {runs[2]: "no memory"}
    assert same(runs[0], expected[0])
    assert same(runs[1], expected[1])


def test_a_forward_that_fails_leaves_no_node_behind(target: RaggedModel) -> None:
    """Nor do those before one that cannot be: its parent has no KV."""
    first, second = KvCache(target.layout, 16), KvCache(target.layout, 16)
    nodes = [TreeNodeId(0), TreeNodeId(1)]
    good = SessionRows(first, nodes, [None, nodes[0]], [0, 1], torch.tensor([5, 6]))
    bad = SessionRows(second, nodes, [None, TreeNodeId(9)], [0, 1], torch.tensor([5, 6]))
    with pytest.raises(Exception, match="node 9 has no KV here"):
        target.forward([good, bad])
    assert first.slots.used == second.slots.used == 0
    first.check_integrity()
    rows = target.forward([good])
    other = SessionRows(second, nodes, [None, nodes[0]], [0, 1], torch.tensor([5, 6]))
    assert torch.equal(rows, target.forward([other]))
