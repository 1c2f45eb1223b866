"""What a home's router is made of: its addresses, its translation, its firewall, its port mapping. Pure: text alone.

The kernel translates (nftables). A cone router keeps the port of the machine inside where it can, as bought ones do; a
symmetric one draws a port for each connection. Both let in only what belongs to a connection that was opened from
inside, or what was mapped. miniupnpd maps: it speaks PCP, NAT-PMP and UPnP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LAN_IPV4: Final = "192.168.1"
"""Of every home, as in real ones: the same address is another machine next door."""
CARRIER_IPV4: Final = "100.64.0"
"""Between a carrier's router and the home's."""
ROUTER, FIRST_MACHINE = 1, 10
"""Last numbers of addresses in a LAN."""
LAN_DEVICE, MACHINE_DEVICE, BEHIND_CARRIER, PUBLIC_DEVICE = "lan", "eth0", "wan0", "tun0"
IGD_PORT: Final = 5_000
"""Where miniupnpd listens for UPnP."""


class RouterKind(StrEnum):
    """How a home reaches the Internet."""

    OPEN = "open"
    """No router: the machine has a public address."""
    CONE = "cone"
    """Keeps ports."""
    SYMMETRIC = "symmetric"
    """A port of its own for every connection."""


class UnaskedTraffic(StrEnum):
    """What a router does with what comes from outside unasked."""

    DROP = "drop"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class RouterSetup:
    """One router.

    Attributes:
        unasked: what it does with unasked traffic.
    """

    kind: RouterKind
    unasked: UnaskedTraffic
    outside: str
    inside: str


def firewall(router: RouterSetup) -> str:
    """The rules of a router, for `nft -f`."""
    random = " fully-random" if router.kind is RouterKind.SYMMETRIC else ""
    return f"""
table ip translation {{
 chain outgoing {{
  type nat hook postrouting priority srcnat
  oifname "{router.outside}" masquerade{random}
 }}
}}
table inet guard {{
 chain own {{
  type filter hook input priority filter
  iifname "{router.outside}" ct state established,related accept
  iifname "{router.outside}" {router.unasked}
 }}
 chain passing {{
  type filter hook forward priority filter
  ct state invalid drop
  iifname "{router.outside}" ct state established,related accept
  iifname "{router.outside}" ct status dnat accept
  iifname "{router.outside}" {router.unasked}
 }}
}}
"""


MAPPING_TABLE: Final = """
table inet miniupnpd {
 chain mapped {
 }
 chain translated {
 }
 chain answered {
 }
 chain forward {
  type filter hook forward priority filter
  jump mapped
 }
 chain prerouting {
  type nat hook prerouting priority dstnat
  jump translated
 }
 chain postrouting {
  type nat hook postrouting priority srcnat
  jump answered
 }
}
"""
"""Where miniupnpd puts its rules."""
FORGET_MAPPINGS: Final = "\n".join(
    f"flush chain inet miniupnpd {chain}" for chain in ("mapped", "translated", "answered")
)


FORGET_CONNECTIONS: Final = ("sysctl -qw net.netfilter.nf_conntrack_tcp_loose=0", "conntrack -F")
"""The commands after which a router carries nothing of a connection whose beginning it has not seen since."""


def mapping_settings(router: RouterSetup, external: str | None) -> str:
    """The configuration file of miniupnpd.

    Args:
        external: the address that it tells; None: that of its device. It maps nothing under a private address.
    """
    lines = [
        f"ext_ifname={router.outside}",
        f"listening_ip={router.inside}",
        f"port={IGD_PORT}",
        "enable_natpmp=yes",
        "enable_upnp=yes",
        "secure_mode=yes",
        "upnp_table_name=miniupnpd",
        "upnp_nat_table_name=miniupnpd",
        "upnp_forward_chain=mapped",
        "upnp_nat_chain=translated",
        "upnp_nat_postrouting_chain=answered",
        "uuid=9b6d2ab3-5b0e-4a2b-9d1c-2f6f6a0f1a11",
        "serial=1",
        "model_number=1",
        "allow 1024-65535 0.0.0.0/0 1024-65535",
    ]
    if external is not None:
        lines.append(f"ext_ip={external}")
    return "\n".join(lines) + "\n"


def wire(here: str, there: str, namespace: str) -> str:
    """A cable from a device of this namespace to one of another.

    Args:
        here: the new device on this end.
        there: the new device on the other end.
        namespace: path of the other one's namespace.
    """
    return f"ip link add {here} type veth peer name {there} netns {namespace}"


def lan(router: RouterSetup, cables: list[str]) -> list[str]:
    """The commands that make a router's LAN.

    Args:
        cables: devices of this namespace that lead to the machines.
    """
    bridge = router.inside
    return [
        f"ip link add {bridge} type bridge mcast_snooping 0",
        f"ip address add {LAN_IPV4}.{ROUTER}/24 dev {bridge}",
        f"ip link set {bridge} up",
        *(f"ip link set {cable} master {bridge} up" for cable in cables),
    ]


FORWARDING: Final = ("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",)
"""The commands that make a namespace a router."""


def confinement(hosts: Iterable[Sequence[str]], port: int) -> str:
    """The rules of a router that passes out TCP to one port of some hosts alone.

    Args:
        hosts: of each its IPv4 address, and its IPv6 address if it has one.
    """
    found = list(hosts)
    passed = [f"ip daddr {host[0]} tcp dport {port} accept" for host in found]
    passed += [f"ip6 daddr {host[1]} tcp dport {port} accept" for host in found if len(host) > 1]
    lines = "".join(f"  {line}\n" for line in [*passed, "meta l4proto ipv6-icmp accept"])
    chain = f"  type filter hook forward priority -5\n  ct state established,related accept\n{lines}  drop\n"
    return f"table inet confinement {{\n chain passing {{\n{chain} }}\n}}\n"


def black_hole(mtu: int) -> str:
    """The rules of a router that drops longer packets without a word (a path MTU black hole)."""
    return f"""
table inet narrow {{
 chain passing {{
  type filter hook forward priority -20
  meta length > {mtu} drop
 }}
}}
"""
