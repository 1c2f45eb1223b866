"""The wheel holds the three packages with their data and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "client")
BUILD = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"


def test_the_wheel_is_three_packages_with_types_and_demo_models(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for pattern in ("pyproject.toml", "LICENSE", "README.md"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, tree)
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert {name.partition("/")[0] for name in packed} == {*PACKAGES, "canopy_swarm-0.2.0.dist-info"}
    here = {str(path.relative_to(tree)) for name in PACKAGES for path in (tree / name).rglob("*") if path.is_file()}
    assert here == {name for name in packed if ".dist-info/" not in name}
    assert {f"{name}/py.typed" for name in PACKAGES} <= here
    assert {"swarm/demo/demo-target/model.safetensors", "swarm/demo/demo-draft/tokenizer.json"} <= here
