"""Published weights as the product kernels read them: every format against what its library decodes, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from swarm.compute.weights.kernel_codes import KernelCodes, card_bits, expert_form, group_within
from swarm.compute.weights.stored_weight import StoredWeight
from swarm.files.gguf.encodings import ENCODINGS
from swarm.files.stored.eight_bits import Fp8Matrix
from swarm.files.stored.gguf_source import GgufMatrix
from swarm.files.stored.matrix import StoredMatrix
from swarm.files.stored.quantised import FORMATS
from swarm.files.stored.source import StoredTensor
from tests.devices import DEVICE
from tests.model.gguf_files import encode
from tests.model.quantised_models import Written, awq, bitsandbytes, compressed, fp8, gptq

ROWS: Final = 48
HALF: Final = 2**-8
"""What bfloat16 rounds off at most, of a step and of a zero, which are parts of a value of up to that size."""
EXACT: Final = 1e-6
GGUF: Final = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL, Kind.MXFP4), EXACT),
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1), 2**-11),
    **dict.fromkeys((Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS), HALF),
    Kind.Q2_K: 2 * HALF,  # drawn blocks have values that are small differences of large parts
}
"""How far a value may be off, as a part of its row's largest one."""
_GROUPS: Final[dict[str, Any]] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FP4: Final[dict[str, Any]] = {"num_bits": 4, "type": "float", "symmetric": True}
PUBLISHED: Final[dict[str, tuple[Callable[[], Written], float]]] = {
    "fp8-blocks": (lambda: fp8(block=(16, 64)), HALF),
    "fp8-128": (lambda: fp8(block=(128, 128)), EXACT),
    "gptq": (gptq, 2**-11),
    "gptq-act-order": (lambda: gptq(act_order=True), 2**-11),
    "gptq-v2-8": (lambda: gptq(bits=8, version="gptq_v2"), 2**-11),
    "awq": (awq, 2**-11),
    "ct4": (lambda: compressed({**_GROUPS, "symmetric": True}), HALF),
    "ct4-zeros": (lambda: compressed({**_GROUPS, "symmetric": False}), HALF),
    "ct8": (lambda: compressed({"num_bits": 8, "symmetric": True, "type": "int", "strategy": "channel"}), HALF),
    "nvfp4": (lambda: compressed({**_FP4, "strategy": "tensor_group", "group_size": 16}), 2 * HALF),
    "ct-mxfp4": (lambda: compressed({**_FP4, "strategy": "group", "group_size": 32}), EXACT),
    "nf4": (lambda: bitsandbytes("nf4"), 3 * HALF),
    "bnb-int8": (lambda: bitsandbytes("int8"), EXACT),
}


