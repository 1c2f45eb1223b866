"""The import arrows, which import-linter keeps by the contracts in pyproject.toml, and pure modules that stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from swarm import demo

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "client")
BIN = Path(sys.executable).parent
PURE = (
    "client/tools/bench/paired_ratio",
    "client/decode/text_stream",
    "client/decode/walk",
    "client/tools/demo/link_shape",
    "client/draft/search/tree",
    "node/life/nodejs",
    "swarm/directory/coverage",
    "swarm/directory/model_pointer",
    "swarm/directory/record_store",
    "swarm/base/errors",
    "swarm/health/alerts/rules",
    "swarm/health/metrics/models",
    "swarm/health/state/verdict",
    "swarm/health/state/contributions",
    "swarm/health/state/model",
    "swarm/health/state/node",
    "swarm/health/state/overview",
    "swarm/health/state/probe_results",
    "swarm/base/ids",
    "swarm/compute/gumbel",
    "swarm/compute/kv_slots",
    "swarm/compute/sampling",
    "swarm/base/layers",
    "swarm/base/histogram",
    "swarm/status/metric_set",
    "swarm/protocol/limits",
    "swarm/protocol/messages",
    "swarm/protocol/session",
    "swarm/routing/placement",
    "swarm/routing/route",
    "swarm/base/quota",
    "swarm/status/guard",
    "swarm/status/messages",
)
IMPURE = {"asyncio", "time", "datetime", "random", "secrets", "grpc", "socket", "threading", "subprocess", "hivemind"}
GENERATED = ROOT / "swarm" / "wire" / "v1"


def _sources(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path.parent != GENERATED]


def imported(path: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, anywhere in it; a name imported from one counts as one."""
    for item in ast.walk(ast.parse(path.read_text())):
        match item:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{name.name}" for name in names)


def _tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def test_every_package_imports_only_from_lower_levels() -> None:
    done = subprocess.run([BIN / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nothing_shipped_imports_tests_or_tools() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for package in (*PACKAGES, "benchmarks")
        for path in _sources(package)
        if (found := _tops(path) & {"tests", "tools"})
    }
    assert not wrong


def test_pure_modules_have_no_clock_no_chance_and_no_network() -> None:
    assert {path: found for path in PURE if (found := _tops(ROOT / f"{path}.py") & IMPURE)} == {}


def test_every_folder_with_sources_is_a_package() -> None:
    bare = {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert not bare


def test_demo_data_is_where_the_package_says() -> None:
    for folder in (demo.TARGET, demo.DRAFT):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert len(demo.PASSAGES.read_text().splitlines()) == 48


def test_a_name_of_a_class_or_type_alias_stands_for_one_thing() -> None:
    found = defaultdict(list)
    for package in PACKAGES:
        for path in _sources(package):
            for item in ast.parse(path.read_text()).body:
                match item:
                    case ast.ClassDef(name=name):
                        pass
                    case ast.Assign(targets=[ast.Name(id=name)]) if (
                        name.lstrip("_")[:1].isupper() and not name.isupper()
                    ):
                        pass
                    case _:
                        continue
                found[name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_tests_mirror_the_packages() -> None:
    """Below their cost, tests lie as what they test; what tests no package lies beside, under its folder's name."""
    stray = {
        str(path.relative_to(ROOT))
        for cost in ("unit", "property", "net", "model")
        for path in (ROOT / "tests" / cost).rglob("test_*.py")
        if not (ROOT / path.parent.relative_to(ROOT / "tests" / cost)).is_dir()
    }
    assert stray == set()
