"""How many files and connections this process may have open: as many as the system lets it."""

from __future__ import annotations

import sys
from contextlib import suppress

UNKNOWN_LIMIT = 1_024
"""Assumed where the system does not tell, as Windows."""
MOST = 1 << 20
"""More is never asked for: some systems say "no limit", and mean less."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns what it is now."""
    if sys.platform == "win32":
        return UNKNOWN_LIMIT
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return file_limit()


def file_limit() -> int:
    """The files that may be open at a time."""
    if sys.platform == "win32":
        return UNKNOWN_LIMIT
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
