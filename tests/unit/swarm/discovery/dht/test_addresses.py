"""Multiaddresses of this machine, as the addresses that the rest of the program knows."""

from __future__ import annotations

import pytest

from swarm.discovery.dht.addresses import DhtConfig, host_and_port, listen_addresses


@pytest.mark.parametrize(
    ("host", "expected"),
    [("8.8.8.8", "8.8.8.8:1000"), ("2a00:1450::1", "[2a00:1450::1]:1000"), ("home.example", "home.example:1000")],
)
def test_an_announced_address_is_one_that_can_be_dialled(host: str, expected: str) -> None:
    announced = listen_addresses(DhtConfig(port=1000, announce_host=host)).announce
    assert announced is not None
    assert [host_and_port(address) for address in announced] == [expected]
    assert host_and_port(f"{announced[0]}/p2p/QmNobody") == expected
