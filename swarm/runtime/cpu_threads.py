"""The bound on `--threads` options: far beyond the cores, a native library's thread pool fails to start.

It is a module of its own because node and client check the option before they import torch.
"""

from __future__ import annotations

import os

from swarm.errors import ConfigError

THREADS_PER_CORE = 16


def check_threads(threads: int | None, name: str) -> None:
    """Refuse a number of threads that cannot be started here.

    Args:
        threads: None leaves the choice to torch.
        name: the option, for the message.

    Raises:
        ConfigError: less than 1, or more than `THREADS_PER_CORE` per core.
    """
    max_threads = THREADS_PER_CORE * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= max_threads:
        raise ConfigError(f"{name} {threads}: give 1 to {max_threads} on this machine, or leave it out")
