"""The packed product is the product with the restored weight, and a row's bits depend on nothing beside it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from swarm.compute.kernels import packed_product as module
from swarm.compute.kernels.packed_product import packed_product
from swarm.compute.kernels.product_cuts import ranges_of
from tests.devices import DEVICE
from tests.kernels.products import Weight, largest_error, make_form, make_weight, random_rows

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PLAIN = [(32, F32), (16, BF16), (16, F16)]
ALL = [*((bits, dtype) for bits in (4, 8) for dtype in (F32, BF16, F16)), *PLAIN]
GROUPS = {4: 64, 8: 64, 16: 0, 32: 0}


def multiply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    form = weight.words, weight.scales, bias, weight.bits, weight.group, weight.zeros, weight.numbers
    product: torch.Tensor = packed_product(x, *form)
    return product


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("bits", "dtype"), ALL)
@pytest.mark.parametrize(("n", "k", "has_bias"), [(70, 320, True), (64, 512, False)])
def test_product_is_that_with_the_restored_weight(
    bits: int, dtype: torch.dtype, n: int, k: int, has_bias: bool
) -> None:
    """N and K end within a tile and a step, or with them."""
    weight = make_weight(n, k, bits, GROUPS[bits], dtype)
    x, bias = random_rows(2, 3, k, dtype=dtype), random_rows(n, dtype=dtype) if has_bias else None
    got = multiply(x, weight, bias)
    exact = x.double() @ weight.restored.T + (0 if bias is None else bias.double())
    assert got.shape == (2, 3, n)
    assert got.dtype == dtype
    assert largest_error(got, exact) < (16 if dtype == F32 else 0.51)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 32), (4, 128), (8, 16), (8, 32), (8, 128)])
def test_groups_of_any_size(bits: int, group: int) -> None:
    weight = make_weight(32, 3 * group, bits, group, BF16)
    x = random_rows(3, 3 * group, dtype=BF16)
    assert largest_error(multiply(x, weight), x.double() @ weight.restored.T) < 0.51


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("bits", "numbers", "group", "scale_type", "with_zeros"),
    [
        *((4, "", 32, BF16, True), (4, "", 16, F16, True), (4, "", 128, F32, True), (8, "", 32, BF16, True)),
        *((4, "fp4", 32, BF16, False), (4, "iq4", 32, F16, False), (4, "nf4", 64, F32, False)),
        *((8, "e4m3", 128, F32, False), (8, "e4m3", 64, BF16, False), (8, "", 16, F32, False)),
    ],
)
def test_forms_of_published_weights(  # noqa: PLR0913
    bits: int, numbers: str, group: int, scale_type: torch.dtype, with_zeros: bool, dtype: torch.dtype
) -> None:
    """N ends within a tile, K within a step; several ranges where there are steps enough."""
    form = {"numbers": numbers, "with_zeros": with_zeros, "scale_type": scale_type}
    weight = make_form(40, 9 * group, bits, group, **form)  # type: ignore[arg-type]
    x, bias = random_rows(21, 9 * group, dtype=dtype), random_rows(40, dtype=dtype)
    got = multiply(x, weight, bias)
    assert largest_error(got, x.double() @ weight.restored.T + bias.double()) < (16 if dtype == F32 else 0.51)
    for some in (slice(0, 1), slice(7, 12), slice(3, 20)):
        assert torch.equal(multiply(x[some], weight, bias), got[some])


def test_zeros_are_added_once_in_every_range() -> None:
    weight = make_form(48, 1024, 4, 16, with_zeros=True)
    assert ranges_of(48, 1024, 4, 16) > 1
    x = random_rows(81, 1024, dtype=BF16)
    got = multiply(x, weight)
    assert largest_error(got, x.double() @ weight.restored.T) < 0.51
    assert torch.equal(multiply(x[80:], weight), got[80:])


@pytest.mark.parametrize(("bits", "dtype"), [(4, BF16), (8, F32), (8, F16), (16, BF16), (32, F32)])
def test_rows_have_the_same_bits_among_any_others(bits: int, dtype: torch.dtype) -> None:
    k, group = {4: (512, 16), 8: (256, 16), 16: (1100, 0), 32: (260, 0)}[bits]
    weight = make_weight(48, k, bits, group, dtype)
    assert ranges_of(48, k, bits, group) > 1
    x, bias = random_rows(81, k, dtype=dtype), random_rows(48, dtype=dtype)
    whole = multiply(x, weight, bias)
    for begin, rows in ((80, 1), (62, 3), (7, 16), (0, 17), (17, 64)):
        some = slice(begin, begin + rows)
        assert torch.equal(multiply(x[some], weight, bias), whole[some]), rows


@pytest.mark.parametrize(("bits", "dtype"), [(4, BF16), (16, BF16)])
def test_what_lies_beside_a_row_is_not_read(bits: int, dtype: torch.dtype) -> None:
    weight = make_weight(40, 192, bits, GROUPS[bits], dtype)
    wide = torch.full((3, 512), torch.nan, dtype=dtype, device=DEVICE)
    wide[1, 64:256] = random_rows(192, dtype=dtype)
    got = multiply(wide[:, 64:256], weight)
    assert torch.equal(got[1], multiply(wide[1, 64:256], weight))
    assert not got[1].isnan().any()


def test_long_prompts_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(32, 64, 8, 32, BF16)
    x = random_rows(70, 64, dtype=BF16)
    whole = multiply(x, weight)
    launch = Mock(wraps=module._launch)
    monkeypatch.setattr(module, "MOST_ROWS", 32)
    monkeypatch.setattr(module, "_launch", launch)
    assert torch.equal(multiply(x, weight), whole)
    assert [len(call.args[0]) for call in launch.call_args_list] == [32, 32, 6]


@pytest.mark.parametrize(("bits", "dtype"), PLAIN)
def test_transposed_weights_are_taken_as_they_are(bits: int, dtype: torch.dtype) -> None:
    weight = make_weight(70, 144, bits, 0, dtype)
    x = random_rows(5, 144, dtype=dtype)
    turned = weight.words.T.contiguous().T
    assert not turned.is_contiguous()
    assert torch.equal(packed_product(x, turned, None, None, bits, 0), multiply(x, weight))


def test_the_last_range_leaves_no_ticket_and_repeats_give_the_same_bits() -> None:
    weight = make_weight(48, 512, 8, 32, BF16)
    x = random_rows(40, 512, dtype=BF16)
    first = multiply(x, weight)
    assert ranges_of(48, 512, 8, 32) == 2
    assert torch.equal(multiply(x, weight), first)
    assert not any(scratch.tickets.any() for scratch in module._SCRATCH.values())


def test_no_rows_are_no_product() -> None:
    weight = make_weight(48, 64, 4, 32, BF16)
    assert multiply(torch.empty(2, 0, 64, dtype=BF16, device=DEVICE), weight).shape == (2, 0, 48)


def test_the_op_is_known_to_compilers() -> None:
    weight = make_weight(16, 64, 4, 32, BF16)
    given = (random_rows(2, 64, dtype=BF16), weight.words, weight.scales, None, 4, 32)
    torch.library.opcheck(packed_product, given, test_utils=("test_schema", "test_faketensor"))
