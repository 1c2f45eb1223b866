"""One sweep on one hop, slice by slice: its KV changes, what a forward needs of it, and what it makes of the result.

The forward itself is `node.session.scheduler`'s. Owns no queue and no network.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from node.model.span import SpanModel
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.devices import with_float64
from swarm.compute.kv_cache import KvCache
from swarm.compute.multistep_sampling import by_offset, multistep_picks
from swarm.compute.path_rules import NodeMasks, PathRules
from swarm.compute.picks.device_picks import PickRequest, to_device
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.row_codec import all_finite, decode_rows, encode_rows, lossless_codec
from swarm.compute.sampling import NoiseSource, PickLogProbs, log_probs, target_probs
from swarm.protocol.hop_log import SweepWork
from swarm.protocol.messages import Codec, Rows, Sampling
from swarm.protocol.session import SessionState


@dataclass(frozen=True, slots=True)
class HopRole:
    """What a session wants of this hop."""

    span: Span
    """The layers that it runs here."""
    codec: Codec
    """How rows leave."""
    valid_tokens: int
    """Ids that the tail may pick are below this."""
    noise: NoiseSource | None
    """Makes rows of noise, kept between sweeps; None where picks are made on the device."""
    aux_layers: tuple[int, ...] = ()
    """What enters these layers travels beside each row from there on (P14)."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers within the span, beyond its first one, before which rows are kept."""
        return tuple(layer for layer in self.aux_layers if self.span.start < layer < self.span.end)

    def width(self, layer: int, hidden_size: int) -> int:
        """Values of a row where it enters a layer, with those that travel beside it."""
        return hidden_size * (1 + sum(each < layer for each in self.aux_layers))


@dataclass(frozen=True, slots=True)
class Picking:
    """How the tail picks after the nodes of a sweep."""

    sampling: Sampling
    rules: PathRules | None = None
    """Those of `sampling`, along the paths of this session."""
    state: SessionState | None = None
    """The session's, with the sweep applied; needed for rules."""


@dataclass(frozen=True, slots=True)
class AskedPicks:
    """Nodes of one run whose picks a client wants, and the rows of logits after them.

    Attributes:
        request: how to pick after them; None where they were drawn by multi-step sampling.
        nodes: the nodes.
        own: float32 [nodes, vocab_size], the logits before any rule.
        drawn: their picks, where there is no request.
    """

    request: PickRequest | None
    nodes: tuple[TreeNodeId, ...]
    own: torch.Tensor
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SweepSlice:
    """The next nodes of a run."""

    run: SweepRun
    chosen: tuple[int, ...]
    """Their offsets in its sweep."""
    work: SessionRows
    """What a forward needs of them."""
    beside: torch.Tensor | None = None
    """[nodes, n · hidden_size]: rows of earlier layers, which go on beside theirs; None where there are none."""


