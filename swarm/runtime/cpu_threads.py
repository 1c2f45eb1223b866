"""How many CPU threads may be asked for: far beyond the cores a native library's thread pool fails to start."""

from __future__ import annotations

import os

from swarm.errors import ConfigError

THREADS_PER_CORE = 16


def check_threads(threads: int | None, name: str) -> None:
    """Refuse none, and more than any machine is helped by.

    Raises:
        ConfigError: calls the option by this name.
    """
    most = THREADS_PER_CORE * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise ConfigError(f"{name} {threads}: give 1 to {most} on this machine, or leave it out")
