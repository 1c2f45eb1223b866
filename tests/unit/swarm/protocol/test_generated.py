"""The committed protobuf modules are what the protos generate, and only the wire codec imports them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/protos.py", tmp_path], check=True, timeout=15)
    fresh = {path.name: path.read_text() for path in (tmp_path / "swarm/protocol/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "swarm/protocol/v1").glob("*_pb2*")}
    assert fresh
    assert fresh == committed, "run `python tools/protos.py` and commit the result"


def test_only_the_wire_codec_imports_them() -> None:
    sources = [path for folder in ("swarm", "node", "client") for path in (ROOT / folder).rglob("*.py")]
    outside = [path for path in sources if (ROOT / "swarm/protocol") not in path.parents]
    assert not [path for path in outside if "node_pb2" in path.read_text()]
