"""Takes out of a text what others should not read, so that it can be pasted into a public issue. Pure.

What goes: names of the user and of machines, the home folder, addresses, peer ids, tokens, keys, passwords, invites.
What stays: ports, loopback addresses, and of a private address its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import unquote, urlsplit

from swarm.base.quota import parse_ip

PUBLIC_HOSTS: Final = ("huggingface.co", "hf.co", "download.pytorch.org", "github.com", "pypi.org", "nvidia.com")
"""Hosts that everybody knows; they and their subdomains stay."""
COMMON_NAMES: Final = frozenset(
    {"admin", "canopy", "debian", "host", "localhost", "node", "pi", "root", "swarm", "ubuntu", "user"}
)
"""Names of users and machines that say nothing about anybody, and that stand in commands."""
SECRET_VARIABLES: Final = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""Environment variables whose values nobody may see."""
MIN_SECRET: Final = 4
"""Characters; a shorter value would be found everywhere."""


@dataclass(frozen=True, slots=True)
class PrivateWords:
    """What is private on this machine.

    Attributes:
        home: the user's home folder; empty if unknown.
        names: of the user, of this machine and of the machines that options name.
        secrets: tokens and passwords.
    """

    home: str = ""
    names: frozenset[str] = frozenset()
    secrets: frozenset[str] = frozenset()


def private_words(
    environment: Mapping[str, str], home: str, names: Iterable[str], hosts: Iterable[str]
) -> PrivateWords:
    secrets = {value for name, value in environment.items() if SECRET_VARIABLES.search(name)}
    proxies = [value for name, value in environment.items() if name.lower().endswith("_proxy")]
    own = [name for name in names if not _is_address(name)]
    found = {*own, *(name.partition(".")[0] for name in own)}
    for url in (*hosts, *proxies):
        user, password, host = _parts(url)
        secrets |= {password, unquote(password)}
        found |= {host, user, unquote(user)}
    kept = {name for name in found if len(name) > 1 and not _is_known(name)}
    return PrivateWords(home.rstrip("/"), frozenset(kept), frozenset(one for one in secrets if len(one) >= MIN_SECRET))


def redact(text: str, private: PrivateWords) -> str:
    """The text without what is private; done twice it changes nothing more."""
    if private.home:
        text = re.sub(rf"(?<![\w.]){re.escape(private.home)}(?![\w.-])", "~", text)
    for secret in sorted(private.secrets, key=len, reverse=True):
        text = text.replace(secret, "<secret>")
    text = _INVITE.sub("canopy://…", text)
    text = _USERINFO.sub("://", text)
    text = _TOKEN.sub("<token>", text)
    text = _NAMED.sub(r"\1<secret>", text)
    text = _PEER.sub("Qm…", text)
    text = _AUTHORITY.sub(_known_host, text)
    text = _DNS_PART.sub(r"\1<host>", text)
    text = _HOST_PORT.sub(_known_host, text)
    text = _HOMES.sub(r"\1<user>", text)
    text = _MAC.sub("<mac>", text)
    text = _IPV6.sub(_kind_of_address, text)
    text = _IPV4.sub(_kind_of_address, text)
    for name in sorted(private.names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w<]){re.escape(name)}(?![\w>])", "<name>", text, flags=re.IGNORECASE)
    return text


_INVITE = re.compile(r"canopy://(?!…)\S+", re.IGNORECASE)
_USERINFO = re.compile(r"://(?!USER:PASSWORD@HOST)\S*@")
_TOKEN = re.compile(
    r"\b(?:(?:hf|api_org|sk|pk|rk|gh[a-z]|github_pat|glpat|gsk|xai|pypi|npm|dop_v1|xox[a-z])[-_][A-Za-z0-9_-]{6,}"
    r"|AKIA[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{20,}|eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*)"
)
"""Keys as services mark them by how they begin: hubs, model services, forges, clouds; and signed tokens (JWT)."""
_NAME = r"[\w-]*(?:password|passwd|passphrase|token|secret|api[-_]?key|access[-_]?key|credentials?|authorization)"
_SCHEME = r"(?:bearer|basic|token)\s+"
_NAMED = re.compile(
    rf"(?i)((?<![\w-])(?:--{_NAME}[\s=]\s*|{_NAME}[\"']?\s*[=:]\s*|bearer\s+|basic\s+(?=(?-i:\S*[\d=]|\S*[a-z]\S*[A-Z])))(?:{_SCHEME})?)"
    rf"(?![\"']?(?:<secret>|<token>|…|PASSWORD\b|FILE\b|{_SCHEME}))(?:\"[^\"]*\"|'[^']*'|[^\s,;\"']+)"
)
"""A secret behind its name: an option, a variable, a header, a field of JSON."""
_PEER = re.compile(r"\b(Qm[1-9A-HJ-NP-Za-km-z]{44}|1[26][1-9A-HJ-NP-Za-km-z]{50,51})\b")
_AUTHORITY = re.compile(r"(?<=://)(?!USER:PASSWORD@HOST)(?P<host>\[[^\s\]]*\]|[^\s/:?#\[\]<>…]+)")
_DNS_PART = re.compile(r"(/dns(?:4|6|addr)?/)(?!<host>)[^/\s]+")
_HOST_PORT = re.compile(r"(?<![\w.-])(?P<host>(?:[A-Za-z0-9_-]+\.)+[A-Za-z]{2,})(?=:\d)")
_HOMES = re.compile(r"(/home/|/Users/)(?!<user>)[^/\s'\"]+")
_MAC = re.compile(r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:])")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*?(?<=:)\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*)(?:%[\w.-]+)?"
)
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d\.\d)")
_CARRIER = ip_network("100.64.0.0/10")
_LANS = (ip_network("10.0.0.0/8"), ip_network("172.16.0.0/12"), ip_network("192.168.0.0/16"))
_LAN_SHOWN = ("10.x.x.x", "172.16.x.x", "192.168.x.x")


def _parts(url: str) -> tuple[str, str, str]:
    """User, password and host, each empty if there is none or the URL is malformed."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        return parts.username or "", parts.password or "", parts.hostname or ""
    except ValueError:
        return "", "", ""


def _is_known(host: str) -> bool:
    """Whether a name says nothing about anybody: everybody's, or a placeholder."""
    name = host.lower()
    return name in COMMON_NAMES or any(name == known or name.endswith(f".{known}") for known in PUBLIC_HOSTS)


def _is_address(host: str) -> bool:
    return parse_ip(host.strip("[]")) is not None


def _known_host(match: re.Match[str]) -> str:
    host = match["host"]
    if _is_known(host) or _is_address(host):
        return host  # addresses are told apart later
    return "<host>"


def _kind_of_address(match: re.Match[str]) -> str:
    found = match[0]
    address = found.rstrip(":") if found.endswith(":") and not found.endswith("::") else found
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return found
    return _shown(ip) + found[len(address) :]


def _shown(ip: IPv4Address | IPv6Address) -> str:
    if ip.is_loopback or ip.is_unspecified:
        return str(ip)
    if isinstance(ip, IPv4Address):
        if ip in _CARRIER:
            return "100.64.x.x"
        lan = next((shown for net, shown in zip(_LANS, _LAN_SHOWN, strict=True) if ip in net), None)
        return lan or ("169.254.x.x" if ip.is_link_local else "<address>")
    if ip.is_link_local:
        return "<link-local address>"
    return "<private address>" if ip.is_private and ip.ipv4_mapped is None else "<address>"
