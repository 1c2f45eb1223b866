"""Compiles kernels for cards in a program of its own: where Triton interprets, it compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from swarm.compute.kernels.support import INTERPRETER

LIMIT_S = 200


def compiled_by(module: str, folder: Path) -> list[dict[str, Any]]:
    """What a module prints about the kernels that it compiled; Triton keeps its programs in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    ran = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stderr
    made: list[dict[str, Any]] = json.loads(ran.stdout)
    return made
