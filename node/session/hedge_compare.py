"""Hedge comparison: are the rows the same that two replicas computed for one sweep? Bounded; owns no policy.

Which rows are compared is drawn here, by chance, when the first of the two has sent its sweep: neither can know.
A row is one vector, so its error is one number: the root mean square of the difference over that of the row. A maximum
over the largest value of a sweep would let all values change that are not the largest.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import replace

import torch

from swarm.errors import RemoteProtocolError
from swarm.ids import TreeNodeId
from swarm.inference.row_codec import decode_rows
from swarm.protocol.messages import Codec, Rows, SweepFrame

SWEEPS = 64
"""Of so many late sweeps some rows of the first replica are kept."""
ROWS = 16
"""Of each sweep, so many rows are kept and compared."""
MAX_DIFFERENCE = {Codec.FP32: 1e-4, Codec.FP16: 1e-2, Codec.BF16: 3e-2, Codec.INT8: 3e-2}
"""Of a row's own root mean square: above what the order of additions changes
(docs/decisions/0034-blame-is-on-links.md)."""


class HedgeRows:
    """Rows of the latest sweeps as the faster replica sent them."""

    def __init__(self, rng: random.Random | None = None, row_parts: int = 1) -> None:
        """Keep nothing yet.

        Args:
            rng: draws the rows that are compared.
            row_parts: vectors of the model's width that a row consists of (P14); each is compared by itself.
        """
        self._rng = rng or random.SystemRandom()
        self._row_parts = row_parts
        self._kept: OrderedDict[int, dict[TreeNodeId, bytes]] = OrderedDict()

    def keep(self, frame: SweepFrame) -> None:
        """A sweep came for the first time."""
        assert frame.rows is not None, "a hop after a replica is not the first one"
        places = _places(frame)
        drawn = self._rng.sample(sorted(places), min(ROWS, len(places)))
        self._kept[frame.sweep.sequence] = _rows(frame.rows, {node: places[node] for node in drawn})
        while len(self._kept) > SWEEPS:
            self._kept.popitem(last=False)

    def compare(self, frame: SweepFrame) -> float | None:
        """A sweep came again: how far its rows are from the first ones, the worst row relative to its own size.

        None: it was not kept, or was compared already.
        """
        first = self._kept.pop(frame.sweep.sequence, None)
        if first is None or frame.rows is None:
            return None
        places = _places(frame)
        nodes = sorted(first.keys() & places.keys())
        if not nodes:
            return 0.0
        again = _rows(frame.rows, {node: places[node] for node in nodes})
        try:
            ours, theirs = (
                decode_rows(replace(frame.rows, count=len(nodes), data=b"".join(side)), torch.float32).reshape(
                    len(nodes) * self._row_parts, -1
                )
                for side in ([rows[node] for node in nodes] for rows in (first, again))
            )
        except RemoteProtocolError:  # a value is not a number
            return math.inf
        size = torch.maximum(ours.square().mean(dim=1), theirs.square().mean(dim=1)).sqrt().clamp_min(1e-30)
        return float(((ours - theirs).square().mean(dim=1).sqrt() / size).max())


def _places(frame: SweepFrame) -> dict[TreeNodeId, int]:
    """The rows of a sweep, by node."""
    ids = range(frame.sweep.first_id, frame.sweep.first_id + len(frame.sweep.tokens))
    nodes = [TreeNodeId(node) for offset, node in enumerate(ids) if frame.kept is None or frame.kept[offset]]
    return {node: place for place, node in enumerate(nodes)}


def _rows(rows: Rows, places: dict[TreeNodeId, int]) -> dict[TreeNodeId, bytes]:
    """The bytes of these rows."""
    size, data = rows.codec.row_bytes(rows.width), memoryview(rows.data)
    return {node: bytes(data[place * size : (place + 1) * size]) for node, place in places.items()}
