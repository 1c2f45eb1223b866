"""Passes the target's hidden rows on, from replies to the heads that draft with them. Owns no model.

Rows that are missing or late make worse drafts, never another text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from client.decode.walk import Walk
from swarm.ids import TreeNodeId
from swarm.inference.row_codec import decode_rows
from swarm.protocol.messages import Reply, Want

WANT_ROWS = Want(hidden_rows=True)

Observe = Callable[[Sequence[int], torch.Tensor], None]
"""Takes a sequence and the hidden rows [n, width] of its last n tokens."""


def hand_over_rows(reply: Reply, walk: Walk, sequence: Sequence[int], observe: Observe) -> None:
    """Pass on the rows of certain tokens in an accepted reply: the last run of tokens that follow one another.

    Args:
        reply: as the walk accepted it.
        walk: knows which nodes are certain.
        sequence: every certain token of the text.
        observe: takes the rows.

    Raises:
        RemoteProtocolError: a value is not finite.
    """
    if reply.rows is None:
        return
    on_path = _live_path(walk)
    places: list[int] = []
    end = 0
    for place, node in enumerate(reply.row_ids):
        position = on_path.get(node, _committed_at(walk, node))
        if position is None or position >= len(sequence):
            continue
        if position != end:
            places = []
        places.append(place)
        end = position + 1
    if places:
        rows = decode_rows(reply.rows, torch.float32)
        observe(sequence[:end], rows[places])


def _live_path(walk: Walk) -> dict[TreeNodeId, int]:
    """Positions of the live nodes that are certain."""
    certain = walk.certain
    if certain is None or certain not in walk.state.live:
        return {}
    return {node: walk.state.live[node].position for node in walk.state.path_to(certain)}


def _committed_at(walk: Walk, node: TreeNodeId) -> int | None:
    held = walk.state.committed
    place = bisect_left(held, node, key=lambda token: token.id)
    return place if place < len(held) and held[place].id == node else None
