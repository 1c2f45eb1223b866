"""What a machine says of its swarm in the local network, and what it takes of what others say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import SwarmId
from swarm.directory.joining import lan
from swarm.directory.joining.lan import LanSwarm, announced, keep_announced, private_addresses, read_txt, txt_of
from tests.lan_swarms import PEERS, address_of, as_bytes


def test_an_announcement_is_read_as_it_was_written() -> None:
    id_ = SwarmId(bytes(range(16)))
    swarm = LanSwarm((address_of(0), address_of(1)), "owner/model", "0123456789ab", is_private=True, swarm=id_)
    assert read_txt(as_bytes(txt_of(swarm))) == swarm
    bare = LanSwarm((address_of(0),))
    assert read_txt(as_bytes(txt_of(bare))) == bare
    assert (bare.host, bare.peer) == ("192.168.1.7", PEERS[0])


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({b"format": b"2"}, "format"),
        ({b"format": None}, "format"),
        ({b"join0": b"/ip4/192.168.1.7/tcp/1"}, "join"),
        ({b"join0": b"/ip4/192.168.1.7/tcp/0/p2p/" + PEERS[0].encode()}, "join"),
        ({b"join0": b"x" * 201}, "join0"),
        ({b"join0": None}, "join0"),
        ({b"model": b"../../etc"}, "model"),
        ({b"model": b"evil\x1b[2J"}, "model"),
        ({b"model": b"--join=/ip4/6.6.6.6"}, "model"),
        ({b"model": "mödel".encode()}, "model"),
        ({b"model": b"m" * 97}, "model"),
        ({b"fingerprint": b"0123456789AB"}, "fingerprint"),
        ({b"fingerprint": b""}, "fingerprint"),
    ],
)
def test_what_is_malformed_is_refused_by_name(changed: dict[bytes, bytes | None], field: str) -> None:
    txt = as_bytes(txt_of(LanSwarm((address_of(0),), "demo", "0123456789ab"))) | changed
    with pytest.raises(RemoteProtocolError) as refused:
        read_txt(txt)
    assert refused.value.field == field


def test_keys_of_a_later_release_are_read_past() -> None:
    swarm = LanSwarm((address_of(0),), "demo", "0123456789ab")
    assert read_txt(as_bytes(txt_of(swarm)) | {b"colour": b"\xff" * 250, b"join9": b"?"}) == swarm


def test_what_could_not_be_dialled_from_elsewhere_is_not_announced() -> None:
    loopback = f"/ip4/127.0.0.1/tcp/1/p2p/{PEERS[0]}"
    assert announced([loopback], []) is None
    assert announced([], []) is None
    found = announced([loopback, address_of(0)], [address_of(1)], ("demo", "ab" * 32))
    assert found == LanSwarm((address_of(0), address_of(1)), "demo", "abababababab")


def test_a_machine_with_a_public_address_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def cards(*addresses: str) -> dict[str, list[SimpleNamespace]]:
        return {"card": [SimpleNamespace(family=socket.AF_INET, address=one) for one in addresses]}

    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"card": SimpleNamespace(isup=True)})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards("127.0.0.1", "192.168.1.7"))
    assert private_addresses() == ["192.168.1.7"]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards("127.0.0.1", "192.168.1.7", "93.184.216.34"))
    assert private_addresses() == []


async def test_an_announcement_moves_with_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []
    waits = 0
    networks = [["192.168.1.7"], ["10.0.0.7"], [], ["10.0.0.8"]]

    @asynccontextmanager
    async def announcing(_: LanSwarm, addresses: list[str]) -> AsyncIterator[None]:
        said.append(addresses)
        if addresses == ["10.0.0.7"]:
            raise OSError("the network is unreachable")
        yield

    async def wait(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr(lan, "_announcing", announcing)
    with pytest.raises(asyncio.CancelledError):
        await keep_announced(LanSwarm((address_of(0),)), lambda: networks[waits // 2], wait)
    assert said == [["192.168.1.7"], ["10.0.0.7"], ["10.0.0.7"], [], ["10.0.0.8"]]
