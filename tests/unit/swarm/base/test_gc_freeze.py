"""What a program imported is left out of garbage collection; and nodes see to that."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import node.cli
from node.life.autostart.recorder import NodeFacts
from node.life.autostart.state_file import Stage
from node.model.config import ServeConfig
from swarm.base.process_limits import freeze_imports


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_is_not_looked_at_again() -> None:
    kept: list[list[int]] = [[] for _ in range(10)]
    freeze_imports()
    assert gc.get_freeze_count() > len(kept)
    assert not any(found is kept for found in gc.get_objects())


def test_a_node_settles_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    frozen: list[int] = []

    class Serving:
        def __init__(self, *_: object) -> None:
            self.address, self.peer_id = "here", "somebody"

        async def __aenter__(self) -> Serving:
            frozen.append(gc.get_freeze_count())
            return self

        async def __aexit__(self, *_: object) -> None:
            return

        def join_line(self) -> str:
            return ""

        def facts(self) -> NodeFacts:
            return NodeFacts(Stage.SERVING)

        async def wait_failed(self) -> None:
            return

    quiet: Any = SimpleNamespace(Node=Serving)
    monkeypatch.setitem(sys.modules, "node.life.serve", quiet)
    before = gc.get_freeze_count()
    assert node.cli.serve(ServeConfig(layers="0-6", model=str(tmp_path))) == 1, "a node that stops says so"
    assert frozen
    assert frozen[0] > before
