"""Multiaddresses of this machine, as the addresses that the rest of the program knows."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import pytest

import swarm.directory.dht.addresses
from swarm.directory.dht.addresses import (
    DhtConfig,
    host_and_port,
    lacking_family,
    listen_addresses,
    names_at_fault,
)
from swarm.directory.identity import Identity


@pytest.mark.parametrize(
    ("host", "expected"),
    [("8.8.8.8", "8.8.8.8:1000"), ("2a00:1450::1", "[2a00:1450::1]:1000"), ("home.example", "home.example:1000")],
)
def test_an_announced_address_is_one_that_can_be_dialled(host: str, expected: str) -> None:
    announced = listen_addresses(DhtConfig(port=1000, announce_host=host)).announce
    assert announced is not None
    assert [host_and_port(address) for address in announced] == [expected]
    assert host_and_port(f"{announced[0]}/p2p/QmNobody") == expected


@pytest.mark.parametrize(
    ("own", "host", "listened"),
    [
        (["203.0.114.5"], "0.0.0.0", ["/ip4/0.0.0.0/tcp/7"]),
        (["203.0.114.5", "2a00:1450::1"], "0.0.0.0", ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]),
        (["2a00:1450::1"], "0.0.0.0", ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]),
        (["fd00::2"], "0.0.0.0", ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]),
        (["192.168.1.7", "2a00:1450::1"], "0.0.0.0", ["/ip4/0.0.0.0/tcp/7"]),
        (["203.0.114.5", "fd00::2"], "0.0.0.0", ["/ip4/0.0.0.0/tcp/7"]),
        (["203.0.114.5", "2a00:1450::1"], "127.0.0.1", ["/ip4/127.0.0.1/tcp/7"]),
        (["203.0.114.5", "2a00:1450::1"], "::", ["/ip6/::/tcp/7"]),
        ([], "0.0.0.0", ["/ip4/0.0.0.0/tcp/7"]),
    ],
)
def test_it_listens_to_ipv6_too_where_that_leads_here(
    own: list[str], host: str, listened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an IPv4 router it does not: a machine of a private network would count as a public one."""
    monkeypatch.setattr(
        swarm.directory.dht.addresses, "interface_addresses", lambda: tuple(ip_address(one) for one in own)
    )
    assert list(listen_addresses(DhtConfig(host=host, port=7)).host) == listened


@pytest.mark.parametrize(
    ("own", "join", "listened"),
    [
        (["192.168.1.7", "fd00::2"], "/ip6/fd00::1", ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]),
        (["192.168.1.7", "fd00::2"], "/ip4/192.168.1.1", ["/ip4/0.0.0.0/tcp/7"]),
        (["192.168.1.7"], "/ip6/fd00::1", ["/ip4/0.0.0.0/tcp/7"]),
    ],
)
def test_who_knows_a_peer_by_ipv6_listens_to_it_too(
    own: list[str], join: str, listened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        swarm.directory.dht.addresses, "interface_addresses", lambda: tuple(ip_address(one) for one in own)
    )
    peer = f"{join}/tcp/1/p2p/{Identity.ephemeral().peer_id}"
    assert list(listen_addresses(DhtConfig(join=(peer,), port=7)).host) == listened


def test_who_lacks_the_peers_only_family_is_told() -> None:
    v4, v6, name = (f"/{host}/tcp/1/p2p/x" for host in ("ip4/203.0.113.1", "ip6/2001:db8::1", "dns/a.example"))
    own = [ip_address("2001:db8::7")]
    assert "this machine has no IPv4 address" in lacking_family([v4, v4], own)
    assert "ask for one by IPv6" in lacking_family([v4], own)
    for join, here in (([v4, v6], own), ([v6], own), ([name], own), ([v4, name], own), ([v4], [])):
        assert lacking_family(join, here) == ""


async def test_a_slow_name_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, object] = {"good.example": [], "gone.example": OSError(-2, "Name or service not known")}

    async def look_up(name: str, *_: object, **__: object) -> object:
        found = answers.get(name)
        if found is None:
            await asyncio.Event().wait()
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up, raising=False)
    join = [f"/dns4/{name}/tcp/1/p2p/x" for name in ("good.example", "gone.example", "slow.example")]
    assert await names_at_fault([*join, "/ip4/127.0.0.1/tcp/1/p2p/x"], limit_s=0.1) == (
        "; the name gone.example cannot be looked up: Name or service not known"
        "; the name server did not say where slow.example is within 0 s"
    )
