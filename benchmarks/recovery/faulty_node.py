"""`node serve` that spoils what it sends on demand: after SIGUSR2, one byte of its next sweep or reply is flipped.

Nothing else of the node is changed, so all nodes of a fault benchmark are started by this module.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import node.session.service
import swarm.link.link
from node.cli import main
from swarm.protocol.frames import split
from swarm.protocol.messages import Frame, Reply, SweepFrame
from swarm.protocol.wire import PART_BYTES

_armed = False
_chance = random.Random(0)


def _arm(number: int, frame: object) -> None:
    global _armed
    _armed = True


def _spoiling(message: Frame, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    global _armed
    for part in split(message, part_bytes):
        if _armed and isinstance(message, SweepFrame | Reply):
            _armed = False
            spoilt = bytearray(part)
            spoilt[_chance.randrange(len(spoilt))] ^= 1 << _chance.randrange(8)
            yield bytes(spoilt)
        else:
            yield part


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _arm)
    swarm.link.link.split = node.session.service.split = _spoiling  # type: ignore[attr-defined]
    main()
