"""Where a machine knocks that a stranger sends knocking: nobody's network but the one that both are in."""

from __future__ import annotations

from ipaddress import IPv4Interface

import pytest

from swarm.reach.paths.hole import OwnAddresses, Targets, Vantage, allowed_targets

HOME = OwnAddresses((IPv4Interface("192.168.1.7/24"),))
AT_HOME = Vantage("8.8.4.4:40000", "9.9.9.9", HOME)
IN_A_LAB = Vantage("10.7.0.2:40000", "10.7.0.1", OwnAddresses((IPv4Interface("10.7.0.2/24"),)))
PRIVATE = ("192.168.1.9:41000", "10.0.0.1:41000", "127.0.0.1:41000", "[fd00::1]:41000", "[::ffff:10.0.0.1]:41000")


def test_public_addresses_are_knocked_at() -> None:
    named = ("8.8.8.8:41000", "[2606:4700::1111]:41000")
    assert allowed_targets(named, AT_HOME, same_home=False) == Targets((), named)


def test_no_private_address_is_dialled_from_a_public_one() -> None:
    assert not allowed_targets(PRIVATE, AT_HOME, same_home=False)


def test_the_own_network_is_for_who_comes_from_the_same_home() -> None:
    """And no other network, though both homes may use the same numbers."""
    assert allowed_targets(PRIVATE, AT_HOME, same_home=True) == Targets(("192.168.1.9:41000",))


@pytest.mark.parametrize("address", ["8.8.8.8:22", "8.8.8.8:443", "8.8.8.8:1023", "8.8.4.4:40000", "[fe80::1]:41000"])
def test_no_service_and_not_oneself(address: str) -> None:
    assert not allowed_targets([address], AT_HOME, same_home=True)


@pytest.mark.parametrize("address", ["", "name:41000", "8.8.8.8", "8.8.8.8:0", "224.0.0.1:41000", "0.0.0.0:41000"])
def test_what_is_no_address_of_one_machine_is_left_out(address: str) -> None:
    assert not allowed_targets([address], IN_A_LAB, same_home=True)


def test_a_private_swarm_knocks_at_private_addresses() -> None:
    assert allowed_targets(["10.8.0.1:41000"], IN_A_LAB, same_home=False) == Targets((), ("10.8.0.1:41000",))


def test_a_relay_on_the_internet_that_claims_to_see_a_private_address_is_not_believed() -> None:
    liar = Vantage("10.7.0.2:40000", "9.9.9.9", HOME)
    assert not allowed_targets(PRIVATE, liar, same_home=False)


def test_few_are_taken_and_each_once() -> None:
    named = [f"8.8.8.{number}:41000" for number in (1, 1, *range(1, 100))]
    assert len(allowed_targets(named, AT_HOME, same_home=False).far) == 6


@pytest.mark.parametrize(
    ("mine", "theirs", "is_shared"),
    [
        ("8.8.4.4:1", "8.8.4.4:2", True),
        ("8.8.4.4:1", "8.8.4.5:1", False),
        ("[2606:4700:1:2::3]:1", "[2606:4700:1:2:ffff::4]:2", True),
        ("[2606:4700:1:2::3]:1", "[2606:4700:1:3::3]:1", False),
        ("[2606:4700:1:2::3]:1", "8.8.4.4:1", False),
    ],
)
def test_one_home_has_one_public_address(mine: str, theirs: str, is_shared: bool) -> None:
    assert Vantage(mine, "9.9.9.9", HOME).shares_home(theirs) is is_shared
