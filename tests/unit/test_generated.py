"""The committed protobuf modules are what the protos generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/protos.py", tmp_path], check=True, timeout=15)
    fresh = {path.name: path.read_text() for path in (tmp_path / "swarm/wire/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "swarm/wire/v1").glob("*_pb2*")}
    assert fresh
    assert fresh == committed, "run `python tools/protos.py` and commit the result"
