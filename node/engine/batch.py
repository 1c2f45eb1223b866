"""Sweeps of several sessions in one forward. Any topological cut of a sweep gives the same result (F3).

So a member's part is simply the next few nodes of its sweep. Members share the forward and the head; no row sees
another session's. Owns no queue: `node.engine.scheduler` chooses the members.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Generic, TypeVar

import torch

from node.engine.sweep_run import AskedPicks, SweepRun, SweepSlice
from swarm.errors import ConfigError
from swarm.inference.devices import synchronize
from swarm.inference.picks.device_picks import picks_on, to_device
from swarm.inference.sampling import pick_together
from swarm.layers import Span

logger = logging.getLogger(__name__)

SessionT = TypeVar("SessionT")
Forwarded = tuple[torch.Tensor, Mapping[int, torch.Tensor], Sequence[SweepSlice]]
"""Rows [R, hidden_size] that left the span, those that entered layers within it, and whose they are, in order."""


@dataclass(frozen=True, slots=True)
class BatchMember(Generic[SessionT]):
    """One session's part of a batch."""

    session: SessionT
    """Whose sweep it is."""
    run: SweepRun
    rows: int
    """How many of its next tree nodes are run."""


class Batch(Generic[SessionT]):
    """Parts of sweeps with the same layers of the same model, run together once.

    Attributes:
        members: one per session; the batch is the first one's turn.
        predicted_ms: what the forward should take; 0 outside the scheduler.
    """

    def __init__(self, members: Sequence[BatchMember[SessionT]], predicted_ms: float = 0.0) -> None:
        self.members = tuple(members)
        self.predicted_ms = predicted_ms
        self._failed: dict[SweepRun, Exception] = {}

    @property
    def rows(self) -> list[int]:
        """How many rows each member brings."""
        return [member.rows for member in self.members]

    @property
    def encode_ms(self) -> float:
        """How long rows of these sweeps were encoded so far."""
        return sum(member.run.encode_ms for member in self.members)

    def run(self) -> dict[SweepRun, Exception]:
        """Run the next rows of every member in one forward, on the calling thread.

        The first part of a sweep also applies truncation and commit, the last one encodes the rows. A joint forward
        that fails is tried again for each alone.

        Returns:
            the runs that failed and why: rows that arrived are not finite or of another width, or whatever the forward
            raised. The others are none the worse.
        """
        lead = self.members[0].run
        slices = self._take()
        started = time.perf_counter()
        working = [piece for piece in slices if piece.chosen]
        for hidden, kept, ran in self._forward(working) if working else ():
            if lead.is_tail:
                self._pick(hidden, ran)
            start = 0
            for piece in ran:
                own = slice(start, start + len(piece.chosen))
                piece.run.keep(piece, hidden[own], {layer: rows[own] for layer, rows in kept.items()})
                start = own.stop
        synchronize(lead.model.device)  # or the next batch would be charged for this
        if working:
            lead.forwards_ms.append((time.perf_counter() - started) * 1e3)  # of one member: a forward counts once
        if not lead.is_tail:
            self._encode(slices)
        return self._failed

    def _take(self) -> list[SweepSlice]:
        slices: list[SweepSlice] = []
        for member in self.members:
            with self._blame(member.run):
                slices.append(member.run.take(member.rows))
        return slices

    def _forward(self, slices: Sequence[SweepSlice]) -> list[Forwarded]:
        """Hidden rows and whose they are, one after the other: one forward for all if it can be."""
        lead, works = self.members[0].run, [piece.work for piece in slices]
        cuts = sorted({layer for piece in slices for layer in piece.run.cuts})
        try:
            if not cuts:
                return [(lead.model.forward(works, lead.span), {}, slices)]
            parts = [Span(*ends) for ends in pairwise((lead.span.start, *cuts, lead.span.end))]
            *kept, hidden = lead.model.forward_parts(works, parts)
            return [(hidden, dict(zip(cuts, kept, strict=True)), slices)]
        except Exception as error:  # noqa: BLE001 - such as no memory for all of them
            if len(slices) == 1:
                self._failed[slices[0].run] = error
                return []
            logger.warning("a forward of %d sessions failed, now each alone: %s", len(slices), error)
            return [result for piece in slices for result in self._forward([piece])]

    def _pick(self, hidden: torch.Tensor, ran: Sequence[SweepSlice]) -> None:
        """Run the head on the rows [R, hidden_size] whose picks a client wants, of all sessions.

        As many at a time as the head's memory bound allows (F3).
        """
        model = self.members[0].run.model
        asked: list[tuple[SweepRun, int, int]] = []
        start = 0
        for piece in ran:
            asked += [(piece.run, start + place, offset) for place, offset in piece.run.asked(piece.chosen)]
            start += len(piece.chosen)
        for first in range(0, len(asked), model.head_rows):
            some = asked[first : first + model.head_rows]
            logits = model.logits(_rows_of(hidden, [row for _, row, _ in some]))
            logits = logits if picks_on(logits.device) else logits.cpu()
            self._pick_after(logits, [(run, offset) for run, _, offset in some])

    def _pick_after(self, logits: torch.Tensor, asked: Sequence[tuple[SweepRun, int]]) -> None:
        """Pick after nodes of all sessions together: on a card, one wait for all of them.

        Args:
            logits: float32 [R, vocab_size]
            asked: [R] whose row it is, and the node by its place in the sweep.
        """
        prepared: list[tuple[SweepRun, AskedPicks]] = []
        first = 0
        for run, of_run in groupby(asked, key=lambda entry: entry[0]):
            offsets = [offset for _, offset in of_run]
            with self._blame(run):
                prepared.append((run, run.prepare(logits, first, offsets)))
            first += len(offsets)
        lead = self.members[0].run
        with self._blame(*(run for run, _ in prepared)):
            requests = [one.request for _, one in prepared if one.request is not None]
            picks = iter(pick_together(logits, requests, lead.valid_tokens, lead.noise))
            for run, one in prepared:
                tokens = one.drawn if one.request is None else next(picks)
                with self._blame(run):
                    if isinstance(tokens, ConfigError):
                        raise tokens
                    run.take_picks(one, tokens)

    def _encode(self, slices: Sequence[SweepSlice]) -> None:
        for piece in slices:
            if piece.run not in self._failed and piece.run.is_done:
                with self._blame(piece.run):
                    piece.run.encode()

    @contextmanager
    def _blame(self, *runs: SweepRun) -> Iterator[None]:
        """What is raised within is these runs' own failure."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other runs go on
            self._failed |= dict.fromkeys(runs, error)


def _rows_of(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a tensor, in rising order; without a copy where none between them is left out."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return hidden[rows[0] : rows[-1] + 1]
    return hidden[to_device(rows, hidden.device)]
