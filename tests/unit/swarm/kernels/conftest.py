"""Kernels are interpreted on the CPU: Triton reads the variable when it is imported, and at every launch."""

from __future__ import annotations

import os

import pytest

from swarm.kernels.support import INTERPRETER

os.environ[INTERPRETER] = "1"
try:
    import swarm.kernels.packed_product  # noqa: F401 - now, while the variable is set
finally:
    del os.environ[INTERPRETER]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set for these tests alone: other tests ask what this machine can run."""
    monkeypatch.setenv(INTERPRETER, "1")
