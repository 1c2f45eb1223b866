"""Memory that a program freed goes back to the operating system."""

from __future__ import annotations

import sys

import psutil
import pytest

from node.model.malloc_trim import trim_heap

PIECE, PIECES = 1_000, 100_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux with glibc")
def test_what_is_free_is_handed_back() -> None:
    """Small pieces behind one that stays: nothing of it returns by itself."""
    process = psutil.Process()
    pieces = [bytearray(PIECE) for _ in range(PIECES)]
    last = bytearray(PIECE)
    full = process.memory_info().rss
    del pieces
    trim_heap()
    assert process.memory_info().rss < full - PIECE * PIECES / 2
    assert len(last) == PIECE
