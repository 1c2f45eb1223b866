"""The attention kernels compile for cards, which interpreted ones need not, and fit the memory that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compiling import LIMIT_S, compiled_by

pytest.importorskip("triton")


@pytest.mark.timeout(LIMIT_S + 20)
def test_kernels_compile_for_cards_of_every_class(tmp_path: Path) -> None:
    made = compiled_by("tests.kernels.compiled_attention", tmp_path)
    assert len(made) == 8
    for one in made:
        assert one["shared"] <= one["limit"], one["name"]
    products = {one["name"]: one["product"] for one in made}
    assert products["sm_86 items"] == products["sm_90 own_blocks"] == "mma.sync"
    assert products["sm_90 items"] == "wgmma"
    assert products["sm_120 items"] == products["sm_120 own_blocks"] == "fma"
