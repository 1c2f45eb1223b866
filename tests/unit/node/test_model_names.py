"""How a user may call the swarm's models."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.model.checkpoint import open_named
from node.model.config import ServeConfig
from swarm.base.errors import HubError, UnknownModel
from swarm.base.ids import ModelIdentity


@pytest.mark.parametrize(
    ("name", "wanted", "is_it"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "/models/Qwen3-8B/", True),
        ("Qwen/Qwen3-8B", "someone/Qwen3-8B", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3", False),
        ("demo-target", "swarm/demo/demo-target", True),
        ("demo-target", "./demo-target", True),
        ("demo-target", "anyone/demo-target", True),
        ("demo-target", "0123456789ab", True),
        ("demo-target", "01234", False),
        ("demo-target", "demo", False),
    ],
)
def test_a_model_is_called_by_hub_id_folder_or_fingerprint(name: str, wanted: str, is_it: bool) -> None:
    model = ModelIdentity(name, "0123456789abcdef", "", "", "", 12)
    assert model.is_called(wanted) is is_it


def test_what_only_the_swarm_calls_so_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the name is a folder; the user's own word is reported as it is."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModel, match=r"^the swarm calls its model nowhere-7b; give your own copy of it as MODEL"):
        open_named("nowhere-7b", ServeConfig("0-4"))
    with pytest.raises((UnknownModel, HubError), match=r"^(?!the swarm calls)"):
        open_named("nowhere-7b", ServeConfig("0-4", "nowhere-7b"))
