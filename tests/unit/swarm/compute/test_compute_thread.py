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
    now, used = [100.0], [50.0]
    share = CoreShare(8, cores=8, clock_s=lambda: now[0], others_s=lambda: used[0])
    for step, expected in ((0.5, 8), (0.5, threads)):
        used[0] += 1_000.0  # in between they may do what they like
        now[0] += 60.0
        share.begin()
        now[0] += step * LOOK_S
        used[0] += others * step * LOOK_S
        assert share.end() == expected


def test_a_team_grows_again_and_never_beyond_what_was_asked_for() -> None:
    now, used, counts = [0.0], [0.0], []
    share = CoreShare(4, cores=16, clock_s=lambda: now[0], others_s=lambda: used[0])
    for others in (0.0, 13.0, 16.0, 2.0):
        share.begin()
        now[0] += LOOK_S
        used[0] += others * LOOK_S
        counts.append(share.end())
    assert counts == [4, 3, 1, 4]


async def test_a_thread_takes_the_team_that_its_share_says(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, others = ComputeThread(), iter((0.0, 1e9, 1e9, 2e9, 2e9, 2e9))
    monkeypatch.setattr("swarm.compute.compute_thread._used_by_others_s", lambda: next(others))
    monkeypatch.setattr("swarm.compute.compute_thread.LOOK_S", 0.0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    try:
        compute.own_the_pool(3)
        assert [await compute.run(torch.get_num_threads) for _ in range(2)] == [3, 1]
    finally:
        compute.close()
