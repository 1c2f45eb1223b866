"""The floor of a sweep: its links, its bytes, its forwards and its draft, each timed bare, without a network or a node.

Forwards have the same shapes, the same spans and the same thread count as on the nodes, but run here, one after the
other: [K + 1 rows] through every span, the head and the picks at the end; and the draft grows its trees alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch

from benchmarks.simulation.acceptance import Size, demo_prompts, generate
from client.draft.drafter import ModelDrafter
from client.draft.search.calibration import Calibration
from client.draft.search.tree import DraftTree
from client.tools.demo.link_shape import LinkShape
from node.model.checkpoint import open_checkpoint
from node.model.span import SpanModel, load_span
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows, load_whole
from swarm.compute.row_codec import encode_rows
from swarm.compute.sampling import pick
from swarm.demo import DRAFT, TARGET
from swarm.protocol.frames import split
from swarm.protocol.messages import Codec, Frame, Reply, Sampling, Sweep, SweepFrame
from swarm.protocol.session import Limits, SessionState

T = TypeVar("T")

CONTEXT_TOKENS = 120
"""About the middle of a benchmark's sequences."""
STEP_TOKENS = 3
"""Tokens by which the sequence grows between two drafts, about what a sweep emits."""
LEVELS = 16
PAUSE_S = 0.015
"""About how long a hop of three waits for its next sweep on a near network."""
LESSONS, LESSON_TOKENS, LESSON_NODES = 4, 32, 16


@dataclass(frozen=True, slots=True)
class BareTimes:
    """Bare parts of a sweep with a tree of `nodes` (K), in milliseconds: medians.

    Attributes:
        compute_ms: Forwards of all spans, the head and the picks.
        rested_ms: The same forwards, each after a pause as on a hop between two sweeps. No part of the floor.
    """

    nodes: int
    temperature: float
    compute_ms: float
    draft_ms: float
    message_bytes: tuple[int, ...]
    rested_ms: float = 0.0

    def floor_ms(self, shape: LinkShape) -> float:
        """Delays of all links, bytes at their rate, compute and draft (docs/benchmarks/index.md)."""
        wire_ms = sum(shape.transmit_s(size) for size in self.message_bytes) * 1e3
        return len(self.message_bytes) * shape.delay_ms + wire_ms + self.compute_ms + self.draft_ms


