"""The thread that computes: the only one with a team, which is as large as what other programs leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import pytest
import torch

from swarm.compute.compute_thread import LOOK_S, ComputeThread, CoreShare


@pytest.fixture(autouse=True)
def _usual_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


async def test_no_other_thread_has_a_team() -> None:
    compute = ComputeThread()
    try:
        compute.own_the_pool(3)
        assert await compute.run(torch.get_num_threads) == compute.threads == 3
        assert torch.get_num_threads() == 1
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 1
        assert await compute.run(torch.get_num_threads) == 3
        assert await compute.run(get_ident) not in (get_ident(), os.getpid())
    finally:
        compute.close()


@pytest.mark.parametrize(
    ("others", "threads"),
    [(0.0, 8), (0.3, 8), (0.7, 7), (1.0, 7), (1.9, 6), (3.3, 5), (7.0, 1), (12.0, 1)],
)
def test_a_team_is_as_large_as_what_others_leave(others: float, threads: int) -> None:
    now = [100.0]
    share = CoreShare(8, cores=8, clock_s=lambda: now[0], others_s=lambda: others * now[0])
    now[0] += LOOK_S / 2
    assert share.look() == 8, "not judged yet"
    now[0] += LOOK_S / 2
    assert share.look() == threads


def test_a_team_grows_again_and_never_beyond_what_was_asked_for() -> None:
    now, used = [0.0], [0.0]
    share = CoreShare(4, cores=16, clock_s=lambda: now[0], others_s=lambda: used[0])
    counts = []
    for others in (0.0, 13.0, 16.0, 2.0):
        now[0] += LOOK_S
        used[0] += others * LOOK_S
        counts.append(share.look())
    assert counts == [4, 3, 1, 4]
