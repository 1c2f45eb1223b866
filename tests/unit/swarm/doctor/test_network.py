"""Troubles of the network around a machine, each planted by a probe: links, names, proxies, IPv6, firewalls, ports."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from swarm.doctor import network, probes
from swarm.doctor.ladder import Diagnoses, Diagnosis, Level
from swarm.doctor.network import (
    NamedPeer,
    Outside,
    look_at_addresses,
    look_at_ipv6,
    look_at_link,
    look_at_names,
    look_at_outgoing,
    look_at_packets,
    look_at_proxy,
    look_at_route,
    look_for_portal,
)
from swarm.doctor.probes import LookedUp, Page, Ran, Resolve, TcpAnswer, is_address, name_servers, own_addresses
from swarm.doctor.way_in import UFW_SWITCH, Firewall, look_at_ports
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, assert_unknown, named, ready

NEAR: Final = NamedPeer("/ip4/127.0.0.1/tcp/1/p2p/Qm", "--join", "127.0.0.1", 1)
LAN: Final = NamedPeer("/ip4/192.168.1.9/tcp/1/p2p/Qm", "--join", "192.168.1.9", 1)


async def test_a_machine_without_a_network_is_in_trouble_unless_its_swarm_is_on_it() -> None:
    down = {"eth0": False, "wlan0": False}
    await assert_trouble(look_at_link(down, [LAN]), "link-down", "no network interface is up (eth0, wlan0)", "cable")
    await assert_trouble(look_at_link({}, []), "no-link", "no network interface", "ip link")
    await assert_ok(look_at_link({"eth0": False, "wlan0": True}, []), "link")
    await assert_ok(look_at_link(down, [NEAR]), "link-not-needed")
    local = ("127.0.0.1", "::1", "fe80::1", "169.254.3.4")
    await assert_trouble(look_at_addresses(local, []), "no-address", "gave it none", "restart the router")
    await assert_ok(look_at_addresses(local, [NEAR]), "addresses-not-needed")
    await assert_ok(look_at_addresses(("192.168.1.7", "2600::7"), []), "addresses")
    await assert_trouble(look_at_route(lambda _: False, [LAN]), "no-route", "no default route", "ip route")
    await assert_ok(look_at_route(lambda ip: ip == LAN.host, [LAN]), "route-near")
    await assert_ok(look_at_route(lambda _: True, []), "route")


NOBODY: Final = named()
UNKNOWN: Final = ready(LookedUp(is_unknown=True))
HUB: Final = {"the hub": "huggingface.co"}
HOSTS: Final = {"--join (1 of 2)": "boot.example", "--join (2 of 2)": "192.0.2.7"}


def names(find: Resolve, *servers: float | None, needed: Mapping[str, str] = HOSTS) -> Awaitable[Diagnoses]:
    return look_at_names(needed, HUB, find, ready(servers))


async def test_names_that_are_not_found() -> None:
    lost = "no name is found (the hub, --join (1 of 2)): no name server"
    await assert_trouble(names(NOBODY, None), "no-dns", f"{lost} answers", "/etc/resolv.conf")
    await assert_trouble(names(NOBODY), "no-dns", f"{lost} is set", "/etc/resolv.conf")
    await assert_trouble(names(UNKNOWN, 0.1), "no-dns", "of its own network at most", "/etc/resolv.conf")

    async def only_the_hub(host: str) -> LookedUp:
        return LookedUp(("192.0.2.1",)) if host == probes.HUB else LookedUp(is_unknown=True)

    await assert_trouble(names(only_the_hub, 0.1), "name-unknown", "--join (1 of 2): its name", "how the name is")
    await assert_unknown(names(NOBODY, 0.1, None), "though a name server answers")
    await assert_ok(names(named("192.0.2.1"), 0.1), "names")
    await assert_ok(look_at_names(HOSTS | {"--join (1 of 2)": "[2001:db8::1]"}, {}, NOBODY, ready(())), "no-names")


async def test_names_that_are_found_late() -> None:
    slow = ready(LookedUp(("192.0.2.1",), 6.2))
    await assert_trouble(names(slow, 6.1), "dns-slow", "takes 6.1 s", "another server")
    await assert_ok(names(slow, 0.1), "names")  # this machine is late, and not its name server
    await assert_ok(names(ready(LookedUp(("192.0.2.1",), 0.2)), 6.1), "names")


async def test_names_that_are_not_needed() -> None:
    await assert_hint(names(NOBODY, None, needed={}), "no-dns", "no name is found", "resolvectl status")


def test_name_servers_are_read_from_the_systems_file(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    assert name_servers(file) == []
    file.write_text("# nameserver 192.0.2.9\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\nnameserver\nnameserver x\n")
    assert name_servers(file) == ["192.0.2.1", "fe80::1%eth0"]


async def test_a_page_that_stands_before_the_internet() -> None:
    login = Page(302, "http://login.hotel.example/")
    for page in (login, Page(200), Page(511)):
        await assert_trouble(look_for_portal(Outside(page=page)), "portal", "wants a login", "browser")
    await assert_hint(
        look_for_portal(Outside((TcpAnswer.PEER,), page=login)), "page-replaced", "links are not", "ask who"
    )
    intercepted = Outside((TcpAnswer.OPEN,), page=login)
    await assert_trouble(look_for_portal(intercepted), "portal", "wants a login", "browser")
    for page in (Page(301, "https://huggingface.co/"), Page(307, "https://www.huggingface.co/x"), Page(403), Page(502)):
        await assert_ok(look_for_portal(Outside(page=page)), "no-portal")
    await assert_ok(look_for_portal(Outside()), "portal-untried")


def proxy(outside: Outside = Outside((TcpAnswer.PEER,)), *, has_socks: bool = False, **environment: str) -> Diagnosis:  # noqa: B008
    return look_at_proxy(environment, outside, has_socks=has_socks)


async def test_proxy_variables() -> None:
    text = "links between machines do not"
    await assert_hint(proxy(https_proxy="http://proxy:3128"), "proxy", text, "unset https_proxy")
    await assert_hint(proxy(HTTP_PROXY="proxy:3128", no_proxy="x"), "proxy", text, "unset http_proxy")
    socks = proxy(ALL_PROXY="socks5://127.0.0.1:1080")
    await assert_hint(socks, "proxy-socks", "all_proxy names a SOCKS proxy", "pip install socksio")
    await assert_hint(proxy(has_socks=True, ALL_PROXY="socks5://127.0.0.1:1080"), "proxy", text, "unset all_proxy")
    odd = proxy(https_proxy="ftp://proxy")
    await assert_hint(odd, "proxy-malformed", "https_proxy begins with ftp://", "export https_proxy=http://HOST:PORT")
    await assert_ok(proxy(no_proxy="localhost", http_proxy=""), "no-proxy")


async def test_a_proxy_that_is_the_only_way_out() -> None:
    alone = Outside((TcpAnswer.SILENT,), hub=TcpAnswer.NO_WAY, proxied=Page(200))
    await assert_trouble(
        proxy(alone, https_proxy="http://proxy:3128"), "proxy-only", "by its proxy", "CANOPY_PROXY=http"
    )
    beside = Outside((TcpAnswer.SILENT,), hub=TcpAnswer.OPEN, proxied=Page(200))
    await assert_hint(proxy(beside, https_proxy="http://proxy:3128"), "proxy", "links", "unset https_proxy")


async def test_a_proxy_that_was_set_for_canopy() -> None:
    def own(*peers: TcpAnswer, status: int | None = None, url: str = "http://proxy:3128") -> Diagnosis:
        return proxy(Outside(peers, proxied=None if status is None else Page(status)), CANOPY_PROXY=url)

    await assert_ok(own(TcpAnswer.PEER), "own-proxy")
    await assert_ok(own(TcpAnswer.NO_WAY, status=200), "own-proxy")
    await assert_trouble(own(TcpAnswer.NO_WAY), "own-proxy-closed", "does not answer", "unset CANOPY_PROXY")
    await assert_trouble(own(status=403), "own-proxy-closed", "refuses (HTTP 403)", "unset CANOPY_PROXY")
    await assert_trouble(own(status=407), "proxy-login", "CANOPY_PROXY wants a login", "USER:PASSWORD")
    await assert_trouble(own(url="socks5://x"), "own-proxy-malformed", "names no HTTP proxy", "http://HOST:PORT")


async def test_ports_that_this_network_closes() -> None:
    def outgoing(*peers: TcpAnswer, beside: TcpAnswer | None = None, hub: TcpAnswer | None = None) -> Diagnosis:
        return look_at_outgoing([LAN], Outside(peers, beside, hub))

    text = "TCP goes out to port 443 and not to 1"
    await assert_trouble(outgoing(TcpAnswer.SILENT, beside=TcpAnswer.REFUSED), "ports-closed", text, "TLS port")
    silent = outgoing(TcpAnswer.SILENT, beside=TcpAnswer.SILENT, hub=TcpAnswer.SILENT)
    await assert_trouble(silent, "no-answer", "neither the swarm's peers nor the hub", "restart the router")
    await assert_ok(outgoing(TcpAnswer.SILENT, beside=TcpAnswer.SILENT, hub=TcpAnswer.OPEN), "outgoing-web")
    await assert_ok(outgoing(TcpAnswer.SILENT, TcpAnswer.REFUSED), "outgoing")
    await assert_unknown(outgoing(TcpAnswer.SILENT), "few could be asked")
    await assert_unknown(outgoing(hub=TcpAnswer.SILENT), "few could be asked")


async def test_packets_that_are_lost_for_their_size() -> None:
    def packets(largest: int | None, peers: Sequence[tuple[str, int]] = (("192.0.2.1", 1),)) -> Awaitable[Diagnosis]:
        async def takes(ip: str, port: int, segment: int | None) -> bool | None:
            return None if largest is None else (segment or 1_460) <= largest

        return look_at_packets(peers, takes, lambda _: "eth0")

    await assert_ok(packets(1_460), "packets")
    await assert_trouble(packets(1_300), "black-hole", "more than 1,280 bytes are lost", "dev eth0 mtu 1280")
    await assert_trouble(packets(1_200), "black-hole", "more than 1,200 bytes are lost", "dev eth0 mtu 1200")
    await assert_unknown(packets(100), "small ones neither")
    await assert_ok(packets(None), "packets-untried")
    await assert_ok(packets(1_460, ()), "packets-untried")


PUBLIC, HOME = "2001:4860:4860::7", "192.168.1.7"


@pytest.fixture
def ipv6(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Diagnosis]]:
    """A look at IPv6 where these addresses answer so."""

    def look(
        answers: Mapping[str, bool],
        own: Sequence[str] = (PUBLIC, HOME),
        *,
        has_way: bool = True,
        hosts: str = "a.example",
    ) -> Awaitable[Diagnosis]:
        async def knock(ip: str, port: int) -> TcpAnswer:
            assert port == 443
            return TcpAnswer.OPEN if answers[ip] else TcpAnswer.SILENT

        monkeypatch.setattr(network, "knock", knock)
        return look_at_ipv6(own, lambda _: has_way, [(hosts, 443)] if hosts else [], named(*answers))

    return look


async def test_ipv6_that_leads_nowhere(ipv6: Callable[..., Awaitable[Diagnosis]]) -> None:
    hole = ipv6({"2600::1": False, "192.0.2.1": True})
    await assert_hint(hole, "ipv6-black-hole", "a black hole", "disable_ipv6=1")
    await assert_hint(ipv6({}, has_way=False), "ipv6-no-route", "no way out", "ip -6 route")
    await assert_unknown(ipv6({"2600::1": False, "192.0.2.1": False}), "nor by IPv4")


async def test_ipv6_that_works_or_is_not_there(ipv6: Callable[..., Awaitable[Diagnosis]]) -> None:
    await assert_ok(ipv6({"2600::1": False, "2600::2": True}), "ipv6")
    await assert_ok(ipv6({}, (HOME, "fe80::1", "fd00::1")), "no-ipv6")
    await assert_ok(ipv6({}, hosts=""), "ipv6-untried")


def test_own_addresses_are_addresses() -> None:
    assert "127.0.0.1" in own_addresses()
    assert all(map(is_address, own_addresses()))


def programs(**outputs: str | None) -> Callable[[Sequence[str]], Awaitable[Ran | None]]:
    """Programs by name with what they print; None fails, and what is not named is not there."""

    async def run(command: Sequence[str]) -> Ran | None:
        name = command[0].replace("-", "_")
        if name not in outputs:
            return None
        output = outputs[name]
        return Ran(1, "only root") if output is None else Ran(0, output if command[-1] != "--state" else "running")

    return run


def unread(_: Path) -> str | None:
    return None


def ufw(path: Path) -> str | None:
    return "# on\nENABLED=yes\nLOGLEVEL=low\n" if path == UFW_SWITCH else None


UFW_STATUS = "Status: active\n\nTo      Action  From\n--      ------  ----\n22/tcp  ALLOW   Anywhere\n"
NFT = """table inet filter {
\tchain input {
\t\ttype filter hook input priority filter; policy drop;
\t\tct state established accept
\t\ttcp dport { 22, 31338 } accept
\t}

\tchain forward {
\t\ttype filter hook forward priority filter; policy drop;
\t}
}"""


async def test_a_firewall_that_lets_nobody_in() -> None:
    closed = "lets nobody in on 31339"
    check = Firewall((31_339,), programs(ufw=UFW_STATUS), ufw).look()
    await assert_hint(check, "firewall-closed", f"ufw {closed}", "sudo ufw allow 31339/tcp")
    check = Firewall((31_339,), programs(firewall_cmd="no"), unread).look()
    await assert_hint(check, "firewall-closed", f"firewalld {closed}", "firewall-cmd --permanent --add-port=31339/tcp")
    check = Firewall((31_338, 31_339), programs(nft=NFT), unread).look()
    mend = "sudo nft insert rule inet filter input tcp dport 31339 accept"
    await assert_hint(check, "firewall-closed", f"nftables {closed}", mend)


async def test_a_firewall_that_cannot_be_read_or_is_not_asked_about_a_port() -> None:
    check = Firewall((31_339,), programs(ufw=None), ufw).look()
    await assert_hint(check, "firewall-unread", "only root can read its rules", "sudo ufw allow 31339/tcp")
    check = Firewall((), programs(nft=NFT), unread).look()
    await assert_hint(check, "firewall", "nftables is on", "tcp dport PORT accept")


async def test_a_firewall_that_is_open_or_not_there() -> None:
    opened = UFW_STATUS + "31339      ALLOW   Anywhere\n"
    await assert_ok(Firewall((31_339,), programs(ufw=opened), ufw).look(), "firewall-open")
    await assert_ok(Firewall((31_338,), programs(nft=NFT), unread).look(), "firewall-open")
    await assert_ok(Firewall((31_338,), programs(firewall_cmd="yes"), unread).look(), "firewall-open")
    await assert_ok(
        Firewall((1,), programs(nft=NFT.replace("policy drop", "policy accept")), unread).look(), "no-firewall"
    )
    await assert_ok(Firewall((1,), programs(nft=None), lambda _: "ENABLED=no").look(), "no-firewall")


def failing(number: int) -> Callable[[int], OSError | None]:
    return lambda _: OSError(number, os.strerror(number))


async def test_a_port_that_cannot_be_had() -> None:
    closed = look_at_ports((80,), failing(errno.EACCES), lambda _: None)
    await assert_trouble(closed, "port-closed", "may not listen on port 80", "from 1024 on")
    taken = look_at_ports((31_338,), failing(errno.EADDRINUSE), lambda _: None)
    await assert_trouble(taken, "port-taken", "taken by a program of another user", "sudo ss -ltnp 'sport = :31338'")
    none = look_at_ports((), failing(errno.EMFILE), lambda _: None)
    await assert_trouble(none, "no-port", "Too many open files", "ip address")


@pytest.mark.parametrize("ports", [(), (31_338, 31_339)])
async def test_ports_that_are_free(ports: tuple[int, ...]) -> None:
    found = look_at_ports(ports, lambda _: None, lambda _: None)
    assert isinstance(found, list)
    assert [one.level for one in found] == [Level.OK] * max(1, len(ports))
