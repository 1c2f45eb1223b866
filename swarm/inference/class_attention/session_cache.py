"""What a model's class takes for its cache when it computes attention itself: sessions' KV, as one forward sees it.

    one session's rows as a sequence   keys and values of all its used slots come back, [1, kv_heads, used, width]
    rows of a batch, a sequence each   what each row sees, in the order of positions and padded on the left

The class gets its own keys in the order of tokens, so biases by distance, windows and selections hold as they are.
Keeps nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swarm.inference.kv_cache import LayerKv, LayerRows
from swarm.inference.step_cache import INDEXER

if TYPE_CHECKING:
    from swarm.inference.tree_attention import SessionRange

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Neighbouring rows of one session.

    Attributes:
        part: the session's rows in the step.
        first: the first of these rows, within `part`.
        count: how many.
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
        cache: the forward's.
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
        rows: what is kept beside them.
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
