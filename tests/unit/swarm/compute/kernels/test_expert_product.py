"""The expert product is a product per pair of row and expert, and a pair's bits depend on nothing beside it."""

from __future__ import annotations

import pytest
import torch

from swarm.compute.kernels.expert_product import expert_product
from tests.devices import DEVICE
from tests.kernels.products import Weight, largest_error, make_form, make_weight, random_rows

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GROUPS = {4: 32, 8: 64, 16: 0, 32: 0}


def multiply(x: torch.Tensor, experts: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    form = weight.words, weight.scales, bias, weight.bits, weight.group, weight.zeros, weight.numbers
    product: torch.Tensor = expert_product(x, experts, *form)
    return product


def exact(x: torch.Tensor, experts: torch.Tensor, weight: Weight, bias: torch.Tensor) -> torch.Tensor:
    rows = x if x.ndim == 3 else x[:, None].expand(-1, experts.shape[1], -1)
    return torch.einsum("rtk,rtnk->rtn", rows.double(), weight.restored[experts]) + bias[experts].double()


def choose(rows: int, of: int, chosen: int) -> torch.Tensor:
    return torch.rand(rows, of, device=DEVICE).topk(chosen).indices


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("bits", "dtype", "each"),
    [
        *((4, BF16, False), (4, F32, True), (8, BF16, True), (8, F16, False)),
        *((16, BF16, False), (16, F16, True), (32, F32, False), (32, F32, True)),
    ],
)
def test_product_is_that_with_each_chosen_expert(bits: int, dtype: torch.dtype, each: bool) -> None:
    weight = make_weight(70, 192, bits, GROUPS[bits], dtype, (5,))
    x, experts = random_rows(7, *((2,) if each else ()), 192, dtype=dtype), choose(7, 5, 2)
    bias = random_rows(5, 70, dtype=dtype)
    got = multiply(x, experts, weight, bias)
    assert got.shape == (7, 2, 70)
    assert got.dtype == dtype
    assert largest_error(got, exact(x, experts, weight, bias)) < (16 if dtype == F32 else 0.51)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("bits", "numbers", "with_zeros"), [(4, "", True), (4, "fp4", False), (8, "e4m3", False)])
def test_forms_of_published_weights(bits: int, numbers: str, with_zeros: bool, each: bool) -> None:
    weight = make_form(40, 160, bits, 32, numbers=numbers, with_zeros=with_zeros, lead=(4,))
    x, experts = random_rows(19, *((3,) if each else ()), 160, dtype=BF16), choose(19, 4, 3)
    got = multiply(x, experts, weight)
    assert largest_error(got, exact(x, experts, weight, torch.zeros(4, 40, device=DEVICE))) < 0.51
    assert torch.equal(multiply(x[-3:], experts[-3:], weight), got[-3:])


@pytest.mark.parametrize(("bits", "dtype"), [(4, BF16), (32, F32), (16, BF16)])
def test_pairs_have_the_same_bits_among_any_others(bits: int, dtype: torch.dtype) -> None:
    weight = make_weight(40, 160, bits, GROUPS[bits], dtype, (4,))
    x, experts = random_rows(34, 160, dtype=dtype), choose(34, 4, 3)
    whole = multiply(x, experts, weight)
    for rows in (1, 3, 17, 33):
        assert torch.equal(multiply(x[-rows:], experts[-rows:], weight), whole[-rows:]), rows
    turned = multiply(x.flip(0), experts.flip(0, 1), weight)
    assert torch.equal(turned.flip(0, 1), whole)
    assert torch.equal(multiply(x, experts, weight), whole)


def test_all_rows_may_choose_the_same_expert() -> None:
    weight = make_weight(16, 64, 4, 32, BF16, (9,))
    x, experts = random_rows(40, 64, dtype=BF16), torch.full((40, 2), 8, device=DEVICE)
    bias = torch.zeros(9, 16, device=DEVICE)
    assert largest_error(multiply(x, experts, weight, bias), exact(x, experts, weight, bias)) < 0.51


def test_more_pairs_than_are_listed_at_once() -> None:
    weight = make_weight(16, 16, 8, 16, BF16, (3,))
    x, experts = random_rows(270, 16, dtype=BF16), choose(270, 3, 2)
    bias = torch.zeros(3, 16, device=DEVICE)
    assert largest_error(multiply(x, experts, weight, bias), exact(x, experts, weight, bias)) < 0.51


@pytest.mark.parametrize(("bits", "dtype"), [(16, BF16), (32, F32)])
def test_transposed_experts_are_taken_as_they_are(bits: int, dtype: torch.dtype) -> None:
    weight = make_weight(40, 48, bits, 0, dtype, (3,))
    x, experts = random_rows(5, 48, dtype=dtype), choose(5, 3, 2)
    kept = weight.words.transpose(1, 2).contiguous()
    assert torch.equal(
        expert_product(x, experts, kept.transpose(1, 2), None, None, bits, 0), multiply(x, experts, weight)
    )


def test_what_lies_beside_a_row_is_not_read() -> None:
    weight = make_weight(40, 96, 4, 32, BF16, (3,))
    x = torch.full((4, 192), torch.nan, dtype=BF16, device=DEVICE)
    x[2, :96] = random_rows(96, dtype=BF16)
    experts = torch.tensor([[0, 1]] * 4, device=DEVICE)
    assert torch.equal(multiply(x[:, :96], experts, weight)[2], multiply(x[2:3, :96], experts[2:3], weight)[0])
    assert not multiply(x[:, :96], experts, weight)[2].isnan().any()


def test_no_rows_are_no_product() -> None:
    weight = make_weight(16, 64, 4, 32, BF16, (2,))
    assert multiply(random_rows(0, 64, dtype=BF16), choose(0, 2, 2), weight).shape == (0, 2, 16)


def test_the_op_is_known_to_compilers() -> None:
    weight = make_weight(16, 64, 4, 32, BF16, (2,))
    given = (random_rows(2, 64, dtype=BF16), choose(2, 2, 1), weight.words, weight.scales, None, 4, 32)
    torch.library.opcheck(expert_product, given, test_utils=("test_schema", "test_faketensor"))
