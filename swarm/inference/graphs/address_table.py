"""Where the KV of each session lies, for kernels that know sessions by line only. Owns no KV and keeps none alive.

A graph holds the table's address and no session's. A session gets a line when it first runs; where all are taken, the
one that ran least recently loses its own and gets another when it runs again.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    from swarm.inference.kv_cache import KvCache, KvLayout


class AddressTable:
    """Lines of addresses on the device.

    Attributes:
        table: int64 [layers, lines, 3]: keys, values and capacity of each session in each layer of the layout.
        lines: how many sessions it has room for.
    """

    def __init__(self, layout: KvLayout, lines: int) -> None:
        self.lines = lines
        self.table = torch.zeros(len(layout.layers), lines, 3, dtype=torch.int64, device=layout.device)
        self._places = {layer.index: place for place, layer in enumerate(layout.layers)}
        # Least recently used first. An entry goes with its cache, so an address is never used after its memory.
        self._held: weakref.WeakKeyDictionary[KvCache, int] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        """How many sessions have a line."""
        return len(self._held)

    def line(self, kv_cache: KvCache, together: Collection[KvCache]) -> int:
        """The line of a session, which is written when it is new.

        Args:
            kv_cache: the session's.
            together: what runs in the same forward, at most `lines`: none of these loses its line.
        """
        line = self._held.pop(kv_cache, None)
        if line is None:
            line = self._free(together)
            self._write(line, kv_cache)
        self._held[kv_cache] = line
        return line

    def _free(self, together: Collection[KvCache]) -> int:
        """A line that nobody has, or that of the session that ran least recently."""
        free = set(range(self.lines)) - set(self._held.values())
        if free:
            return min(free)
        oldest = next(held for held in list(self._held) if held not in together)
        return self._held.pop(oldest)

    def _write(self, line: int, kv_cache: KvCache) -> None:
        """Put a session's addresses in; replays that run still read the old ones, for both go through one stream."""
        rows = torch.zeros(len(self._places), 3, dtype=torch.int64)
        places = [self._places[layer.index] for layer in kv_cache.layout.layers]
        rows[places] = kv_cache.addresses().cpu()
        self.table[:, line].copy_(rows)
        if self.table.is_cuda:
            stream = torch.cuda.current_stream(self.table.device)
            for layer in kv_cache.layout.layers:  # the allocator gives the memory away only when this stream is past it
                for held in kv_cache.view(layer.index, 1):
                    held.record_stream(stream)
