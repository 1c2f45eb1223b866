"""Hedge comparison: are the rows the same that two replicas computed for one sweep? Bounded; owns no policy."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace

import torch

from swarm.errors import RemoteProtocolError
from swarm.ids import TreeNodeId
from swarm.inference.row_codec import decode_rows
from swarm.protocol.messages import Codec, Rows, SweepFrame

SWEEPS = 64
"""Of so many late sweeps the first rows are kept."""
ROWS = 16
"""Of each sweep, so many rows are compared."""
MAX_DIFFERENCE = {Codec.FP32: 1e-3, Codec.FP16: 0.02, Codec.BF16: 0.1, Codec.INT8: 0.1}
"""Relative to the largest value of the sweep's rows: far above what the order of additions changes
(docs/decisions/0005-near-ties-stay.md)."""


class HedgeRows:
    """Rows of the latest sweeps as the faster replica sent them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, dict[TreeNodeId, bytes]] = OrderedDict()

    def keep(self, frame: SweepFrame) -> None:
        """A sweep came for the first time."""
        assert frame.rows is not None, "a hop after a replica is not the first one"
        self._kept[frame.sweep.sequence] = _rows(frame, frame.rows)
        while len(self._kept) > SWEEPS:
            self._kept.popitem(last=False)

    def compare(self, frame: SweepFrame) -> float | None:
        """A sweep came again: how far its rows are from the first ones, relative to the largest value of those.

        None: it was not kept, or was compared already.
        """
        first = self._kept.pop(frame.sweep.sequence, None)
        if first is None or frame.rows is None:
            return None
        again = _rows(frame, frame.rows)
        nodes = sorted(first.keys() & again.keys())
        if not nodes:
            return 0.0
        try:
            ours, theirs = (
                decode_rows(replace(frame.rows, count=len(nodes), data=b"".join(side)), torch.float32)
                for side in ([rows[node] for node in nodes] for rows in (first, again))
            )
        except RemoteProtocolError:  # a value is not a number
            return math.inf
        return float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-30))


def _rows(frame: SweepFrame, rows: Rows) -> dict[TreeNodeId, bytes]:
    """The last rows of a sweep by node."""
    ids = range(frame.sweep.first_id, frame.sweep.first_id + len(frame.sweep.tokens))
    nodes = [node for offset, node in enumerate(ids) if frame.kept is None or frame.kept[offset]]
    size, data = rows.codec.row_bytes(rows.width), memoryview(rows.data)
    start = max(len(nodes) - ROWS, 0)
    return {
        TreeNodeId(node): bytes(data[place * size : (place + 1) * size])
        for place, node in enumerate(nodes[start:], start)
    }
