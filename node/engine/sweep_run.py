"""One sweep on one hop, run slice by slice on the compute thread: the KV changes, the forward, the picks.

Any topological cut of a sweep gives the same result (F3), so a slice is simply the next few nodes in order. Slices of
several sessions may share a forward and the head: no row sees another session's. Owns no queue and no network.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from node.model.span import SpanModel
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.multistep_sampling import by_offset, multistep_picks
from swarm.inference.ragged_batch import SessionRows
from swarm.inference.row_codec import all_finite, decode_rows, encode_rows
from swarm.inference.sampling import pick, target_probs
from swarm.layers import Span
from swarm.protocol.hop_log import SweepWork
from swarm.protocol.messages import Codec, Rows, Sampling

logger = logging.getLogger(__name__)

NoiseSource = Callable[[int, int, int], NDArray[np.float64]]
"""Makes a row of noise from seed, position and vocabulary size, as `swarm.inference.gumbel.gumbel_row`."""


@dataclass(frozen=True, slots=True)
class HopRole:
    """What a session wants of this hop: its layers, how rows leave, which ids the tail may pick, whence its noise."""

    span: Span
    codec: Codec
    valid_tokens: int
    noise: NoiseSource


@dataclass(frozen=True, slots=True)
class _Slice:
    """The next nodes of a run: their offsets in its sweep, and what a forward needs of them."""

    run: SweepRun
    chosen: tuple[int, ...]
    work: SessionRows


class SweepRun:
    """The next sweep of a session: `advance` until `is_done`, then read `rows` (a middle hop) or `picks` (the tail)."""

    def __init__(self, model: SpanModel, kv_cache: KvCache, role: HopRole, work: SweepWork, sampling: Sampling) -> None:
        self.work = work
        self.compute_ms = 0.0
        self.encode_ms = 0.0
        self.forwards_ms: list[float] = []
        self.rows: Rows | None = None
        self.picks: list[tuple[TreeNodeId, int]] = []
        self._model = model
        self._kv_cache = kv_cache
        self._role = role
        self._sampling = sampling
        self.is_tail = role.span.end == model.num_layers
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

    def advance(self, count: int, others: Sequence[SweepRun] = ()) -> dict[SweepRun, Exception]:
        """Run the next `count` nodes, and with them in one forward all that remains of others with the same layers.

        The first call of a sweep also applies truncation and commit, the last one encodes the rows. A joint forward
        that fails is tried again for each alone.

        Returns:
            the runs that failed and why: rows that arrived are not finite or of another width, or whatever the forward
            raised. The others are none the worse.
        """
        failed: dict[SweepRun, Exception] = {}
        slices: list[_Slice] = []
        for run, rows in ((self, count), *((other, other.remaining) for other in others)):
            with _blame(run, failed):
                slices.append(run.take(rows))
        started = time.perf_counter()
        working = [piece for piece in slices if piece.chosen]
        for hidden, ran in _forward(self._model, self._role.span, working, failed) if working else ():
            if self.is_tail:
                _pick(self._model, hidden, ran, failed)
            for piece, made in zip(ran, torch.split(hidden, [len(piece.chosen) for piece in ran]), strict=True):
                piece.run.keep(made, piece.chosen)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # or the next slice would be charged for this
        if working:
            self.forwards_ms.append((time.perf_counter() - started) * 1e3)
        for piece in slices:
            if piece.run not in failed and piece.run.is_done and not self.is_tail:
                with _blame(piece.run, failed):
                    piece.run.encode()
        return failed

    @property
    def final(self) -> Mapping[TreeNodeId, torch.Tensor]:
        """At the tail, the last layer's hidden rows of nodes whose picks are wanted, if the client wants rows."""
        return self._final

    def take(self, count: int) -> _Slice:
        """The next `count` nodes, which now count as run; the first time also truncate and commit.

        Raises:
            RemoteProtocolError: the rows that arrived are not finite or of another width.
        """
        if not self._prepared:
            self._prepare()
        start = self._done
        chosen = self.work.run[start : start + count]
        self._done += len(chosen)
        sweep, applied = self.work.frame.sweep, self.work.applied
        ids = rows = None
        if self._entered is None:
            ids = torch.tensor([sweep.tokens[offset] for offset in chosen], device=self._model.device)
        else:
            rows = self._entered[start : start + len(chosen)]
        work = SessionRows(
            kv_cache=self._kv_cache,
            node_ids=tuple(applied.appended[offset] for offset in chosen),
            parents=tuple(sweep.parents[offset] for offset in chosen),
            positions=tuple(applied.positions[offset] for offset in chosen),
            token_ids=ids,
            rows=rows,
        )
        return _Slice(self, chosen, work)

    def _prepare(self) -> None:
        applied = self.work.applied
        if applied.truncated_to is not None:
            self._kv_cache.truncate(applied.truncated_to)
        if applied.path:
            self._kv_cache.commit(applied.path, applied.survivors)
        rows = self.work.frame.rows
        if rows is not None and self.work.run:
            decoded = decode_rows(rows, self._model.dtype, self._model.device)
            self._entered = decoded[torch.tensor(self.work.kept_rows, device=decoded.device)]
        self._prepared = True

    def wanted(self, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Which of these nodes the client wants picks of: (place among them, offset)."""
        appended, picks_from = self.work.applied.appended, self.work.frame.sweep.picks_from
        return [(place, offset) for place, offset in enumerate(chosen) if appended[offset] >= picks_from]

    def keep(self, hidden: torch.Tensor, chosen: Sequence[int]) -> None:
        """Take what the forward made of these nodes: rows for the next hop, or at the tail those that a head wants."""
        want = self.work.frame.sweep.want
        if not self.is_tail:
            self._hidden.append(hidden)
        elif want is not None and want.hidden_rows:
            appended = self.work.applied.appended
            self._final |= {appended[offset]: hidden[place] for place, offset in self.wanted(chosen)}

    def encode(self) -> None:
        """Make the rows that travel on; the last thing that a hop before the tail does."""
        started = time.perf_counter()
        empty = torch.empty(0, self._model.hidden_size, dtype=self._model.dtype)
        hidden = torch.cat(self._hidden) if self._hidden else empty
        if not all_finite(hidden):
            raise ArithmeticError("hidden states are not finite")  # this hop's fault, so the next must not be blamed
        self.rows = encode_rows(hidden, self._role.codec)
        self._hidden.clear()
        self.encode_ms = (time.perf_counter() - started) * 1e3

    def pick(self, logits: torch.Tensor, offsets: Sequence[int]) -> None:
        """Choose the tokens after some nodes: by shared noise, or by what the draft drew."""
        applied = self.work.applied
        positions = [applied.positions[offset] + 1 for offset in offsets]
        tokens = self._choose(logits, positions, offsets)
        self.picks += [(applied.appended[offset], token) for offset, token in zip(offsets, tokens, strict=True)]

    def _choose(self, logits: torch.Tensor, positions: Sequence[int], offsets: Sequence[int]) -> list[int]:
        sampling, valid = self._sampling, self._role.valid_tokens
        if not sampling.multistep or sampling.temperature == 0:
            return pick(logits, positions, sampling, valid, self._role.noise)
        sweep = self.work.frame.sweep
        guesses = by_offset(sweep.guesses)
        probs = target_probs(logits[:, :valid], sampling)
        probs = torch.nn.functional.pad(probs, (0, logits.shape[1] - probs.shape[1]))  # padding may be drawn, in vain
        return multistep_picks(
            probs, positions, [guesses.get(offset) for offset in offsets], sampling.seed, sweep.sequence
        )


@contextmanager
def _blame(run: SweepRun, failed: dict[SweepRun, Exception]) -> Iterator[None]:
    """What is raised within is this run's own trouble."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the other runs go on
        failed[run] = error


def _forward(
    model: SpanModel, span: Span, slices: Sequence[_Slice], failed: dict[SweepRun, Exception]
) -> list[tuple[torch.Tensor, Sequence[_Slice]]]:
    """Hidden rows [R, hidden_size] and whose they are, one after the other: one forward for all if it can be."""
    try:
        return [(model.forward([piece.work for piece in slices], span), slices)]
    except Exception as error:  # noqa: BLE001 - such as no memory for all of them
        if len(slices) == 1:
            failed[slices[0].run] = error
            return []
        logger.warning("a forward of %d sessions failed, now each alone: %s", len(slices), error)
        return [made for piece in slices for made in _forward(model, span, [piece], failed)]


def _pick(model: SpanModel, hidden: torch.Tensor, ran: Sequence[_Slice], failed: dict[SweepRun, Exception]) -> None:
    """Run the head on wanted rows only, of all sessions, as many at a time as its memory bound allows (F3)."""
    wanted: list[tuple[SweepRun, int, int]] = []
    start = 0
    for piece in ran:
        wanted += [(piece.run, start + place, offset) for place, offset in piece.run.wanted(piece.chosen)]
        start += len(piece.chosen)
    for first in range(0, len(wanted), model.head_rows):
        some = wanted[first : first + model.head_rows]
        logits = model.logits(hidden[torch.tensor([row for _, row, _ in some], device=hidden.device)])
        done = 0
        for run, of_run in groupby(some, key=lambda entry: entry[0]):
            offsets = [offset for *_, offset in of_run]
            with _blame(run, failed):
                run.pick(logits[done : done + len(offsets)], offsets)
            done += len(offsets)
