"""Gives freed memory back to the operating system: glibc keeps what sessions and their tensors leave behind.

A file of its own, so that the call into glibc is tested without a node.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, where there is one."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_heap() -> bool:
    """Release what is free at the ends and in the middle of the heap; whether there was any. Takes milliseconds."""
    trim = _trim()
    return trim is not None and trim(0) == 1
