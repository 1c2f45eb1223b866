"""What a device is said to run: kernels only where Triton was seen to run one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from swarm.compute.kernels import support, trial
from swarm.compute.kernels.support import kernel_support
from swarm.compute.kernels.toolchain import Toolchain
from tests.devices import DEVICE

CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card that is new enough, and everything installed."""
    monkeypatch.setattr(support, "toolchain", lambda: Toolchain(True, True, True))
    monkeypatch.setattr(support, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    support.trial.cache_clear()
    yield
    support.trial.cache_clear()


def test_the_smallest_kernel_runs() -> None:
    assert trial.doubles(torch.device(DEVICE))


@pytest.mark.parametrize("works", [True, False])
def test_a_card_runs_kernels_where_one_ran(*, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "doubles", lambda _: works)
    found = kernel_support(CARD)
    assert found.kernels is found.compiled is works
    assert found.reason == ("" if works else "Triton computes wrongly on this card")


def test_what_triton_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> bool:
        raise RuntimeError("ptxas is older than this card\nand more")

    monkeypatch.setattr(trial, "doubles", fails)
    assert kernel_support(CARD).reason == "Triton does not run on this card (ptxas is older than this card)"
