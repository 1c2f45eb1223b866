"""Which addresses a machine calls on a stranger's word."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address
from typing import Any

import pytest

import swarm.directory.dialable
from swarm.directory.dialable import DialPolicy, is_dialable, is_public

PUBLIC = ("8.8.8.8", "2a00:1450:4001:80b::200e", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1")
PRIVATE = (
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "::1", "fe80::1",
    "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1", "::ffff:127.0.0.1",
)  # fmt: skip
NO_MACHINE = ("0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "ff02::1")


@pytest.mark.parametrize("ip", PUBLIC)
def test_public_addresses_are_called(ip: str) -> None:
    assert is_public(ip_address(ip))
    assert is_dialable(ip_address(ip), own_is_public=True)
    assert is_dialable(ip_address(ip), own_is_public=False)


@pytest.mark.parametrize("ip", PRIVATE)
def test_private_ones_only_from_a_private_network(ip: str) -> None:
    assert not is_dialable(ip_address(ip), own_is_public=True)
    assert is_dialable(ip_address(ip), own_is_public=False)


@pytest.mark.parametrize("ip", NO_MACHINE)
def test_what_is_no_machine_is_never_called_from_a_public_address(ip: str) -> None:
    assert not is_dialable(ip_address(ip), own_is_public=True)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What host names resolve to."""
    known: dict[str, list[str]] = {}

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        if host not in known:
            raise OSError("Name or service not known")
        return [(2, 1, 6, "", (ip, port)) for ip in known[host]]

    monkeypatch.setattr("swarm.directory.dialable._look_up", getaddrinfo)
    return known


@pytest.mark.parametrize(
    ("own", "allow_private", "only_public"),
    [
        ("8.8.8.8:1", False, True),
        ("8.8.8.8:1", True, False),
        ("192.168.1.1:1", False, False),
        ("127.0.0.1:1", False, False),
        ("[fd00::1]:1", False, False),
        ("[2a00:1450::1]:1", False, True),
        ("unknown.example:1", False, True),
        ("home.example:1", False, False),
    ],
)
async def test_a_machine_with_a_public_or_unknown_address_calls_public_ones(
    own: str, allow_private: bool, only_public: bool, names: dict[str, list[str]]
) -> None:
    names["home.example"] = ["192.168.1.5"]
    assert await DialPolicy.of(own, allow_private=allow_private) == DialPolicy(only_public)
    with_private = await DialPolicy.of("10.0.0.1:1", own, allow_private=allow_private)
    assert with_private == DialPolicy(only_public), "one public address of several is enough"


async def test_a_machine_of_which_no_address_is_known_calls_public_ones() -> None:
    assert await DialPolicy.of(allow_private=False) == DialPolicy(only_public=True)


async def test_the_address_that_was_checked_is_the_one_that_is_dialled(names: dict[str, list[str]]) -> None:
    policy = DialPolicy(only_public=True)
    names["trap.example"] = ["10.0.0.1", "127.0.0.1"]
    names["both.example"] = ["10.0.0.1", "8.8.8.8"]
    names["v6.example"] = ["2a00:1450::1"]
    assert await policy.resolve("trap.example:80") is None
    assert await policy.resolve("nowhere.example:80") is None
    assert await policy.resolve("both.example:80") == "8.8.8.8:80"
    assert await policy.resolve("v6.example:80") == "[2a00:1450::1]:80"
    assert await policy.resolve("[::ffff:10.0.0.1]:80") is None
    assert await policy.resolve("no address") is None
    assert await DialPolicy(only_public=False).resolve("127.0.0.1:80") == "127.0.0.1:80"


@pytest.mark.parametrize("dead", [["2a00:1450::1"], ["8.8.8.8"], ["2a00:1450::1", "8.8.8.8"]])
async def test_of_a_name_with_addresses_of_both_families_the_one_that_answers_is_dialled(
    dead: list[str], names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, also where packets to one of them vanish."""
    both = names["both.example"] = ["2a00:1450::1", "8.8.8.8", "10.0.0.1"]
    tried: list[str] = []

    async def connect(ip: str, port: int) -> None:
        tried.append(ip)
        assert port == 80
        if ip in dead:
            await asyncio.Event().wait()

    monkeypatch.setattr(swarm.directory.dialable, "_connect", connect)
    monkeypatch.setattr(swarm.directory.dialable, "NEXT_S", 0.01)
    monkeypatch.setattr(swarm.directory.dialable, "ANSWER_S", 0.2)
    alive = [ip for ip in both[:2] if ip not in dead] or both[:1]
    expected = "8.8.8.8:80" if alive == ["8.8.8.8"] else "[2a00:1450::1]:80"
    assert await DialPolicy(only_public=True).resolve("both.example:80") == expected
    assert "10.0.0.1" not in tried, "what may not be dialled is not even tried"


def test_what_needs_no_question_is_known_at_once() -> None:
    policy = DialPolicy(only_public=True)
    assert policy.allows("8.8.8.8:1")
    assert not policy.allows("10.0.0.1:1")
    assert not policy.allows("name.example:1")
    assert DialPolicy(only_public=False).allows("name.example:1")
