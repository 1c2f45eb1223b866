"""Picks as a device makes them, in plain torch on the CPU: the same ids, one wait for all sessions, bad rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.base.errors import ConfigError
from swarm.compute import sampling as sampling_module
from swarm.compute.gumbel import gumbel_row
from swarm.compute.picks import device_picks as module
from swarm.compute.picks import filters as filters_module
from swarm.compute.picks.device_picks import PickRequest, device_picks, noise_rows
from swarm.compute.sampling import log_probs, pick, pick_together, ranking_scores
from swarm.protocol.messages import Sampling

WARM = Sampling(seed=2**64 - 5, temperature=0.8)
SAMPLINGS = (
    Sampling(),
    WARM,
    replace(WARM, top_k=7),
    replace(WARM, top_p=0.9),
    replace(WARM, min_p=0.05),
    replace(WARM, top_k=200, top_p=0.95, min_p=0.01),
    replace(WARM, temperature=30.0, top_p=0.99),
)
WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select")


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations whose result the host must see."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if any(name in str(func) for name in WAITS):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    waits, listed = _Waits(), torch.Tensor.tolist

    def tolist(values: torch.Tensor) -> Any:  # noqa: ANN401
        waits.seen.append("tolist")
        return listed(values)

    with monkeypatch.context() as patch, waits:
        patch.setattr(torch.Tensor, "tolist", tolist)
        yield waits.seen


def random_logits(rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows * vocab_size)) * scale


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 900])
def test_picks_are_the_cpus(vocab_size: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_module, "_HEAD_TOKENS", 64)
    monkeypatch.setattr(module, "_FILTERED_ROWS", 5)
    for scale in (0.1, 4.0):
        logits = random_logits(12, vocab_size, scale)
        for values in (logits, (logits * 2).round() / 2):  # and many ties
            positions = [7 + row // 3 for row in range(12)]
            assert device_picks(values, [PickRequest(0, positions, sampling)]) == [pick(values, positions, sampling)]


def test_all_sessions_of_a_batch_are_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(20, 300)
    before = logits.clone()
    requests, first = [], 0
    for sampling in SAMPLINGS[:6]:
        requests.append(PickRequest(first, [first, first + 1], replace(sampling, seed=first)))
        first += 3  # a row between them is nobody's
    requests.append(PickRequest(first, [], WARM))
    with counted_waits(monkeypatch) as waits:
        picks = device_picks(logits, requests)
    assert waits == ["tolist"]
    assert picks == [pick(logits[one.first : one.end], one.positions, one.sampling) for one in requests]
    assert torch.equal(logits, before)


def test_a_nucleus_that_outgrows_the_head_costs_one_more_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_module, "_HEAD_TOKENS", 8)
    flat, sampling = random_logits(4, 200, 0.1), replace(WARM, top_p=0.9)
    steep = random_logits(4, 200, 20.0)
    mixed = torch.stack([steep[0], flat[0], steep[1], flat[1]])
    sorted_rows: list[int] = []
    whole_sort = filters_module._sorted

    def counted(logits: torch.Tensor) -> torch.Tensor:
        sorted_rows.append(len(logits))
        return whole_sort(logits)

    expected = pick(mixed, range(4), sampling)
    monkeypatch.setattr(filters_module, "_sorted", counted)
    assert device_picks(mixed, [PickRequest(0, range(4), sampling)]) == [expected]
    assert sorted_rows == [2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", SAMPLINGS[:4])
def test_one_sessions_bad_rows_are_its_own(bad: float, sampling: Sampling) -> None:
    logits = random_logits(6, 40)
    logits[3] = (
        logits[3].clone().fill_(-math.inf) if bad == -math.inf else logits[3].index_fill(0, torch.tensor(5), bad)
    )
    requests = [PickRequest(0, [1, 2], sampling), PickRequest(2, [1, 2], sampling), PickRequest(4, [1, 2], WARM)]
    found = device_picks(logits, requests)
    assert found[1] is None
    assert found[0] == pick(logits[:2], [1, 2], sampling)
    assert found[2] == pick(logits[4:], [1, 2], WARM)
    together = pick_together(logits, requests)
    assert isinstance(together[1], ConfigError)
    assert [together[0], together[2]] == [found[0], found[2]]


def test_pick_goes_to_the_device_unless_noise_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(logits: torch.Tensor, requests: list[PickRequest]) -> list[list[int] | None]:
        asked.append(len(requests))
        return device_picks(logits, requests)

    monkeypatch.setattr(sampling_module, "device_picks", counted)
    logits = random_logits(4, 50)
    expected = pick(logits, range(4), WARM, 40)
    assert asked == []
    monkeypatch.setattr(sampling_module, "picks_on", lambda _: True)
    assert pick(logits, range(4), WARM, 40) == expected
    assert asked == [1]
    assert pick(logits, range(4), WARM, 40, gumbel_row) == expected
    assert asked == [1]


@pytest.mark.parametrize("sampling", SAMPLINGS[1:6])
def test_a_drafts_scores_are_the_same_on_a_device(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, positions = random_logits(6, 200), [4, 4, 9, 9, 5, 4]
    expected = ranking_scores(logits, positions, sampling)
    monkeypatch.setattr(sampling_module, "picks_on", lambda _: True)
    assert torch.allclose(ranking_scores(logits, positions, sampling), expected, rtol=1e-15, atol=4e-15)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (11, 5), (2**64 - 1, 2**32 - 1), (2**63, 77)])
def test_plain_noise_is_the_law(seed: int, position: int) -> None:
    cpu = torch.device("cpu")
    for vocab_size in (1, 2, 1001):
        rows = noise_rows(seed, [position, position ^ 1], vocab_size, cpu, torch.float64)
        for row, place in zip(rows, (position, position ^ 1), strict=True):
            assert np.allclose(row.numpy(), gumbel_row(seed, place, vocab_size), rtol=4e-16, atol=1e-15)
    assert noise_rows(seed, [position], 9, cpu, torch.float32).dtype == torch.float32


def test_the_ends_of_the_uniform_are_bounded_as_the_law_says() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 1])
    uniform = module._uniform(words, words).tolist()
    assert (uniform[0], uniform[-1]) == (2.0**-65, 1 - 2.0**-53)


def test_log_probs_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(3, 50)
    with counted_waits(monkeypatch) as waits:
        found = log_probs(logits, [4, 5, 6], 3, 40)
    assert waits == ["tolist"]
    logs = logits[:, :40].log_softmax(dim=1)
    best = logs.topk(3, dim=1)
    for row, (own, top) in enumerate(found):
        assert own == logs[row, 4 + row].item()
        assert [token for token, _ in top] == best.indices[row].tolist()
        assert [value for _, value in top] == best.values[row].tolist()
        assert all(type(token) is int for token, _ in top)
