"""A tail that stops computing in mid-text, so that a test can end it with answers due."""

from __future__ import annotations

import asyncio

import pytest

from node.session.hop_session import HopSession
from node.session.sweep_run import SweepRun


def stall_a_tail(sequence: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], asyncio.Event]:
    """The first tail that comes to a sweep from `sequence` on runs none any more.

    Returns:
        Its peer id, alone in a list that is filled then, and what is set then.
    """
    arrived, next_run, struck = asyncio.Event(), HopSession.next_run, list[str]()

    def stalling(hop: HopSession) -> SweepRun | None:
        queue, is_it = hop.log._queue, hop._context.peer in struck or (hop.is_tail and not struck)
        if is_it and hop._running is None and queue and queue[0].sweep.sequence >= sequence:
            struck[:] = [hop._context.peer]
            arrived.set()
            return None
        return next_run(hop)

    monkeypatch.setattr(HopSession, "next_run", stalling)
    return struck, arrived
