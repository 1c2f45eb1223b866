"""Where this user's programs keep what they can make again. Makes no folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`canopy` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "canopy"
