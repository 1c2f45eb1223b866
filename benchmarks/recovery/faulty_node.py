"""`node serve` that can be told to spoil what it sends: after SIGUSR2, one byte of its next sweep or reply is flipped.

Nothing else of the node is changed, so all nodes of a fault benchmark are started by this module.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import node.service
import swarm.link
from node.cli import main
from swarm.frames import split
from swarm.messages import Frame, Reply, SweepFrame

_armed = False
_chance = random.Random(0)


def _arm(number: int, frame: object) -> None:
    global _armed
    _armed = True


def _spoiling(message: Frame) -> Iterator[bytes]:
    global _armed
    for part in split(message):
        if _armed and isinstance(message, SweepFrame | Reply):
            _armed = False
            spoilt = bytearray(part)
            spoilt[_chance.randrange(len(spoilt))] ^= 1 << _chance.randrange(8)
            yield bytes(spoilt)
        else:
            yield part


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _arm)
    swarm.link.split = node.service.split = _spoiling  # type: ignore[attr-defined]
    main()
