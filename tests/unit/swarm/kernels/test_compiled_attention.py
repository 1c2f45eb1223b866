"""The attention kernels compile for cards, which interpreted ones need not, and fit the memory that there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.kernels.support import INTERPRETER

pytest.importorskip("triton")


def test_kernels_compile_for_cards_of_every_class(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled_attention"],
        cwd=Path(__file__).parents[4],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=55,
    )
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert len(made) == 8
    for one in made:
        assert one["shared"] <= one["limit"], one["name"]
    products = {one["name"]: one["product"] for one in made}
    assert products["sm_86 items"] == products["sm_90 own_blocks"] == "mma.sync"
    assert products["sm_90 items"] == "wgmma"
    assert products["sm_120 items"] == products["sm_120 own_blocks"] == "fma"
