"""A probe takes a private swarm's key from a file or a pipe, never as an argument."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from client.terminal.probe import ProbeSwarm
from swarm.base.errors import ConfigError
from swarm.link.network_key import NetworkKey

KEY = NetworkKey(bytes(range(32)))


def test_the_key_comes_from_a_pipe_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProbeSwarm((), "ab").with_key().membership.network is None
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(KEY.secret)))
    piped = ProbeSwarm((), "ab", network_key=Path("-"))
    assert piped.with_key().membership.network == KEY
    with pytest.raises(ConfigError, match="32 bytes"):
        piped.with_key()  # the pipe is empty now
    KEY.save(tmp_path / "own.key")
    assert ProbeSwarm((), "ab", network_key=tmp_path / "own.key").with_key().membership.network == KEY
