"""One sweep on one hop, run slice by slice on the compute thread: the KV changes, the forward, the picks.

Any topological cut of a sweep gives the same result (F3), so a slice is simply the next few nodes in order.
Owns no queue and no network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from node.span import SpanModel
from swarm.arena import Arena
from swarm.codec import all_finite, decode_rows, encode_rows
from swarm.hop_log import SweepWork
from swarm.ids import TreeNodeId
from swarm.layers import Span
from swarm.messages import Codec, Rows, Sampling
from swarm.multistep import by_offset, picks
from swarm.ragged import Work
from swarm.sampling import pick, target_probs

NoiseSource = Callable[[int, int, int], NDArray[np.float64]]
"""Makes a row of noise from seed, position and vocabulary size, as `swarm.noise.gumbel_row`."""


@dataclass(frozen=True, slots=True)
class HopRole:
    """What a session wants of this hop: its layers, how rows leave, which ids the tail may pick, whence its noise."""

    span: Span
    codec: Codec
    valid_tokens: int
    noise: NoiseSource


class SweepRun:
    """The next sweep of a session: `advance` until `is_done`, then read `rows` (a middle hop) or `picks` (the tail)."""

    def __init__(self, model: SpanModel, arena: Arena, role: HopRole, work: SweepWork, sampling: Sampling) -> None:
        self.work = work
        self.compute_ms = 0.0
        self.encode_ms = 0.0
        self.forwards_ms: list[float] = []
        self.rows: Rows | None = None
        self.picks: list[tuple[TreeNodeId, int]] = []
        self._model = model
        self._arena = arena
        self._role = role
        self._sampling = sampling
        self._is_tail = role.span.end == model.num_layers
        self._entered: torch.Tensor | None = None
        self._hidden: list[torch.Tensor] = []
        self._final: dict[TreeNodeId, torch.Tensor] = {}
        self._prepared = False
        self._done = 0

    @property
    def remaining(self) -> int:
        """Nodes that have not been run."""
        return len(self.work.run) - self._done

    @property
    def is_done(self) -> bool:
        """Whether the whole sweep was run."""
        return self._prepared and self.remaining == 0

    @property
    def kept(self) -> tuple[bool, ...]:
        """One flag per node of the sweep: whether it was run here."""
        run = set(self.work.run)
        return tuple(offset in run for offset in range(len(self.work.frame.sweep.tokens)))

    def advance(self, count: int) -> None:
        """Run the next `count` nodes; the first call also applies truncation and commit, the last encodes the rows.

        Raises:
            RemoteProtocolError: the rows that arrived are not finite or of another width.
        """
        if not self._prepared:
            self._prepare()
        chosen = self.work.run[self._done : self._done + count]
        self._done += len(chosen)
        started = time.perf_counter()
        if chosen:
            hidden = self._model.forward([self._work(chosen)], self._role.span)
            if self._is_tail:
                self._pick(chosen, hidden)
            else:
                self._hidden.append(hidden)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(
                self._model.device
            )  # or the next slice, another session's, would be charged for this
        if chosen:
            self.forwards_ms.append((time.perf_counter() - started) * 1e3)
        if self.is_done and not self._is_tail:
            self._encode()

    @property
    def final(self) -> Mapping[TreeNodeId, torch.Tensor]:
        """At the tail, the last layer's hidden rows of nodes whose picks are wanted, if the client wants rows."""
        return self._final

    def _prepare(self) -> None:
        applied = self.work.applied
        if applied.truncated_to is not None:
            self._arena.truncate(applied.truncated_to)
        if applied.path:
            self._arena.commit(applied.path, applied.survivors)
        rows = self.work.frame.rows
        if rows is not None and self.work.run:
            decoded = decode_rows(rows, self._model.dtype, self._model.device)
            self._entered = decoded[torch.tensor(self.work.kept_rows, device=decoded.device)]
        self._prepared = True

    def _work(self, chosen: tuple[int, ...]) -> Work:
        sweep, applied = self.work.frame.sweep, self.work.applied
        entered = self._entered
        ids = None
        if entered is None:
            ids = torch.tensor([sweep.tokens[offset] for offset in chosen], device=self._model.device)
        else:
            start = self._done - len(chosen)
            entered = entered[start : start + len(chosen)]
        return Work(
            arena=self._arena,
            node_ids=tuple(applied.appended[offset] for offset in chosen),
            parents=tuple(sweep.parents[offset] for offset in chosen),
            positions=tuple(applied.positions[offset] for offset in chosen),
            ids=ids,
            rows=entered,
        )

    def _encode(self) -> None:
        started = time.perf_counter()
        empty = torch.empty(0, self._model.hidden_size, dtype=self._model.dtype)
        hidden = torch.cat(self._hidden) if self._hidden else empty
        if not all_finite(hidden):
            raise ArithmeticError("hidden states are not finite")  # this hop's fault, so the next must not be blamed
        self.rows = encode_rows(hidden, self._role.codec)
        self._hidden.clear()
        self.encode_ms = (time.perf_counter() - started) * 1e3

    def _pick(self, chosen: tuple[int, ...], hidden: torch.Tensor) -> None:
        """Run the head on wanted rows only, as many at a time as its memory bound allows (F3)."""
        sweep, applied = self.work.frame.sweep, self.work.applied
        wanted = [row for row, offset in enumerate(chosen) if applied.appended[offset] >= sweep.picks_from]
        if sweep.want is not None and sweep.want.hidden_rows:
            self._final |= {applied.appended[chosen[row]]: hidden[row] for row in wanted}
        for start in range(0, len(wanted), self._model.head_rows):
            rows = wanted[start : start + self._model.head_rows]
            offsets = [chosen[row] for row in rows]
            logits = self._model.logits(hidden[torch.tensor(rows, device=hidden.device)])
            positions = [applied.positions[offset] + 1 for offset in offsets]
            tokens = self._choose(logits, positions, offsets)
            self.picks += [(applied.appended[offset], token) for offset, token in zip(offsets, tokens, strict=True)]

    def _choose(self, logits: torch.Tensor, positions: Sequence[int], offsets: Sequence[int]) -> list[int]:
        """By shared noise, or by what the draft drew."""
        sampling, valid = self._sampling, self._role.valid_tokens
        if not sampling.multistep or sampling.temperature == 0:
            return pick(logits, positions, sampling, valid, self._role.noise)
        sweep = self.work.frame.sweep
        guesses = by_offset(sweep.guesses)
        probs = target_probs(logits[:, :valid], sampling)
        probs = torch.nn.functional.pad(probs, (0, logits.shape[1] - probs.shape[1]))  # padding may be drawn, in vain
        return picks(probs, positions, [guesses.get(offset) for offset in offsets], sampling.seed, sweep.sequence)
