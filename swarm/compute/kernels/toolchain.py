"""What kernels need of a machine beside torch. Imports neither torch nor Triton."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIN_CAPABILITY = (8, 0)
"""The first CUDA devices that compute in bfloat16 and copy asynchronously."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What is installed of what kernels need: a compiler builds, with Python's headers, what starts them.

    Attributes:
        has_triton: whether Triton is there.
        has_compiler: whether a C compiler is.
        has_headers: whether this Python's headers are.
    """

    has_triton: bool
    has_compiler: bool
    has_headers: bool

    @property
    def lacks(self) -> str:
        """What is missing first, and what brings it; empty where all is there."""
        if not self.has_triton:
            return "Triton is not installed: pip install triton"
        if not self.has_compiler:
            return "no C compiler: install gcc"
        return "" if self.has_headers else "no Python headers: install python3-dev"


@cache
def toolchain() -> Toolchain:
    """What this machine has; asked once."""
    return Toolchain(
        importlib.util.find_spec("triton") is not None,
        any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))),
        Path(sysconfig.get_path("include"), "Python.h").exists(),
    )
