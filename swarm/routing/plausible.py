"""Claimed speeds, weighed against each other: what is too fast to be true is taken as fast, and no faster. Pure.

Nobody can verify what a machine claims before a session has run over it. So a claim is compared with what the other
machines of its numeric class claim. The median is theirs to shift only if they are half of the class; a machine that
truly is faster loses nothing for long, since what clients measure of it counts then (`client.chain.opening`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from swarm.directory.node_record import NodeRecord
from swarm.routing.costs import claims_ms

PLAUSIBLE_PART: Final = 1 / 4
"""A layer's time of less than this part of its class's median is taken as that part of it."""
COMPARED_ROWS: Final = (1, 8, 64)
"""Sizes of a sweep at which claims are compared: those that nodes measure."""


def plausible(records: Sequence[NodeRecord]) -> list[NodeRecord]:
    """The records, with claims that are implausibly fast replaced by the fastest plausible ones.

    Args:
        records: of one model; those that claim no speed stay as they are, and so does their order.
    """
    weighed = list(records)
    classes: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        if record.sweep_ms:
            classes.setdefault(record.numeric_class, []).append(place)
    for places in classes.values():
        claimants = [records[place] for place in places]
        layers = np.array([len(record.span) for record in claimants])
        layer_ms = np.stack([claims_ms(claimants, rows) for rows in COMPARED_ROWS]) / layers  # [sizes, machines]
        floor_ms = PLAUSIBLE_PART * np.median(layer_ms, axis=1, keepdims=True)
        for number in np.flatnonzero((layer_ms < floor_ms).any(axis=0)):
            if claimants[number].bucketed:  # no slower by more than any size is too fast, so that steps still rise
                factor = float((floor_ms[:, 0] / layer_ms[:, number]).max())
                speeds = tuple((rows, ms * factor) for rows, ms in claimants[number].sweep_ms)
            else:
                whole_ms = np.maximum(layer_ms[:, number], floor_ms[:, 0]) * layers[number]
                speeds = tuple(zip(COMPARED_ROWS, whole_ms.tolist(), strict=True))
            weighed[places[number]] = replace(claimants[number], sweep_ms=speeds)
    return weighed
