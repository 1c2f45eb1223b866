"""Weights as small integers: what is rounded, to what, and that every machine rounds alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import swarm.compute.quantisation
from swarm.base.errors import UnsupportedModel
from swarm.compute.quantisation import TRIED, QuantisedWeight, group_of, quantise, restore
from tests.devices import DEVICES


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def by_numpy(weight: torch.Tensor, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The same by another library: one group after the other, sums in pairs."""
    grouped = weight.numpy().astype(np.float32).reshape(-1, group)
    codes, scales = [], []
    for values in grouped:
        most = np.abs(values).max()
        found = (np.float32(np.inf), np.float32(1), values)
        for levels in (127.0,) if bits == 8 else TRIED:
            for sign in (1,) if bits == 8 else (1, -1):
                scale = np.float32(sign) * _bf16(most / np.float32(levels))
                code = np.clip(np.rint(values / scale), -127 if bits == 8 else -8, 127 if bits == 8 else 7)
                squares = (code * scale - values) ** 2
                while len(squares) > 1:
                    squares = squares[: len(squares) // 2] + squares[len(squares) // 2 :]
                if squares[0] < found[0]:
                    found = (squares[0], scale, code)
        codes.append(found[2])
        scales.append(found[1])
    return np.array(codes).reshape(weight.shape), np.array(scales).reshape(len(weight), -1).T


def _bf16(value: np.float32) -> np.float32:
    return np.float32(torch.tensor(value).to(torch.bfloat16).float().item())


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 64)])
def test_the_integers_are_those_of_another_library(bits: int, group: int) -> None:
    weight = weights(24, 256)
    found = quantise(weight, bits)
    codes, scales = by_numpy(weight, bits, group)
    assert found.codes.dtype == torch.int8
    assert found.group == group
    assert np.array_equal(found.codes.numpy(), codes)
    assert np.array_equal(found.scales.float().numpy(), scales)


def same(one: QuantisedWeight, other: QuantisedWeight) -> bool:
    return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [4, 8])
def test_pieces_layouts_and_devices_change_nothing(bits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(40, 192)
    plain = quantise(weight, bits)
    turned = weight.t().contiguous().t().to(device)
    monkeypatch.setattr(swarm.compute.quantisation, "PIECE", 192 * 7)
    moved = quantise(turned, bits)
    assert same(plain, QuantisedWeight(moved.codes.cpu(), moved.scales.cpu(), bits, moved.group))


def test_errors_are_added_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """From left to right this sum is 1; a device's own sum may be anything."""
    values = torch.tensor([[1e8, 1.0, -1e8, 1.0]])
    assert swarm.compute.quantisation._pair_sum(values).tolist() == [2.0]
    monkeypatch.setattr(torch.Tensor, "sum", lambda *_: pytest.fail("its order is the device's"))
    quantise(weights(4, 64), 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_are_rounded_one_by_one(bits: int) -> None:
    stacked = weights(3, 16, 96)
    together = quantise(stacked, bits)
    assert together.scales.shape == (3, 96 // together.group, 16)
    for number, weight in enumerate(stacked):
        alone = quantise(weight, bits)
        assert torch.equal(together.codes[number], alone.codes)
        assert torch.equal(restore(together)[number], restore(alone))


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = weights(8, 256)
    found = quantise(weight, 8)
    step = found.scales.float().t().repeat_interleave(128, 1)
    assert (restore(found) - weight).abs().le(step * 0.51).all()
    assert float((restore(found) - weight).norm() / weight.norm()) < 0.008


def test_an_int4_scale_takes_the_sign_that_reaches_further() -> None:
    """-8 has no counterpart: the end of a group that is larger gets it, whichever it is."""
    ramp = torch.linspace(-7.5, 8, 64)[None]
    for sign in (1.0, -1.0):
        found = quantise(ramp * sign * 0.1, 4)
        assert torch.sign(found.scales[0, 0].float()) == -sign
    assert float((restore(quantise(weights(64, 256), 4)) - weights(64, 256)).norm() / weights(64, 256).norm()) < 0.095


def test_a_group_of_zeros_stays_zero() -> None:
    for bits in (4, 8):
        assert not restore(quantise(torch.zeros(4, 64), bits)).any()


@pytest.mark.parametrize(("columns", "int8", "int4"), [(4096, 128, 64), (192, 64, 64), (48, 16, 16), (40, None, None)])
def test_groups_divide_the_columns(columns: int, int8: int | None, int4: int | None) -> None:
    assert (group_of(columns, 8), group_of(columns, 4)) == (int8, int4)
    if int4 is None:
        with pytest.raises(ValueError, match="40 columns"):
            quantise(torch.zeros(2, columns), 4)
    else:
        assert quantise(torch.ones(2, columns), 4).scales.shape == (columns // int4, 2)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = weights(2, 64)
    weight[1, 3] = value
    with pytest.raises(UnsupportedModel, match="not finite"):
        quantise(weight, 8)
