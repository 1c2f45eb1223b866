"""Whether a node still runs its layers as fast as it says: measured again while nobody uses them.

A node that starts on a busy machine measures the other programs too, and would claim that speed for as long as it runs.
One forward of each size now and then is compared with what is announced, more and more rarely while they agree; where
they differ it is measured as at the start. Owns when; `node.engine.measure` owns how.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from node.engine.measure import REPEATS, medians

SWEEPS_MS = tuple[tuple[int, float], ...]
MAX_WAIT: Final = 15
"""Looks that are left out between two measurements at most: five minutes of renewals."""
AGREES: Final = 1.25
"""One forward within this factor of the announced median says nothing new."""


class SpeedCheck:
    """Looks at one loaded span, at each renewal of the node's record."""

    def __init__(
        self, sizes: tuple[int, ...], forward_ms: Callable[[int], Awaitable[float]], worked_ms: Callable[[], float]
    ) -> None:
        """Make a check that has not looked yet.

        Args:
            sizes: tree nodes of the sweeps that are measured.
            forward_ms: runs one forward of so many on the thread that computes; between two of them others' work runs.
            worked_ms: what sessions' work took so far.
        """
        self._sizes = sizes
        self._forward_ms = forward_ms
        self._worked_ms = worked_ms
        self._worked_before_ms = worked_ms()
        self._wait = self._left = 1

    async def look(self, announced: SWEEPS_MS) -> SWEEPS_MS:
        """What is to be announced now: the same, unless it was measured again and differs."""
        worked_ms, before_ms = self._worked_ms(), self._worked_before_ms
        self._worked_before_ms = worked_ms
        self._left -= 1
        if worked_ms != before_ms or self._left > 0:
            return announced
        self._wait = self._left = min(2 * self._wait, MAX_WAIT)
        now = await self._round()
        if all(ms / AGREES <= own <= ms * AGREES for own, (_, ms) in zip(now, announced, strict=True)):
            return announced
        self._wait = self._left = 1
        rounds = [now]
        while len(rounds) < REPEATS:
            if self._worked_ms() != worked_ms:
                return announced  # somebody came: what was measured beside his work is no speed of its own
            rounds.append(await self._round())
        return medians(self._sizes, rounds)

    async def _round(self) -> list[float]:
        return [await self._forward_ms(nodes) for nodes in self._sizes]
