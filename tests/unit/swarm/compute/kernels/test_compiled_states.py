"""The kernels of mixers compile for cards of every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compiled_states import CAPABILITIES, KERNELS
from tests.kernels.compiling import LIMIT_S, compiled_by


@pytest.mark.timeout(LIMIT_S + 20)
def test_kernels_of_mixers_compile_for_cards_of_every_architecture(tmp_path: Path) -> None:
    made = compiled_by("tests.kernels.compiled_states", tmp_path)
    assert {(one["name"], one["capability"]) for one in made} == {
        (name, card) for name in KERNELS for card in CAPABILITIES
    }
    assert all(one["shared"] <= 1024 for one in made), "sums alone go through shared memory"
