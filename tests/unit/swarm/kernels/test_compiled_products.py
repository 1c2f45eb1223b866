"""The product kernels compile for every class of card, by the instructions and within the memory that are meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from swarm.kernels.support import INTERPRETER


def test_kernels_compile_for_cards_of_every_class(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled_products"],
        cwd=Path(__file__).parents[4],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=50,
    )
    assert ran.returncode == 0, ran.stderr
    made = {one["name"].strip(): one for one in json.loads(ran.stdout)}
    assert len(made) == 6
    for name, one in made.items():
        assert one["shared"] <= one["by_arithmetic"] <= one["limit"], name
        assert one["unit"] == ("wgmma" if "sm_90" in name else "fma" if "fp32" in name else "mma.sync"), name
        assert one["unpacks"] is ("bf16" in name), name
