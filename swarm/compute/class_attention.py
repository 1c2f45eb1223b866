"""How a step's rows become calls of a model whose class computes attention itself.

    masked   each session's rows are one sequence, with a mask [rows, slots]: for selections among what a row sees
    rows     rows that follow one another are a sequence; all others are a batch, each row a sequence of its own

A class gets a cache that shows it the sessions' KV. Every row's result is that of its own path alone. Rows are cut so
that scores and gathered keys stay within a bound.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swarm.compute.kv_cache import LayerKv, LayerRows
from swarm.compute.step_cache import INDEXER, cache_argument
from swarm.files.families import CHUNKED, AttentionBy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swarm.compute.tree_attention import AttentionStep, SessionRange


Pair = tuple[torch.Tensor, torch.Tensor]


Through = Callable[[torch.Tensor, dict[str, Any], torch.Tensor | None], torch.Tensor]
"""What enters, [batch, rows] or [batch, rows, hidden_size], and arguments to hidden rows."""
MAX_CALL_BYTES = 64 << 20
"""Memory that the scores or the gathered keys of a call may take in one layer."""


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Neighbouring rows of one session.

    Attributes:
        part: the session's rows in the step.
        first: the first of these rows, within `part`.
    """

    part: SessionRange
    first: int
    count: int

    @property
    def slot(self) -> int:
        """Where the first of them is kept."""
        return self.part.used - self.part.rows + self.first

    @property
    def used(self) -> int:
        """Slots in use with the last of them."""
        return self.slot + self.count

    @property
    def position(self) -> int:
        """Of the first of them."""
        return int(self.part.positions[self.slot])

    @property
    def visible(self) -> torch.Tensor:
        """Bool [count, used], on the CPU: which slots each row sees."""
        return self.part.visible[self.first : self.first + self.count, : self.used]


class ClassCache:
    """The parts of transformers' `Cache` that model classes use.

    Attributes:
        past: tokens that the class takes for cached.
        length: keys that each row attends to at most.
        rates: by layer, how many tokens' keys it folds into one; 0 if it does not.
    """

    is_compileable = False
    is_initialized = True

    def __init__(self, past: int, length: int) -> None:
        self.past = past
        self.length = length
        self.rates: Sequence[int] = ()

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object) -> Pair:
        """Store new keys and values and give back all that the rows may see.

        Args:
            keys: [batch, kv_heads, rows, key_width]
            values: [batch, kv_heads, rows, value_width]
            layer_idx: the layer's number in the whole model.
        """
        raise NotImplementedError

    def update_rows(self, rows: torch.Tensor, layer_idx: int, name: str) -> torch.Tensor:
        """As `update` for other rows [batch, rows, width] that a layer keeps under a name."""
        raise NotImplementedError

    def update_indexer(self, rows: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As `update` for an indexer's keys [batch, rows, width]."""
        return self.update_rows(rows, layer_idx, INDEXER)

    @property
    def layers(self) -> Sequence[CompressedLayer]:
        """What layers that fold keys use of the cache."""
        return [CompressedLayer(self, layer, rate) for layer, rate in enumerate(self.rates)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the new rows."""
        del layer_idx
        return self.past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Place of the first new row among the keys."""
        del layer_idx
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys there are, and the place of the first of them."""
        del query_length, layer_idx
        return self.length, 0


@dataclass(frozen=True, slots=True)
class CompressedLayer:
    """A layer's cache for classes that fold neighbouring tokens' keys into one: all is folded anew in each forward.

    Branches of a tree share no folded key then. What is kept are the tokens' own rows.

    Attributes:
        layer: the layer's number in the whole model.
        compress_rate: how many tokens' keys are folded into one.
    """

    cache: ClassCache
    layer: int
    compress_rate: int

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Store new rows [batch, rows, width]; give back those of all full windows, and the first one's position."""
        all_kv = self.cache.update_rows(kv, self.layer, f"{name} keys")
        all_gates = self.cache.update_rows(gate, self.layer, f"{name} gates")
        full = all_kv.shape[1] // self.compress_rate * self.compress_rate
        return all_kv[:, :full], all_gates[:, :full], 0

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Give the folded keys [batch, windows, width] back: these are all."""
        del name
        return compressed

    def update_overlap_state(self, *_: object) -> tuple[None, None]:
        """Nothing lies before the first window."""
        return None, None


class ProbeCache(ClassCache):
    """Notes what one row of each layer would be kept.

    Attributes:
        seen: keys and values, layer by layer.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.seen: list[LayerKv] = []
        self.rows: list[LayerRows] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object) -> Pair:
        """Note their shape."""
        self.seen.append(LayerKv(layer_idx, keys.shape[1], keys.shape[-1], values.shape[-1]))
        return keys, values

    def update_rows(self, rows: torch.Tensor, layer_idx: int, name: str) -> torch.Tensor:
        """Note their width."""
        self.rows.append(LayerRows(layer_idx, name, rows.shape[-1], rows.dtype))
        return rows


class SequenceCache(ClassCache):
    """One session's rows as a sequence behind its cached tokens."""

    def __init__(self, piece: RowPiece) -> None:
        super().__init__(piece.slot, piece.used)
        self._piece = piece
        self._kv_cache = piece.part.kv_cache

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object) -> Pair:
        """Store them and give back every used slot."""
        self._kv_cache.store(layer_idx, self._piece.slot, keys[0], values[0])
        kept, kept_values = self._kv_cache.view(layer_idx, self._piece.used)
        return kept[None], kept_values[None]

    def update_rows(self, rows: torch.Tensor, layer_idx: int, name: str) -> torch.Tensor:
        """Store them and give back every used slot's."""
        self._kv_cache.store_rows(layer_idx, name, self._piece.slot, rows[0])
        return self._kv_cache.view_rows(layer_idx, name, self._piece.used)[None]


