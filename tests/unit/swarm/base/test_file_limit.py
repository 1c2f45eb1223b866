"""The process's own limit of open files: raised to what the system allows, never lowered."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from swarm.base.process_limits import MOST, file_limit, raise_file_limit


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_becomes_the_hard_one(limits: tuple[int, int]) -> None:
    _, hard = limits
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    assert file_limit() == 512
    assert raise_file_limit() == wanted
    assert raise_file_limit() == wanted, "nothing is left to raise"
