"""A fast path is never trusted unproven: before it serves, small trees run through it and through the plain path.

1. Every bucket gives what the plain path gives, as near as the compute type allows.
2. A replay gives the bits of the same kernels started one by one.
3. Fresh: other tokens, or the same ones at another position, give other rows. A replay that ignored its input fails.
4. A row's bits are the same in every bucket, without its companions, and along a path that is decoded token by token.

Without 1 to 3 the plain path is used. Without 4 a text may depend on the tree's size, as on the plain path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from swarm.base.ids import TreeNodeId
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows

if TYPE_CHECKING:
    from swarm.base.layers import Span
    from swarm.compute.ragged_batch import RaggedModel
    from swarm.compute.static_forward import StaticForward

PROMPTS = (7, 3)
"""Certain tokens of the two sessions."""
PARENTS = (None, 0, 0, 1, 1, 2, 3, None)
"""Each session's tree, by offset; None is the tip."""
PATH = (0, 1, 3, 6)
"""The longest path of it."""
DRAWN_IDS = 1_024
"""Token ids among which the trial finds its own."""
EXACT = 1e-5
"""Most that float32 may be off, as a fraction of the largest value."""
ROUNDED = 0.02
"""Most that a shorter type may be off in one layer, relative (Frobenius); it grows with the root of the layers."""

UNEQUAL_REPLAY = "a replay differs from the kernels that it holds"