class BatchCache(ClassCache):
    """Rows of several sessions, each a sequence of its own that ends with it.

    Attributes:
        mask: int64 [rows, length], 0 where a row's sequence has not begun.
    """

    def __init__(self, pieces: Sequence[RowPiece], device: torch.device) -> None:
        self._pieces = pieces
        slots = [row.nonzero()[:, 0] for piece in pieces for row in piece.visible]
        length = max(map(len, slots))
        super().__init__(length - 1, length)
        padded = torch.zeros(len(slots), length, dtype=torch.long)
        mask = torch.zeros(len(slots), length, dtype=torch.long)
        for row, own in enumerate(slots):
            padded[row, length - len(own) :] = own
            mask[row, length - len(own) :] = 1
        self.mask = mask.to(device)
        self._slots = torch.split(padded.to(device), [piece.count for piece in pieces])

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object) -> Pair:
        """Store them and give back what each row sees: [rows, kv_heads, length, width]."""
        seen: list[Pair] = []
        counts = [piece.count for piece in self._pieces]
        new = zip(self._pieces, self._slots, torch.split(keys, counts), torch.split(values, counts), strict=True)
        for piece, slots, own_keys, own_values in new:
            kv_cache = piece.part.kv_cache
            kv_cache.store(
                layer_idx, piece.slot, own_keys[:, :, 0].transpose(0, 1), own_values[:, :, 0].transpose(0, 1)
            )
            kept, kept_values = kv_cache.view(layer_idx, piece.used)
            seen.append((kept[:, slots].transpose(0, 1), kept_values[:, slots].transpose(0, 1)))
        return torch.cat([one for one, _ in seen]), torch.cat([one for _, one in seen])

    def update_rows(self, rows: torch.Tensor, layer_idx: int, name: str) -> torch.Tensor:
        """Store them and give back those of what each row sees: [rows, length, width]."""
        seen = []
        new = torch.split(rows, [piece.count for piece in self._pieces])
        for piece, slots, own in zip(self._pieces, self._slots, new, strict=True):
            piece.part.kv_cache.store_rows(layer_idx, name, piece.slot, own[:, 0])
            seen.append(piece.part.kv_cache.view_rows(layer_idx, name, piece.used)[slots])
        return torch.cat(seen)