class SweepRun:
    """The next sweep of a session: in batches until `is_done`; then it has `rows` (a middle hop) or `picks` (the tail).

    Attributes:
        model: the layers of this machine.
        work: the sweep and what it changes in the session.
        compute_ms: its share of the forwards that it was part of.
        encode_ms: how long its rows were encoded.
        forwards_ms: of the batches in which it came first.
        rows: what travels on; None at the tail and until the sweep is done.
        picks: (tree node, token picked after it), at the tail.
        log_probs: of the picks after these nodes, where the client wants them.
        answered: at the tail, the final row of each node whose pick is asked for, and nothing beside it.
        is_tail: whether this hop runs the model's last layer.
        masks: what the session's grammar takes after the nodes whose picks are asked for; None without one.
    """

    def __init__(self, model: SpanModel, kv_cache: KvCache, role: HopRole, work: SweepWork, picking: Picking) -> None:
        self.model = model
        self.work = work
        self.compute_ms = 0.0
        self.encode_ms = 0.0
        self.forwards_ms: list[float] = []
        self.rows: Rows | None = None
        self.picks: list[tuple[TreeNodeId, int]] = []
        self.log_probs: dict[TreeNodeId, PickLogProbs] = {}
        self.masks: NodeMasks | None = None
        self._kv_cache = kv_cache
        self._role = role
        self._picking = picking
        self.is_tail = role.span.end == model.num_layers
        self._entered: torch.Tensor | None = None
        self._hidden: list[torch.Tensor] = []
        self._final: dict[TreeNodeId, Rows] = {}
        self.answered: dict[TreeNodeId, Rows] = {}
        self._prepared = False
        self._done = 0

    @property
    def span(self) -> Span:
        """The layers that it runs through here."""
        return self._role.span

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers before which its rows are kept (P14)."""
        return self._role.cuts

    @property
    def remaining(self) -> int:
        """Nodes that have not been run."""
        return len(self.work.run) - self._done

    @property
    def context(self) -> int:
        """Tokens that its next rows attend to."""
        return self._kv_cache.slots.used

    @property
    def is_done(self) -> bool:
        """Whether the whole sweep was run."""
        return self._prepared and self.remaining == 0

    @property
    def kept(self) -> tuple[bool, ...]:
        """One flag per node of the sweep: whether it was run here."""
        run = set(self.work.run)
        return tuple(offset in run for offset in range(self.work.frame.sweep.count))

    @property
    def final(self) -> Mapping[TreeNodeId, Rows]:
        """At the tail, the row of each node that may answer a sweep that wants rows (P10), and those beside it.

        Each is one row as it was computed, whatever the codec between hops."""
        return self._final

    def take(self, count: int) -> SweepSlice:
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
        ids = None
        if self.span.start == 0 or self.model.needs_ids:
            ids = torch.tensor([sweep.tokens[offset] for offset in chosen])
        rows, beside = self._columns(start, start + len(chosen))
        work = SessionRows(
            kv_cache=self._kv_cache,
            node_ids=tuple(applied.appended[offset] for offset in chosen),
            parents=tuple(sweep.parents[offset] for offset in chosen),
            positions=tuple(applied.positions[offset] for offset in chosen),
            token_ids=ids,
            rows=rows,
        )
        return SweepSlice(self, chosen, work, beside)

    def _columns(self, start: int, end: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the rows that entered, those that go through the layers, and what goes on beside them."""
        if self._entered is None:
            return None, None
        entered, width = self._entered[start:end], self.model.hidden_size
        rows, beside = entered[:, :width], entered[:, width:]
        if self.span.start in self._role.aux_layers:
            beside = torch.cat([beside, rows], dim=1)
        return rows, beside if beside.shape[1] else None

    def _prepare(self) -> None:
        applied = self.work.applied
        if applied.truncated_to is not None:
            self._kv_cache.truncate(applied.truncated_to)
        if applied.path:
            self._kv_cache.commit(applied.path, applied.survivors)
        rows = self.work.frame.rows
        if rows is not None and self.work.run:
            decoded = decode_rows(rows, self.model.dtype, self.model.device)
            self._entered = decoded[to_device(self.work.kept_rows, decoded.device)]
        self._prepared = True

    @property
    def asked_nodes(self) -> tuple[TreeNodeId, ...]:
        """All nodes whose picks the client wants."""
        return tuple(node for node in self.work.nodes if node >= self.work.frame.sweep.picks_from)

    def asked(self, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """The nodes among `chosen` whose picks the client wants: (place among them, offset in the sweep)."""
        appended, picks_from = self.work.applied.appended, self.work.frame.sweep.picks_from
        return [(place, offset) for place, offset in enumerate(chosen) if appended[offset] >= picks_from]

    def keep(self, piece: SweepSlice, hidden: torch.Tensor, kept: Mapping[int, torch.Tensor]) -> None:
        """Take a slice's rows, for the next hop or, at the tail, for a head.

        Args:
            hidden: [nodes, hidden_size], as they left the last layer here.
            kept: the same, as they entered each layer of `cuts`.
        """
        if self.is_tail:
            self._keep_answered(piece, hidden)
        chosen = self._returned(piece.chosen) if self.is_tail else []
        if self.is_tail and not chosen:
            return
        if self._role.aux_layers:
            earlier = () if piece.beside is None else (piece.beside,)
            hidden = torch.cat([hidden, *earlier, *(kept[layer] for layer in self.cuts)], dim=1)
        if self.is_tail:
            made = encode_rows(hidden[[place for place, _ in chosen]], lossless_codec(hidden.dtype))
            self._final |= {node: made.row(place) for place, (_, node) in enumerate(chosen)}
        else:
            self._hidden.append(hidden)

    def _keep_answered(self, piece: SweepSlice, hidden: torch.Tensor) -> None:
        places = [place for place, _ in self.asked(piece.chosen)]
        if not places:
            return
        own = hidden[places[0] : places[-1] + 1].clone()  # the next forward may write there
        made = encode_rows(own, lossless_codec(hidden.dtype))
        nodes = (self.work.applied.appended[piece.chosen[place]] for place in places)
        self.answered |= {node: made.row(place - places[0]) for node, place in zip(nodes, places, strict=True)}

    def _returned(self, chosen: Sequence[int]) -> list[tuple[int, TreeNodeId]]:
        """The nodes among `chosen` whose rows may go to the client: (place among them, node)."""
        want, picks_from = self.work.frame.sweep.want, self.work.frame.sweep.picks_from
        if want is None:
            return []
        nodes = enumerate(self.work.applied.appended[offset] for offset in chosen)
        oldest = picks_from - want.prompt_rows
        return [(place, node) for place, node in nodes if (want.hidden_rows if node >= picks_from else node >= oldest)]

    def encode(self) -> None:
        """Make the rows that travel on; the last thing that a hop before the tail does."""
        started = time.perf_counter()
        width = self._role.width(self.span.end, self.model.hidden_size)
        empty = torch.empty(0, width, dtype=self.model.dtype)
        hidden = torch.cat(self._hidden) if self._hidden else empty
        if not all_finite(hidden):
            raise ArithmeticError("hidden states are not finite")  # this hop's fault, so the next must not be blamed
        self.rows = encode_rows(hidden, self._role.codec)
        self._hidden.clear()
        self.encode_ms = (time.perf_counter() - started) * 1e3

    @property
    def valid_tokens(self) -> int:
        """Ids that the tail may pick are below this."""
        return self._role.valid_tokens

    @property
    def noise(self) -> NoiseSource | None:
        """Where noise comes from; None is the law itself, on a card made there."""
        return self._role.noise

    def prepare(self, logits: torch.Tensor, first: int, offsets: Sequence[int]) -> AskedPicks:
        """Apply the rules, and say how to pick after some nodes: by shared noise, or by what the draft drew.

        Args:
            logits: float32 [rows, vocab_size] of a batch; this run's are changed in place where there are rules.
            first: the first of this run's rows.
            offsets: the nodes, by place in the sweep, one per row.
        """
        logits = with_float64(logits)
        applied, picking, want = self.work.applied, self._picking, self.work.frame.sweep.want
        nodes = tuple(applied.appended[offset] for offset in offsets)
        own = mine = logits[first : first + len(offsets)]
        if picking.rules is not None and picking.state is not None:
            own = mine.clone() if want is not None and want.log_probs else mine
            picking.rules.apply(mine, nodes, picking.state, self.masks)
        positions = [applied.positions[offset] + 1 for offset in offsets]
        if picking.sampling.multistep and picking.sampling.temperature > 0:
            return AskedPicks(None, nodes, own, tuple(self._draw(mine, positions, offsets)))
        return AskedPicks(PickRequest(first, positions, picking.sampling), nodes, own)

    def take_picks(self, asked: AskedPicks, tokens: Sequence[int]) -> None:
        """Keep the tokens that were picked after some nodes."""
        want = self.work.frame.sweep.want
        self.picks += zip(asked.nodes, tokens, strict=True)
        if want is not None and want.log_probs:
            found = log_probs(asked.own, tokens, want.top_log_probs, self.valid_tokens)
            self.log_probs |= zip(asked.nodes, found, strict=True)

    def _draw(self, logits: torch.Tensor, positions: Sequence[int], offsets: Sequence[int]) -> list[int]:
        sampling, valid, sweep = self._picking.sampling, self.valid_tokens, self.work.frame.sweep
        guesses = by_offset(sweep.guesses)
        probs = target_probs(logits[:, :valid], sampling)
        probs = torch.nn.functional.pad(probs, (0, logits.shape[1] - probs.shape[1]))  # padding may be drawn, in vain
        return multistep_picks(
            probs, positions, [guesses.get(offset) for offset in offsets], sampling.seed, sweep.sequence
        )