Forward = Callable[[Sequence[SessionRows]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProofVerdict:
    """What the proof found.

    Attributes:
        failure: why the fast path cannot be used; empty if it can.
        variance: why a row's bits depend on what is beside it; empty if they do not.
    """

    failure: str = ""
    variance: str = ""


@dataclass(frozen=True, slots=True)
class PlainTrial:
    """What the plain path made of the trial.

    Attributes:
        rows: [r, hidden_size]
        logits: float32 [r, vocab_size] of these, where the span has the head.
    """

    rows: torch.Tensor
    logits: torch.Tensor | None


class Trial:
    """Two sessions of some layers: what runs is the same each time, on KV of its own."""

    def __init__(self, model: RaggedModel, sub: Span) -> None:
        self._model = model
        self._sub = sub
        self._ids = _distinct_ids(model) if sub.start == 0 else None

    def tree(
        self, forward: Forward, *, sessions: Sequence[int] = (0, 1), later: int = 0, other: bool = False
    ) -> torch.Tensor:
        """Each session's prompt, committed, then both trees together.

        Args:
            later: tokens that the prompts are longer, so that the same tree lies at another position.
            other: whether every token of the trees, or hidden row, is another one.

        Returns:
            [len(sessions) · len(PARENTS), hidden_size]
        """
        caches = self._prompted(forward, sessions, later)
        works = []
        for session, kv_cache in zip(sessions, caches, strict=True):
            start = kv_cache.slots.committed
            depths: list[int] = []
            for parent in PARENTS:
                depths.append(0 if parent is None else depths[parent] + 1)
            nodes = [TreeNodeId(start + offset) for offset in range(len(PARENTS))]
            parents = [None if parent is None else nodes[parent] for parent in PARENTS]
            inputs = self._inputs(len(nodes), 10 + session, other=other)
            works.append(SessionRows(kv_cache, nodes, parents, [start + depth for depth in depths], *inputs))
        return forward(works)

    def path(self, forward: Forward) -> torch.Tensor:
        """The longest path of the first session's tree, decoded token by token: [len(PATH), hidden_size]."""
        (kv_cache,) = self._prompted(forward, (0,), 0)
        ids, rows = self._inputs(len(PARENTS), 10)
        made = []
        for offset in PATH:
            at, here = kv_cache.slots.committed, slice(offset, offset + 1)
            node = [TreeNodeId(at)]
            one = (None if ids is None else ids[here], None if rows is None else rows[here])
            made.append(forward([SessionRows(kv_cache, node, [None], [at], *one)]))
            kv_cache.commit(node, [])
        return torch.cat(made)

    def _prompted(self, forward: Forward, sessions: Sequence[int], later: int) -> list[KvCache]:
        layout = self._model.layout.within(self._sub)
        caches, works = [], []
        for session in sessions:
            count = PROMPTS[session] + later
            kv_cache = KvCache(layout, count + len(PARENTS))
            nodes = [TreeNodeId(node) for node in range(count)]
            works.append(SessionRows(kv_cache, nodes, [None, *nodes[:-1]], range(count), *self._inputs(count, session)))
            caches.append(kv_cache)
        forward(works)
        for kv_cache, work in zip(caches, works, strict=True):
            kv_cache.commit(work.node_ids, [])
        return caches

    def _inputs(self, count: int, seed: int, *, other: bool = False) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Token ids [count], or hidden rows [count, hidden_size] where the layers begin elsewhere."""
        model, source = self._model, torch.Generator().manual_seed(seed)
        if self._ids is not None:
            places = torch.randint(len(self._ids), (count,), generator=source)
            return self._ids[(places + other) % len(self._ids)], None
        rows = torch.randn(count, model.hidden_size, generator=source) * (-1 if other else 1)
        return None, rows.to(model.device, model.dtype)


@torch.inference_mode()
def plain_trial(model: RaggedModel) -> PlainTrial:
    """What the plain path makes of the trial; to be asked before anything of the model is changed."""
    rows = Trial(model, model.span).tree(partial(model.plain_forward, sub=model.span))
    return PlainTrial(rows, model.run_head(rows).float() if model.span.end == model.num_layers else None)


@torch.inference_mode()
def prove(static: StaticForward, model: RaggedModel, plain: PlainTrial) -> ProofVerdict:
    """Try the whole span, and the head if there is one; everything is recorded."""
    span, trial = model.span, Trial(model, model.span)
    first, variance = plain.rows, ""
    for bucket in static.buckets:
        replayed = trial.tree(partial(static.forward, sub=span, at_least=bucket))
        if why := _error(replayed, plain.rows, len(span)):
            return ProofVerdict(failure=f"{bucket} rows: {why}")
        if static.has_graphs and not torch.equal(
            replayed, trial.tree(partial(static.forward, sub=span, at_least=bucket, eager=True))
        ):
            return ProofVerdict(failure=f"{bucket} rows: {UNEQUAL_REPLAY}")
        if bucket == static.buckets[0]:
            first = replayed
        elif not torch.equal(replayed, first):
            variance = variance or f"{bucket} rows in one forward give other bits than fewer"
    if why := _staleness(static, trial, span, first):
        return ProofVerdict(failure=why)
    if not torch.equal(trial.tree(partial(static.forward, sub=span), sessions=(0,)), first[: len(PARENTS)]):
        variance = variance or "a session's rows depend on another session's"
    if not torch.equal(trial.path(partial(static.forward, sub=span)), first[list(PATH)]):
        variance = variance or "a tree's rows are not those of the same tokens one by one"
    head = ProofVerdict() if plain.logits is None else _try_head(static, plain)
    return ProofVerdict(head.failure, variance or head.variance)


@torch.inference_mode()
def late_failure(static: StaticForward, model: RaggedModel, sub: Span, bucket: int) -> str:
    """What is wrong with a graph of some layers of a proven span: stale input, or other bits; empty if nothing is."""
    trial = Trial(model, sub)
    replayed = trial.tree(partial(static.forward, sub=sub, at_least=bucket))
    if not torch.equal(replayed, trial.tree(partial(static.forward, sub=sub, at_least=bucket, eager=True))):
        return UNEQUAL_REPLAY
    return _staleness(static, trial, sub, replayed)


def _distinct_ids(model: RaggedModel) -> torch.Tensor:
    """Some token ids of different embeddings: behind a tokenizer's ids, a model may have rows that are all alike."""
    drawn = torch.randint(model.vocab_size, (DRAWN_IDS,), generator=torch.Generator().manual_seed(0))
    rows = cast("Any", model.model).get_input_embeddings()(drawn.to(model.device))
    _, kinds = rows.float().cpu().unique(dim=0, return_inverse=True)
    first = {int(kind): int(token) for kind, token in zip(kinds.flip(0), drawn.flip(0), strict=True)}
    return torch.tensor(sorted(first.values()))


def _error(made: torch.Tensor, plain: torch.Tensor, layers: int) -> str:
    """How far values are off those of the plain path, if that is too far; empty if not."""
    if not made.isfinite().all():
        return "values are not finite"
    wrong, right = (made.double() - plain.double()), plain.double()
    if made.dtype == torch.float32 and plain.dtype == torch.float32:
        error, limit = float(wrong.abs().max() / right.abs().max()), EXACT
    else:
        error, limit = float(wrong.norm() / right.norm()), ROUNDED * math.sqrt(layers)
    return "" if error <= limit else f"{error:.1e} off the plain path, where {limit:.1e} is allowed"


def _staleness(static: StaticForward, trial: Trial, sub: Span, made: torch.Tensor) -> str:
    """Of what a replay takes no notice; empty if of nothing."""
    forward = partial(static.forward, sub=sub)
    changes = {"other tokens": trial.tree(forward, other=True), "another position": trial.tree(forward, later=1)}
    for what, changed in changes.items():
        if bool((changed == made).all(1).any()):
            return f"{what} do not change the result" if what.endswith("s") else f"{what} does not change the result"
    return ""


def _try_head(static: StaticForward, plain: PlainTrial) -> ProofVerdict:
    """The head on the plain path's rows, in each of its buckets."""
    assert plain.logits is not None
    first, variance = static.head(plain.rows).logits, ""
    layers = 1 if plain.rows.dtype == torch.float32 else 2
    for bucket in static.head_buckets:
        made = static.head(plain.rows, at_least=bucket).logits
        if why := _error(made.to(plain.rows.dtype), plain.logits.to(plain.rows.dtype), layers):
            return ProofVerdict(failure=f"head on {bucket} rows: {why}")
        if not torch.equal(made, static.head(plain.rows, at_least=bucket, eager=True).logits):
            return ProofVerdict(failure=f"head on {bucket} rows: {UNEQUAL_REPLAY}")
        if not torch.equal(made, first):
            variance = "the head gives other bits for other numbers of rows"
    if bool((static.head(plain.rows.flip(0)).logits == first).all(1).any()):
        return ProofVerdict(failure="other rows do not change the head's result")
    return ProofVerdict(variance=variance)
