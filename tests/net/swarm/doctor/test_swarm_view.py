"""A look at real swarms: a good one with a relay and a copied identity, and one whose clock is wrong."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from swarm.directory.dht import registry as registry_module
from swarm.directory.dht.about import OURS
from swarm.directory.dht.registry import DhtConfig, DhtPipe, DhtRegistry, start_pipe
from swarm.directory.identity import Identity
from swarm.doctor.directory import ClockService, look_at_clock, look_at_directory, look_at_release, look_at_swarm
from swarm.doctor.machine import look_at_identity
from tests.one_diagnosis import assert_ok, assert_trouble
from tests.sample_records import sample_record

LOCAL = DhtConfig(host="127.0.0.1")
FORTY_S_AHEAD = (
    "import time; now = time.time; time.time = lambda: now() + 40\n"
    "from swarm.directory.dht import process; process.main()"
)


async def test_a_look_at_a_good_swarm(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1", identity_path=path)) as node:
        await node.announce(sample_record(node.peer_id, address="127.0.0.1:5000", numeric_class="cpu-bfloat16"))
        await node.offer_relay("127.0.0.1:31338")
        copy = tmp_path / "copy.key"
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        view = await look_at_swarm(tuple(node.join_addresses()[:1]), copy)
    assert (view.error, view.is_late) == ("", False)
    (about,) = view.abouts
    assert (about, about.seen) == (OURS, "127.0.0.1")
    assert about.time is not None
    assert abs(about.time - time.time()) < 30
    assert view.relays == ("127.0.0.1:31338",)
    assert view.numeric_classes == {"cpu-bfloat16"}
    await assert_trouble(
        look_at_identity(copy, view.own_record), "identity-copied", "another machine serves", f"mv {copy}"
    )
    await assert_ok(look_at_directory(view), "directory")
    await assert_ok(look_at_release(view), "release")
    await assert_ok(look_at_clock(view, ClockService()), "clock")


async def test_a_look_at_a_swarm_with_another_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def start_ahead() -> DhtPipe:
        return await start_pipe([sys.executable, "-c", FORTY_S_AHEAD])

    with monkeypatch.context() as patch:
        patch.setattr(registry_module, "start_pipe", start_ahead)
        peer = await DhtRegistry.open(LOCAL)
    try:
        view = await look_at_swarm(tuple(peer.join_addresses()[:1]), tmp_path / "identity.key")
    finally:
        await peer.aclose()
    check = look_at_clock(view, ClockService(is_active=False))
    await assert_trouble(check, "clock-wrong", "40.0 s behind the swarm's", "sudo timedatectl set-ntp true")


async def test_an_identity_that_nobody_lists_is_sound(tmp_path: Path) -> None:
    Identity.ephemeral().save(tmp_path / "identity.key")
    await assert_ok(look_at_identity(tmp_path / "identity.key", None), "identity")
