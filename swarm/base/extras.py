"""Optional dependencies: what a command needs beyond the base install, and the line that installs it.

A volunteer's node installs no web server. A command calls `require` before anything else; the
modules themselves are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final, Literal

from swarm.base.errors import ConfigError

Extra = Literal["health", "metrics", "plot", "upnp", "api"]

MODULES: Final[Mapping[Extra, tuple[str, ...]]] = {
    "health": ("amqtt", "fastapi", "starlette", "uvicorn"),
    "metrics": ("starlette", "uvicorn"),
    "plot": ("matplotlib",),
    "upnp": ("miniupnpc",),
    "api": ("fastapi", "starlette", "uvicorn"),
}
"""Top-level modules of each extra; a test compares them with pyproject.toml."""


def require(extra: Extra, command: str) -> None:
    """Refuse a command whose extra is not installed.

    Args:
        extra: name of the extra in pyproject.toml.
        command: the command or option that needs it, as a user types it.

    Raises:
        ConfigError: names the missing modules and the line that installs them.
    """
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{command} needs {', '.join(missing)}: pip install 'canopy-swarm[{extra}]'")
