"""The product kernels compile for every class of card, by the instructions and within the memory that are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compiling import LIMIT_S, compiled_by


@pytest.mark.timeout(LIMIT_S + 20)
def test_kernels_compile_for_cards_of_every_class(tmp_path: Path) -> None:
    found = compiled_by("tests.kernels.compiled_products", tmp_path)
    made = {one["name"].strip(): one for one in found}
    assert len(made) == 13
    for name, one in made.items():
        assert one["shared"] <= one["by_arithmetic"] <= one["limit"], name
        assert one["unit"] == ("wgmma" if "sm_90" in name else "fma" if "fp32" in name else "mma.sync"), name
        assert one["unpacks"] is ("bf16" in name), name
