"""Where this user's programs keep what they know of themselves: status and errors. Makes no folder."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """`canopy` in the user's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "canopy"
