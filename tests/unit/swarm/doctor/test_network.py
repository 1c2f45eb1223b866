"""Troubles of the network around a machine, each planted by a probe: names, proxies, IPv6, firewalls, ports."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from swarm.doctor.diagnosis import Diagnosis, Level
from swarm.doctor.network import DnsCheck, Ipv6Check, ProxyCheck, is_address, own_addresses
from swarm.doctor.ports import UFW_SWITCH, FirewallCheck, PortCheck
from swarm.doctor.processes import Ran
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, ready

NOBODY = ready(())


def finding(*known: str) -> Callable[[str], Awaitable[Sequence[str]]]:
    async def find(host: str) -> Sequence[str]:
        return ("192.0.2.1",) if host in known else ()

    return find


HOSTS = {"--join 1": "boot.example", "--join 2": "192.0.2.7", "the hub": "huggingface.co"}


async def test_names_that_are_not_found() -> None:
    await assert_trouble(DnsCheck(HOSTS, NOBODY), "no-dns", "no name is found (--join 1, the hub)", "/etc/resolv.conf")
    check = DnsCheck(HOSTS, finding("huggingface.co"))
    await assert_trouble(
        check, "name-unknown", "the name of --join 1 is not found", "how the name of --join 1 is written"
    )
    await assert_ok(DnsCheck(HOSTS, finding("huggingface.co", "boot.example")), "names")
    await assert_ok(DnsCheck({"--join 1": "192.0.2.7", "--join 2": "[2001:db8::1]"}, NOBODY), "no-names")


async def test_names_that_are_not_needed() -> None:
    check = DnsCheck({"the hub": "huggingface.co"}, NOBODY, frozenset({"the hub"}))
    await assert_hint(check, "no-dns", "no name is found", "resolvectl status")


def proxy(has_socks: bool = False, **environment: str) -> ProxyCheck:
    return ProxyCheck(environment, has_socks)


async def test_proxy_variables() -> None:
    text = "links between machines never do"
    await assert_hint(proxy(https_proxy="http://proxy:3128"), "proxy", text, "unset https_proxy")
    await assert_hint(proxy(HTTP_PROXY="proxy:3128", no_proxy="x"), "proxy", text, "unset http_proxy")
    socks = proxy(ALL_PROXY="socks5://127.0.0.1:1080")
    await assert_trouble(socks, "proxy-socks", "all_proxy names a SOCKS proxy", "pip install socksio")
    await assert_hint(proxy(True, ALL_PROXY="socks5://127.0.0.1:1080"), "proxy", text, "unset all_proxy")
    odd = proxy(https_proxy="ftp://proxy")
    await assert_trouble(
        odd, "proxy-malformed", "https_proxy begins with ftp://", "export https_proxy=http://HOST:PORT"
    )
    await assert_ok(proxy(no_proxy="localhost", http_proxy=""), "no-proxy")


PUBLIC, LAN = "2001:4860:4860::7", "192.168.1.7"


def ipv6(
    answers: Mapping[str, bool],
    own: Sequence[str] = (PUBLIC, LAN),
    *,
    has_route: bool = True,
    hosts: str = "hub.example",
) -> Ipv6Check:
    async def connect(ip: str, port: int) -> bool:
        assert port == 443
        return answers[ip]

    return Ipv6Check(lambda: own, lambda: has_route, [(hosts, 443)] if hosts else [], ready(tuple(answers)), connect)


async def test_ipv6_that_leads_nowhere() -> None:
    hole = ipv6({"2600::1": False, "192.0.2.1": True})
    await assert_hint(hole, "ipv6-black-hole", "a black hole", "disable_ipv6=1")
    await assert_hint(ipv6({}, has_route=False), "ipv6-no-route", "no way out", "ip -6 route")
    await assert_hint(ipv6({"2600::1": False, "192.0.2.1": False}), "ipv6-silent", "nor by IPv4", "the network first")


async def test_ipv6_that_works_or_is_not_there() -> None:
    await assert_ok(ipv6({"2600::1": False, "2600::2": True}), "ipv6")
    await assert_ok(ipv6({}, (LAN, "fe80::1", "fd00::1")), "no-ipv6")
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
    check = FirewallCheck((31_339,), programs(ufw=UFW_STATUS), ufw)
    await assert_hint(check, "firewall-closed", f"ufw {closed}", "sudo ufw allow 31339/tcp")
    check = FirewallCheck((31_339,), programs(firewall_cmd="no"), unread)
    await assert_hint(check, "firewall-closed", f"firewalld {closed}", "firewall-cmd --permanent --add-port=31339/tcp")
    check = FirewallCheck((31_338, 31_339), programs(nft=NFT), unread)
    mend = "sudo nft insert rule inet filter input tcp dport 31339 accept"
    await assert_hint(check, "firewall-closed", f"nftables {closed}", mend)


async def test_a_firewall_that_cannot_be_read_or_is_not_asked_about_a_port() -> None:
    check = FirewallCheck((31_339,), programs(ufw=None), ufw)
    await assert_hint(check, "firewall-unread", "only root can read its rules", "sudo ufw allow 31339/tcp")
    check = FirewallCheck((), programs(nft=NFT), unread)
    await assert_hint(check, "firewall", "nftables is on", "tcp dport PORT accept")


async def test_a_firewall_that_is_open_or_not_there() -> None:
    opened = UFW_STATUS + "31339      ALLOW   Anywhere\n"
    await assert_ok(FirewallCheck((31_339,), programs(ufw=opened), ufw), "firewall-open")
    await assert_ok(FirewallCheck((31_338,), programs(nft=NFT), unread), "firewall-open")
    await assert_ok(FirewallCheck((31_338,), programs(firewall_cmd="yes"), unread), "firewall-open")
    await assert_ok(
        FirewallCheck((1,), programs(nft=NFT.replace("policy drop", "policy accept")), unread), "no-firewall"
    )
    await assert_ok(FirewallCheck((1,), programs(nft=None), lambda _: "ENABLED=no"), "no-firewall")


def failing(number: int) -> Callable[[int], OSError | None]:
    return lambda _: OSError(number, os.strerror(number))


async def test_a_port_that_cannot_be_had() -> None:
    closed = PortCheck((80,), failing(errno.EACCES), lambda _: None)
    await assert_trouble(closed, "port-closed", "may not listen on port 80", "from 1024 on")
    taken = PortCheck((31_338,), failing(errno.EADDRINUSE), lambda _: None)
    await assert_trouble(taken, "port-taken", "taken by a program of another user", "sudo ss -ltnp 'sport = :31338'")
    none = PortCheck((), failing(errno.EMFILE), lambda _: None)
    await assert_trouble(none, "no-port", "Too many open files", "ip address")


@pytest.mark.parametrize("ports", [(), (31_338, 31_339)])
async def test_ports_that_are_free(ports: tuple[int, ...]) -> None:
    found: Sequence[Diagnosis] = await PortCheck(ports, lambda _: None, lambda _: None).look()
    assert [one.level for one in found] == [Level.OK] * max(1, len(ports))
