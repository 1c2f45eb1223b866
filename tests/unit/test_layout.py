"""The import arrows: node → swarm ← client, pure modules stay pure, and one module alone knows the generated code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm import demo

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"swarm": {"node", "client"}, "node": {"client"}, "client": {"node"}}
PURE = {
    "swarm": (
        "session",
        "slots",
        "tree",
        "sampling",
        "noise",
        "layers",
        "coverage",
        "routing",
        "placement",
        "messages",
        "telemetry",
        "telemetry_fields",
        "telemetry_guard",
        "health_alerts",
        "health_docs",
        "health_findings",
        "health_overview",
        "health_probes",
        "health_served",
        "health_node",
        "health_state",
        "metrics",
        "metrics_histogram",
        "metrics_models",
        "metrics_totals",
        "health_verdict",
        "ids",
        "errors",
    ),
    "client": ("walk", "text", "shape", "pairs"),
    "node": ("nodejs",),
}
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


@pytest.mark.parametrize("package", FORBIDDEN)
def test_import_arrows(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): found for path in _sources(package) if (found := _tops(path) & FORBIDDEN[package])
    }
    assert not wrong


def test_only_the_wire_package_imports_generated_code() -> None:
    wrong = {
        str(path.relative_to(ROOT))
        for package in FORBIDDEN
        for path in _sources(package)
        if path.parent != ROOT / "swarm" / "wire" and any(name.startswith("swarm.wire.v1") for name in imported(path))
    }
    assert not wrong


@pytest.mark.parametrize(
    "path",
    [path for package, names in PURE.items() for name in names if (path := ROOT / package / f"{name}.py").exists()],
    ids=str,
)
def test_pure_modules_have_no_clock_no_chance_and_no_network(path: Path) -> None:
    assert not _tops(path) & IMPURE


def test_every_folder_with_sources_is_a_package() -> None:
    bare = {
        str(path.parent.relative_to(ROOT))
        for package in FORBIDDEN
        for path in (ROOT / package).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert not bare


def test_demo_data_is_where_the_package_says() -> None:
    for folder in (demo.TARGET, demo.DRAFT):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert len(demo.PASSAGES.read_text().splitlines()) == 48
