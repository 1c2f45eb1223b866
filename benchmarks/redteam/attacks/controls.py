"""Controls: programs that touch nothing. What users feel of them is the machine's doing, and no swarm's."""

from __future__ import annotations

import time

from benchmarks.redteam.attack import Fight, Kind, attack

BEAT_S = 0.02
"""The processor is used once in so long."""


@attack("nothing", Kind.CONTROLS)
async def nothing(fight: Fight) -> None:
    """A program that waits: what two measurements of the same speed differ by."""
    await fight.go()
    await fight.stay()


@attack("quarter-of-a-core", Kind.CONTROLS, burns=True)
async def quarter_of_a_core(fight: Fight) -> None:
    """A program that computes a quarter of the time, with an attacker's priority, and touches nothing."""
    await burn(fight, 0.25)


@attack("half-a-core", Kind.CONTROLS, burns=True)
async def half_a_core(fight: Fight) -> None:
    """A program that computes half of the time, with an attacker's priority, and touches nothing."""
    await burn(fight, 0.5)


async def burn(fight: Fight, share: float) -> None:
    """Use a share of one processor."""
    await fight.go()
    async for _ in fight.pace(1 / BEAT_S):
        until = time.thread_time() + share * BEAT_S
        while time.thread_time() < until:
            pass