@dataclass(frozen=True, slots=True)
class ClassCall:
    """One call of the model.

    Attributes:
        shape: [batch, rows of each], which has `end - start` rows in all.
        start: the first row in the forward.
        cache: what the class takes for its cache.
        mask: of attention, as the class takes it.
    """

    shape: tuple[int, int]
    start: int
    end: int
    cache: ClassCache
    mask: torch.Tensor | dict[str, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class ClassCalls:
    """Makes calls for one model.

    Attributes:
        by: how its class is given what a row sees.
        rates: how many tokens' keys each layer folds into one, if any do.
    """

    by: AttentionBy
    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    rates: Mapping[int, int]

    def run(
        self, step: AttentionStep, through: Through, entering: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """All rows of a step.

        Args:
            step: the rows of each session, one after the other.
            entering: token ids [R] or rows [R, hidden_size].
            positions: [R]

        Returns:
            [R, hidden_size]
        """
        calls, ids = self.calls(step.parts) if step.parts else iter([self.probe()[0]]), step.ids
        outputs = []
        for call in calls:
            rows = slice(call.start, call.end)
            entered = entering[rows].reshape(*call.shape, *entering.shape[1:])
            arguments = self.arguments(call, positions[rows].reshape(call.shape))
            outputs.append(through(entered, arguments, None if ids is None else ids[rows].reshape(call.shape)))
        outputs = [output.flatten(0, 1) for output in outputs]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def probe(self) -> tuple[ClassCall, ProbeCache]:
        """One row of no session, and what takes notes of it."""
        cache = ProbeCache()
        one = torch.ones(1, 1, dtype=torch.bool)
        mask = self._mask(one, torch.zeros(1, dtype=torch.long)) if self.by is AttentionBy.MASKED else None
        return ClassCall((1, 1), 0, 1, cache, mask), cache

    def calls(self, parts: Sequence[SessionRange]) -> Iterator[ClassCall]:
        """The calls that run all rows of a step, in order. Each must have run before the next is made."""
        if self.by is AttentionBy.MASKED:
            for part in parts:
                for piece in self._pieces(part):
                    positions = part.positions[: piece.used]
                    yield self._sequence(piece, self._mask(piece.visible, positions))
            return
        waiting: list[RowPiece] = []
        for part in parts:
            if part.rows > 1 and _is_sequence(part):
                yield from self._batches(waiting)
                waiting = []
                for piece in self._pieces(part):
                    yield self._sequence(piece, torch.ones(1, piece.used, dtype=torch.long, device=self.device))
            else:
                waiting.append(RowPiece(part, 0, part.rows))
        yield from self._batches(waiting)

    def arguments(self, call: ClassCall, positions: torch.Tensor) -> dict[str, Any]:
        """The call's arguments besides what enters; positions [batch, rows]."""
        base: Any = self.model.base_model
        call.cache.rates = [self.rates.get(layer, 0) for layer in range(self.model.config.num_hidden_layers)]
        given = {"position_ids": positions.to(self.device), "attention_mask": call.mask, "use_cache": True}
        name = cache_argument(base)
        return taken_by(base, given) | ({} if name is None else {name: call.cache})

    def _sequence(self, piece: RowPiece, mask: torch.Tensor | dict[str, torch.Tensor]) -> ClassCall:
        start = piece.part.start + piece.first
        return ClassCall((1, piece.count), start, start + piece.count, SequenceCache(piece), mask)

    def _batches(self, waiting: Sequence[RowPiece]) -> Iterator[ClassCall]:
        batch: list[RowPiece] = []
        longest = rows = 0
        for whole in self._aligned(waiting):
            per_row = whole.part.kv_cache.bytes_per_token // max(1, len(whole.part.kv_cache.layout.layers))
            at_once = max(1, MAX_CALL_BYTES // max(1, per_row * whole.used))
            for first in range(0, whole.count, at_once):
                piece = RowPiece(whole.part, whole.first + first, min(at_once, whole.count - first))
                longest = max(longest, piece.used)
                apart = self.rates and batch and batch[0].position != piece.position
                if batch and (apart or (rows + piece.count) * longest * per_row > MAX_CALL_BYTES):
                    yield self._batch(batch)
                    batch, longest, rows = [], piece.used, 0
                batch.append(piece)
                rows += piece.count
        if batch:
            yield self._batch(batch)

    def _aligned(self, waiting: Sequence[RowPiece]) -> Iterator[RowPiece]:
        """The same rows; where keys are folded, in pieces of one position each, which need no padding."""
        for whole in waiting:
            if not self.rates:
                yield whole
                continue
            places = whole.part.positions[-whole.part.rows :].tolist()
            start = 0
            for end in range(1, whole.count + 1):
                if end == whole.count or places[end] != places[start]:
                    yield RowPiece(whole.part, start, end - start)
                    start = end

    def _batch(self, pieces: Sequence[RowPiece]) -> ClassCall:
        cache = BatchCache(tuple(pieces), self.device)
        start = pieces[0].part.start + pieces[0].first
        count = len(cache.mask)
        return ClassCall((count, 1), start, start + count, cache, cache.mask)

    def _pieces(self, part: SessionRange) -> Iterator[RowPiece]:
        heads = getattr(self.model.config, "num_attention_heads", 1)
        at_once = max(1, MAX_CALL_BYTES // (4 * heads * part.used))
        for first in range(0, part.rows, at_once):
            yield RowPiece(part, first, min(at_once, part.rows - first))

    def _mask(self, visible: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """What is added to scores, [1, 1, rows, slots]: 0 where a row sees a slot; one for each type of layer."""
        config, own, others = self.model.config, positions[-len(visible) :, None], positions[None]
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds:
            return self._added(visible)
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        within = dict.fromkeys(kinds, visible)
        if window is not None:
            within["sliding_attention"] = visible & (own - others < window)
        if chunk is not None:
            within[CHUNKED] = visible & (own // chunk == others // chunk)
        return {kind: self._added(within[kind]) for kind in kinds}

    def _added(self, visible: torch.Tensor) -> torch.Tensor:
        added = torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, torch.finfo(self.dtype).min)
        return added[None, None].to(self.device)


def taken_by(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - any class's
    """Those arguments that the forward of a model's class names."""
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in given.items() if name in taken}


def _is_sequence(part: SessionRange) -> bool:
    """Whether each row sees every slot before its own, so that slots are places in a text."""
    return bool(part.visible.sum() == part.rows * part.used - part.rows * (part.rows - 1) // 2)