@dataclass(slots=True)
class BareTimer:
    """Times the demo model's spans and its draft in this process. Each further round adds samples, so noise is
    shared.
    """

    spans: Sequence[Span]
    _models: list[SpanModel] = field(default_factory=list)
    _samples: dict[tuple[int, float], tuple[list[float], list[float], list[float]]] = field(default_factory=dict)
    _trees: dict[tuple[int, float], DraftTree] = field(default_factory=dict)
    _sequence: Sequence[int] = ()
    _drafter: ModelDrafter | None = None

    def load(self) -> None:
        checkpoint = open_checkpoint(TARGET)
        self._models = [load_span(checkpoint, span, torch.float32) for span in self.spans]
        draft = load_whole(DRAFT, torch.float32)
        window = draft.max_positions or 2_048
        self._drafter = ModelDrafter(draft, self._models[-1].vocab_size, window, acceptance_model=Calibration())
        (self._sequence,) = demo_prompts(1, tokens=2 * CONTEXT_TOKENS)

    def teach(self, temperatures: Sequence[float]) -> None:
        """Let the draft learn as a client's does within its first texts: what it knows decides how deep it looks."""
        assert self._drafter is not None, "load comes first"
        target = load_whole(TARGET, torch.float32)
        for temperature in temperatures:
            for number, prompt in enumerate(demo_prompts(LESSONS, first=1)):
                generate(
                    target, self._drafter, prompt, Sampling(number, temperature), Size(LESSON_TOKENS, LESSON_NODES)
                )

    def sample(self, nodes: int, temperature: float, repeats: int) -> None:
        """Time a few more sweeps of this size."""
        sampling = Sampling(seed=1, temperature=temperature)
        forwards, drafts, rested = self._samples.setdefault((nodes, temperature), ([], [], []))
        for repeat in range(repeats):
            tree, draft_ms = self._draft(nodes, sampling, repeat)
            drafts.append(draft_ms)
            forwards.append(self._forward(tree, sampling))
            rested.append(self._forward(tree, sampling, PAUSE_S))
            self._trees[nodes, temperature] = tree

    def result(self, nodes: int, temperature: float) -> BareTimes:
        forwards, drafts, rested = self._samples[nodes, temperature]
        sizes = self._message_bytes(self._trees[nodes, temperature])
        return BareTimes(nodes, temperature, median(forwards), median(drafts), sizes, median(rested))

    def _draft(self, nodes: int, sampling: Sampling, repeat: int) -> tuple[DraftTree, float]:
        assert self._drafter is not None, "load comes first"
        if nodes == 0:
            return DraftTree(), 0.0
        length = CONTEXT_TOKENS - 30 + STEP_TOKENS * (repeat % 20)
        grow = self._drafter.grow
        grow(self._sequence[:length], nodes, LEVELS, sampling)  # what the client drafted for the sweep before
        return _timed(lambda: grow(self._sequence[: length + STEP_TOKENS], nodes, LEVELS, sampling))

    def _forward(self, tree: DraftTree, sampling: Sampling, pause_s: float = 0.0) -> float:
        """One sweep through every span with a fresh KV of the context; only the sweep is timed, no pause before it."""
        total_ms = 0.0
        limits = Limits(
            self._models[-1].vocab_size, 2 * CONTEXT_TOKENS, sweeps=1, nodes=CONTEXT_TOKENS + len(tree.tokens)
        )
        state = SessionState(limits)
        kv_caches = [KvCache(model.layout, limits.window_tokens + limits.nodes) for model in self._models]
        for sweep in (_prompt(self._sequence[:CONTEXT_TOKENS]), _sweep(tree, self._sequence[CONTEXT_TOKENS])):
            applied = state.apply(sweep)
            rows: torch.Tensor | None = None
            total_ms = 0.0
            for model, kv_cache in zip(self._models, kv_caches, strict=True):
                if applied.path:
                    kv_cache.commit(applied.path, applied.survivors)
                ids = torch.tensor(sweep.tokens) if rows is None else None
                work = SessionRows(kv_cache, applied.appended, sweep.parents, applied.positions, ids, rows)
                time.sleep(pause_s)
                rows, spent_ms = _timed(lambda model=model, work=work: model.forward([work]))  # type: ignore[misc]
                total_ms += spent_ms
            at = [position + 1 for position in applied.positions]
            total_ms += _timed(lambda rows=rows, at=at: pick(self._models[-1].logits(rows), at, sampling))[1]  # type: ignore[misc]
        return total_ms

    def _message_bytes(self, tree: DraftTree) -> tuple[int, ...]:
        """Bytes of a sweep's messages, link by link."""
        sweep = _sweep(tree, 0)
        rows = encode_rows(torch.zeros(len(sweep.tokens), self._models[0].hidden_size), Codec.FP32)
        reply = Reply(sweep.sequence, 0, tuple((TreeNodeId(node), 1) for node in range(len(sweep.tokens))))
        middle: list[Frame] = [SweepFrame(sweep, None, rows)] * (len(self._models) - 1)
        return tuple(sum(len(part) for part in split(frame)) for frame in (SweepFrame(sweep), *middle, reply))


def _prompt(tokens: Sequence[int]) -> Sweep:
    parents = (None, *(TreeNodeId(node) for node in range(len(tokens) - 1)))
    last = TreeNodeId(len(tokens) - 1)
    return Sweep(1, 0, TreeNodeId(0), tuple(tokens), parents, last)


def _sweep(tree: DraftTree, pending: int) -> Sweep:
    """The decode sweep after `_prompt`: the pending token and the tree below it."""
    first = TreeNodeId(CONTEXT_TOKENS)
    hung = [first if parent is None else TreeNodeId(first + 1 + parent) for parent in tree.parents]
    tokens = (pending, *tree.tokens)
    commit = TreeNodeId(CONTEXT_TOKENS - 1)
    return Sweep(2, CONTEXT_TOKENS, first, tokens, (None, *hung), first, acked=1, commit_to=commit)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    value = work()
    return value, (time.perf_counter() - started) * 1e3
