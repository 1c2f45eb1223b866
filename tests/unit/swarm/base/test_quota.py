"""Bounds per peer: what is held, spent and done wrong, and which address pays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.base.quota import (
    UNKNOWN,
    HoldingLimit,
    OverQuota,
    Quota,
    QuotaLimits,
    RateLimit,
    StrikeRule,
    address_key,
    is_private,
    link_of,
    site_key,
    stand_in,
)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_quota(clock: Clock, weight: Callable[[str], int] = lambda key: 1, max_keys: int = 1_000) -> Quota:
    limits = QuotaLimits(
        {"streams": HoldingLimit(per_key=2, total=5)},
        {"attaches": RateLimit(per_key=1.0, burst=3.0, total=4.0, total_burst=8.0)},
        StrikeRule(allowed=2, refuse_s=5.0, longest_s=12.0, forget_s=60.0),
        max_keys,
    )
    return Quota(limits, clock, weight)


def test_what_is_held_is_bounded_per_key_and_in_total_and_comes_back() -> None:
    quota = make_quota(Clock())
    assert [quota.take("streams", "a") for _ in range(3)] == [True, True, False]
    assert [quota.take("streams", key) for key in ("b", "b", "c", "c")] == [True, True, True, False]
    assert quota.holders("streams") == {"a": 2, "b": 2, "c": 1}
    quota.give("streams", "a")
    assert quota.take("streams", "c")
    assert (quota.held("streams", "a"), quota.total("streams")) == (1, 5)


def test_a_block_gives_back_what_it_held_also_when_it_fails() -> None:
    quota = make_quota(Clock())
    with pytest.raises(ZeroDivisionError), quota.hold("streams", "a", 2):
        raise ZeroDivisionError
    assert quota.total("streams") == 0
    with pytest.raises(OverQuota, match="too many streams at once"), quota.hold("streams", "a", 3):
        pass
    assert quota.total("streams") == 0


def test_a_heavier_key_may_hold_and_spend_more() -> None:
    quota = make_quota(Clock(), weight=lambda key: 2 if key == "near" else 1)
    assert [quota.take("streams", "near") for _ in range(5)] == [True] * 4 + [False]
    assert quota.holders("streams") == {"near": 2}
    assert [quota.spend("attaches", "near") for _ in range(7)] == [True] * 6 + [False]


def test_what_is_spent_comes_back_with_time_up_to_a_burst() -> None:
    clock = Clock()
    quota = make_quota(clock)
    assert [quota.spend("attaches", "a") for _ in range(4)] == [True, True, True, False]
    assert quota.wait_s("attaches", "a") == pytest.approx(1.0)
    clock.now += 1.0
    assert [quota.spend("attaches", "a") for _ in range(2)] == [True, False]
    clock.now += 1e6
    assert [quota.spend("attaches", "a") for _ in range(4)] == [True, True, True, False]
    clock.now -= 1e5  # a clock that goes back gives nothing
    assert not quota.spend("attaches", "a")
    assert quota.wait_s("attaches", "a", 4) == float("inf")


def test_all_keys_together_spend_no_more_than_the_total() -> None:
    quota = make_quota(Clock())
    assert sum(quota.spend("attaches", str(key)) for key in range(100)) == 8
    assert quota.wait_s("attaches", "new") == pytest.approx(0.25)


def test_what_was_used_already_is_owed_up_to_one_burst() -> None:
    clock = Clock()
    quota = make_quota(clock)
    quota.charge("attaches", "a", 1e9)
    assert quota.wait_s("attaches", "a") == pytest.approx(4.0)
    clock.now += 4.0
    assert quota.spend("attaches", "a")


def test_wrongs_are_refused_for_longer_each_time_and_forgotten() -> None:
    clock = Clock()
    quota = make_quota(clock)
    refused: list[float] = []
    for _ in range(4):
        assert [quota.strike("a") for _ in range(3)] == [False, False, True]
        refused.append(quota.refused_s("a"))
        clock.now += refused[-1]
        assert quota.refused_s("a") == 0
    assert refused == [5.0, 10.0, 12.0, 12.0]
    clock.now += 61.0
    assert [quota.strike("a") for _ in range(3)] == [False, False, True]
    assert quota.refused_s("a") == 5.0
    assert quota.refused_s("nobody") == 0


def test_a_flood_of_new_keys_forgets_the_idle_ones_only() -> None:
    clock = Clock()
    quota = make_quota(clock, max_keys=64)
    quota.take("streams", "holder")
    for _ in range(3):
        quota.strike("holder")
    for number in range(100_000):
        quota.strike(str(number))
        assert len(quota) <= 64
    assert quota.held("streams", "holder") == 1
    assert quota.refused_s("holder") == 5.0
    quota.give("streams", "holder")
    assert quota.total("streams") == 0


def test_new_keys_get_nothing_while_every_place_is_held() -> None:
    quota = make_quota(Clock(), max_keys=2)
    assert quota.take("streams", "a")
    assert quota.take("streams", "b")
    assert not quota.take("streams", "c")
    assert not quota.spend("attaches", "c")
    assert quota.strike("c")
    assert len(quota) == 2


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("ipv4:192.0.2.1:50", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:50", "192.0.2.1"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:50", "2001:db8:1::/56"),
        ("ipv6:%5B2001:db8:1:2::9%5D:50", "2001:db8:1::/56"),
        ("2001:db8:1:2::7", "2001:db8:1::/56"),
        ("ipv6:[fe80::1%25eth0]:50", "fe80::/56"),
        ("ipv6:[::ffff:192.0.2.1]:50", "192.0.2.1"),
        ("ipv6:[2002:c000:201::1]:50", "192.0.2.1"),
        ("ipv6:[::1]:5", "::/56"),
        ("unix:", UNKNOWN),
        ("unix:/tmp/x", UNKNOWN),
        ("", UNKNOWN),
        ("ipv4:nonsense", UNKNOWN),
        ("ipv6:[::1", "::/56"),
        ("%", UNKNOWN),
    ],
)
def test_an_address_pays_whole_or_by_its_prefix(peer: str, key: str) -> None:
    assert address_key(peer) == key


def test_a_home_pays_once_and_a_site_is_as_many_homes_as_a_network_has_addresses() -> None:
    """A home has 256 links, and had 256 quotas; the directory counted it among 256 homes already."""
    home = [f"2001:db8:aa:{link:x}::9" for link in range(0x100, 0x200)]
    assert {address_key(peer) for peer in home} == {"2001:db8:aa:100::/56"}
    assert len({link_of(peer) for peer in home}) == 256
    site = [f"2001:db8:aa:{home:02x}00::9" for home in range(256)]
    assert len({address_key(peer) for peer in site}) == 256 == len({address_key(f"192.0.2.{n}") for n in range(256)})
    assert {site_key(peer) for peer in [*home, *site]} == {"2001:db8:aa::/48"}
    assert {site_key(f"ipv4:192.0.2.{n}:5") for n in range(256)} == {"192.0.2.0/24"}
    assert link_of("192.0.2.7") == "192.0.2.7"
    assert link_of("2001:db8:aa:1::9") == "2001:db8:aa:1::"
    assert (site_key("unix:"), link_of("unix:")) == (UNKNOWN, UNKNOWN)


def test_who_comes_by_way_of_a_relay_counts_as_a_stranger_of_his_own() -> None:
    keys = {
        stand_in(way, peer) for way in ("198.51.100.1:7", "198.51.100.2:7") for peer in ("192.0.2.1:5", "192.0.2.2:5")
    }
    assert len(keys) == 4, "a relay that lies about who comes uses up nothing of another's"
    assert stand_in("r:1", "192.0.2.1:5") == stand_in("r:1", "192.0.2.1:6"), "a port is nobody"
    for key in keys:
        assert address_key(f"ipv4:{key}:5") == key
        assert not is_private(key)
    assert is_private("127.0.0.1")
    assert is_private("127.128.0.1")
