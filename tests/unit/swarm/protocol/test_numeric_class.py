"""Numeric classes: written and read, and which of them promise the same text."""

from __future__ import annotations

from itertools import product

import pytest

from swarm.protocol.numeric_class import NumericClass, promises_texts

EVERY = [
    NumericClass(device, dtype, arch, kernels, weights, lossy)
    for device, dtype, (arch, kernels), weights, lossy in product(
        ("cpu", "cuda", "rocm", "mps"), ("float32", "bfloat16"), (("", 0), ("sm90", 1)), (0, 16, 8, 4), (False, True)
    )
] + [
    NumericClass("cuda", "bfloat16", lossy_rows=lossy, stored=form)
    for form in ("q4_k", "ct4")
    for lossy in (False, True)
]


@pytest.mark.parametrize("one", EVERY, ids=str)
def test_what_is_written_is_read(one: NumericClass) -> None:
    assert NumericClass.parse(str(one)) == one


@pytest.mark.parametrize(
    ("text", "reproducible"),
    [
        ("cpu-float32", True),
        ("cpu-float32+w4z", True),
        ("cpu-float32+int8", False),
        ("cuda-bfloat16", False),
        ("cuda-sm90-bfloat16-k1", True),
        ("cuda-sm90-bfloat16-k1+w4z", True),
        ("cuda-sm90-bfloat16-k1+w4z+int8", False),
        ("rocm-bfloat16", False),
        ("cpu-float32+mxfp4", True),
        ("cpu-float32+mxfp4+int8", False),
        ("cuda-bfloat16+mxfp4", False),
        ("cpu-bfloat16+gguf", False),
        ("cpu-bfloat16-k1+gguf", False),
        ("cpu-bfloat16-k2+gguf", True),
        ("cpu-bfloat16-k2+gguf+int8", False),
        ("cuda-sm90-bfloat16-k1+gguf", True),
    ],
)
def test_which_classes_promise_the_same_text(text: str, *, reproducible: bool) -> None:
    found = NumericClass.parse(text)
    assert found is not None
    assert found.is_reproducible == reproducible


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cpu",
        "cuda-sm90",
        "cpu-float32+w3",
        "cpu-float32+w4",
        "cpu-float32-k0",
        "cpu-float32+x",
        "-float32",
        "cpu-float32+w4z+ct4",
        "cpu-float32+Q4",
    ],
)
def test_what_no_version_writes_is_not_read(text: str) -> None:
    assert NumericClass.parse(text) is None


def test_another_rounding_is_another_class() -> None:
    """Machines that round to 4 bits without zeros call their weights w4: a chain never mixes the two."""
    ours = str(NumericClass("cpu", "float32", weights=4))
    assert ours == "cpu-float32+w4z"
    assert not promises_texts("cpu-float32+w4")


def test_a_name_of_any_length_is_not_read() -> None:
    assert NumericClass.parse(f"cpu-float32+{'q' * 32}") is not None
    assert NumericClass.parse(f"cpu-float32+{'q' * 33}") is None
