"""Threads that a test may have left behind."""

from __future__ import annotations

import threading
import time


def has_ended(thread: threading.Thread, seconds: float) -> bool:
    """Whether a thread ends in time; one that is only just being started is waited for as well."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            thread.join(timeout=max(deadline - time.monotonic(), 0.0))
        except RuntimeError:  # listed already and not started yet, which no event tells
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        else:
            return not thread.is_alive()
