"""The `node` command up to the point where it would join a swarm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import node.cli
from node.life.autostart.service import InstallService, ServiceHost
from node.model.config import ServeConfig
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import Invite, seal_invite
from swarm.link.network_key import NetworkKey

INVITER = Identity.ephemeral()


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_dry_installation_writes_nothing(
    is_dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("CANOPY_SWARMS", raising=False)
    machine = ServiceHost("linux", tmp_path, {"XDG_CONFIG_HOME": str(tmp_path)}, 1_000, lambda _: (0, ""))
    monkeypatch.setattr("node.cli.this_machine", lambda *_: machine)
    peer = f"/ip4/203.0.113.1/tcp/31337/p2p/{INVITER.peer_id}"
    key = NetworkKey(bytes(range(32)))
    word = seal_invite(Invite((peer,), int(time.time()) + 600, "org/m", network=key), INVITER)
    order = InstallService(ServeConfig(join=(word,)), dry_run=is_dry)
    assert node.cli.look_after(order) == 0
    assert f"networks/{key.name}.key" in capsys.readouterr().out or not is_dry
    written = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert written == ([] if is_dry else [f"{key.name}.key", "canopy-node.service"])