def drawn(rows: int = ROWS, columns: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def of_gguf(kind: Kind, seed: int = 0, columns: int = 512) -> StoredMatrix:
    (blocks, _), _ = encode(drawn(columns=columns, seed=seed).numpy(), kind, numpy.random.default_rng(seed))
    return GgufMatrix(torch.from_numpy(numpy.ascontiguousarray(blocks)).view(ROWS, -1), ENCODINGS[kind.value])


def of_form(form: Written, weight: torch.Tensor | None = None) -> StoredMatrix:
    written = form.write(drawn() if weight is None else weight)
    parts = {end[1:] if end.startswith("|") else f"{form.root}{end}": one for end, one in written.items()}
    made = FORMATS[form.config["quant_method"]].combine(parts, form.config)
    assert isinstance(made, StoredTensor)
    return made.matrix


def held(*matrices: StoredMatrix, dtype: torch.dtype = torch.float32) -> KernelCodes:
    made = KernelCodes.of(StoredWeight(matrices, dtype).to(DEVICE))
    assert made is not None
    return made


def check(matrices: Sequence[StoredMatrix], bound: float) -> None:
    """Values, some rows, and a product; in float32, so that only steps and zeros are rounded."""
    wanted = torch.cat([one.decode(0, one.rows) for one in matrices]).double()
    weight = held(*matrices)
    most = wanted.abs().amax(1, keepdim=True)
    got = weight.restored().cpu().double()
    assert ((got - wanted).abs() / most).max() <= bound
    ids = torch.tensor([3, len(wanted) - 1, 0, 3])
    assert torch.equal(weight.take(ids.to(DEVICE)).cpu(), weight.restored().cpu()[ids])
    x = drawn(5, wanted.shape[1], seed=1).to(DEVICE)
    product = weight.product(x).cpu().double()
    assert (product - x.cpu().double() @ got.T).abs().max() <= 1e-5 * product.abs().max()
    assert torch.equal(weight.product(x[2:3]), weight.product(x)[2:3])
    assert not any(part.is_floating_point() for part in weight.parameters())


@pytest.mark.parametrize("kind", GGUF, ids=str)
def test_a_type_of_gguf(kind: Kind) -> None:
    check([of_gguf(kind)], GGUF[kind])
    matrix, weight = of_gguf(kind), held(of_gguf(kind))
    taken = sum(part.numel() * part.itemsize for part in weight.parameters())
    assert taken * 8 / (matrix.rows * matrix.columns) == card_bits(matrix.encoding)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_format(name: str) -> None:
    form, bound = PUBLISHED[name]
    check([of_form(form())], bound)


def test_pieces_of_several_formats_lie_one_below_the_other() -> None:
    check([of_gguf(Kind.Q4_K), of_gguf(Kind.Q6_K, 1), of_form(awq())], HALF)


def test_columns_are_put_in_order_in_the_input() -> None:
    matrix = of_form(gptq(act_order=True))
    assert held(matrix).order is not None
    assert held(of_form(gptq())).order is None


def test_siblings_of_one_form_are_joined_and_others_not() -> None:
    one, two = held(of_gguf(Kind.Q4_K)), held(of_gguf(Kind.Q4_K, 1))
    assert one.joins(two)
    joined, x = one.join([two]), drawn(3, seed=2).to(DEVICE)
    assert torch.equal(joined.product(x), torch.cat([one.product(x), two.product(x)], -1))
    ordered = held(of_form(gptq(act_order=True)))
    others = held(of_gguf(Kind.Q4_0)), held(of_gguf(Kind.Q6_K)), ordered, held(of_gguf(Kind.Q4_K, columns=256))
    assert not any(one.joins(other) for other in others)
    assert not held(of_form(gptq())).joins(ordered)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.MXFP4, Kind.Q8_0], ids=str)
def test_experts_lie_one_behind_the_other(kind: Kind) -> None:
    matrix, experts = of_gguf(kind), 6
    form = expert_form(StoredWeight([matrix], torch.float32).to(DEVICE), experts)
    assert form is not None
    x, chosen = drawn(6, seed=3).to(DEVICE), torch.tensor([[0, 4], [4, 1], [2, 3], [0, 1], [3, 3], [1, 4]]).to(DEVICE)
    weight = held(matrix).restored().view(experts, -1, matrix.columns)
    wanted = torch.einsum("rk,rtnk->rtn", x.double(), weight[chosen].double())
    assert (form.expert_product(x, chosen, None) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_what_kernels_cannot_read_stays() -> None:
    nan = Fp8Matrix.of(torch.full((16, 32), torch.nan).to(torch.float8_e4m3fn), torch.ones(16, 1))
    five = Fp8Matrix.of(torch.ones(16, 32).to(torch.float8_e5m2), torch.ones(16, 1))
    odd = of_form(bitsandbytes("int8"), drawn(16, 40))
    for matrix in (nan, five, odd, of_form(bitsandbytes("fp4"))):
        assert KernelCodes.of(StoredWeight([matrix], torch.float32)) is None
    assert [card_bits(name) for name in ("iq2_xs", "iq3_s", "f16")] == [None, None, None]


def test_groups_end_with_those_of_the_file_and_with_the_row() -> None:
    assert [group_within(*one) for one in ((4096, 4096), (576, 128), (11008, 11008), (512, 32))] == [128, 64, 128, 32]
    assert [group_within(*one) for one in ((40, 40), (96, 8))] == [None, None]
