"""One word is enough: invite, serve with it, and generate with nothing, in a private swarm whose first peer is gone."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.demo import TARGET
from swarm.directory.joining.invite import is_invite
from tests.e2e.programs import program, run

NODE = ("--layers", "0-12", "--host", "127.0.0.1", "--threads", "1", "--dtype", "float32")
TEXT = ("--prompt", "It was a dark night", "--max-new-tokens", "8", "--seed", "7")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Goes to somebody's machine: programs that are started afterwards have that home."""
    monkeypatch.delenv("CANOPY_SWARMS")

    def at(whose: str) -> Path:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / whose))
        return tmp_path / whose

    return at


def test_invite_serve_and_generate_with_nothing(
    at: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at("anna")
    key = tmp_path / "network.key"
    boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--network-key", str(key)]
    with program(boot, tmp_path / "bootstrap.log") as bootstrap:
        bootstrap.wait_for("the swarm is private")
        invited = run("swarm.cli", "invite")
        word = invited.stdout.strip()
        assert is_invite(word), invited.stderr
        at("ben")
        monkeypatch.setenv("CANOPY_JOIN", word)
        with program(["node.cli", "serve", str(TARGET), *NODE], tmp_path / "node.log") as node:
            node.wait_for("invited by ")
            node.wait_for("serving at")
            bootstrap.end(signal.SIGTERM)
            monkeypatch.delenv("CANOPY_JOIN")
            generated = run("client.cli", "generate", *TEXT)  # no model, no address, no key, and no first peer
            assert generated.returncode == 0, generated.stderr
            assert len(generated.stdout.strip()) > 10
            assert "canopy-network-key" not in node.log.read_text()
            assert word not in node.log.read_text()
