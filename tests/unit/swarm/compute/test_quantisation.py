"""Weights as small integers: what is rounded, to what, and that every machine rounds alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import swarm.compute.quantisation
from swarm.base.errors import UnsupportedModel
from swarm.compute.quantisation import CENTRED, TRIED, QuantisedWeight, group_of, quantise, restore
from tests.devices import DEVICES


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def by_numpy(weight: torch.Tensor, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same by another library: one group after the other, sums in pairs. Codes, scales and zeros."""
    grouped = weight.numpy().astype(np.float32).reshape(-1, group)
    found = [eight_bits(values) if bits == 8 else four_bits(values) for values in grouped]
    codes, scales, zeros = (np.array(part) for part in zip(*found, strict=True))
    return codes.reshape(weight.shape), scales.reshape(len(weight), -1).T, zeros.reshape(len(weight), -1).T


def eight_bits(values: np.ndarray) -> tuple[np.ndarray, np.float32, np.float32]:
    scale = _bf16(np.abs(values).max() / np.float32(127))
    return np.clip(np.rint(values / scale), -127, 127), scale, np.float32(0)


def four_bits(values: np.ndarray) -> tuple[np.ndarray, np.float32, np.float32]:
    low, high, least = values.min(), values.max(), np.float32(np.inf)
    for share in TRIED:
        scale = _bf16((high - low) * np.float32(share) / np.float32(15))
        zero = (low + high) * np.float32(0.5) + scale * np.float32(0.5)
        for turn in range(CENTRED + 1):
            zero = _bf16(zero) if turn == CENTRED else zero
            code = np.clip(np.rint((values - zero) / scale), -8, 7)
            left = (values - zero) - code * scale
            if turn < CENTRED:
                zero = zero + pair_sum(left) / np.float32(len(values))
        error = pair_sum(np.sqrt(np.abs(left)) * np.abs(left))
        if error < least:
            least, found = error, (code, scale, zero)
    return found


def pair_sum(values: np.ndarray) -> np.float32:
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return np.float32(values[0])


def _bf16(value: np.float32) -> np.float32:
    return np.float32(torch.tensor(value).to(torch.bfloat16).float().item())


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 32)])
def test_the_integers_are_those_of_another_library(bits: int, group: int) -> None:
    weight = weights(24, 256)
    found = quantise(weight, bits)
    codes, scales, zeros = by_numpy(weight, bits, group)
    assert found.codes.dtype == torch.int8
    assert found.group == group
    assert np.array_equal(found.codes.numpy(), codes)
    assert np.array_equal(found.scales.float().numpy(), scales)
    assert (found.zeros is None) == (bits == 8)
    if found.zeros is not None:
        assert np.array_equal(found.zeros.float().numpy(), zeros)


def same(one: QuantisedWeight, other: QuantisedWeight) -> bool:
    zeros = [part.zeros for part in (one, other) if part.zeros is not None]
    alike = len(zeros) != 1 and (not zeros or torch.equal(*zeros))
    return alike and torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [4, 8])
def test_pieces_layouts_and_devices_change_nothing(bits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(40, 192)
    plain = quantise(weight, bits)
    turned = weight.t().contiguous().t().to(device)
    monkeypatch.setattr(swarm.compute.quantisation, "PIECE", 192 * 7)
    moved = quantise(turned, bits)
    zeros = None if moved.zeros is None else moved.zeros.cpu()
    assert same(plain, QuantisedWeight(moved.codes.cpu(), moved.scales.cpu(), bits, moved.group, zeros))


def test_errors_are_added_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """From left to right this sum is 1; a device's own sum may be anything."""
    values = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
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


def relative_error(weight: torch.Tensor) -> float:
    return float((restore(quantise(weight, 4)) - weight).norm() / weight.norm())


def test_an_int4_line_has_an_offset() -> None:
    """Values far from zero, all on one side, use all sixteen codes; symmetric ones would use half of them."""
    ramp = torch.linspace(3.0, 4.0, 16).repeat(2)[None]
    found = quantise(ramp, 4)
    assert len(set(found.codes.flatten().tolist())) == 16
    assert (restore(found) - ramp).abs().max() < 0.02
    assert relative_error(weights(64, 256)) < 0.085


def test_the_errors_of_an_int4_group_add_up_to_little() -> None:
    """Inputs that share a mean would turn a common error into one of their product."""
    weight = weights(64, 256)
    error = (restore(quantise(weight, 4)) - weight).view(-1, 32)
    assert error.mean(1).abs().mean() < 0.1 * error.abs().mean(), "0.16 where they fall as they may"


def test_what_lies_far_out_is_cut_off_where_the_others_gain_by_it() -> None:
    weight = weights(64, 256)
    grouped = weight.view(64, -1, 32)
    spans = quantise(weight, 4).scales.float().t() * 15
    share = spans / (grouped.amax(-1) - grouped.amin(-1))
    assert 0.3 < (share < 0.97).float().mean() < 1


def test_a_group_of_zeros_stays_zero() -> None:
    for bits in (4, 8):
        assert not restore(quantise(torch.zeros(4, 64), bits)).any()


@pytest.mark.parametrize(("columns", "int8", "int4"), [(4096, 128, 32), (192, 64, 32), (48, 16, 16), (40, None, None)])
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
