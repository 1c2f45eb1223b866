"""When a node lends a relay, at which address, and how much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest

from node.life.reach import lend
from node.life.reach.ladder import Reached, Whereabouts
from node.model.config import ServeConfig
from swarm.base.errors import ConfigError
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.node_record import Reach
from swarm.reach.gateway.ports import NoMapping
from swarm.reach.paths.tls_offer import TlsOffer
from swarm.reach.relay.child import RelaySettings
from swarm.reach.relay.lending import LentRelay, ReachedAt
from tests.memory_registry import MemoryNetwork, MemoryRegistry

DIRECT = Reached("[2001:db8::1]:5000", Reach.DIRECT, "")
MAPPED = Reached("192.0.2.1:5000", Reach.MAPPED, "")
RELAYED = Reached("Qm.via.192.0.2.9:31338", Reach.RELAYED, "")


class Lent:
    """What was lent, as `swarm.reach.relay.lending.lend` would."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.settings: list[RelaySettings] = []
        self.rate: Callable[[], float] = lambda: 0.0

    @asynccontextmanager
    async def lend(
        self, registry: object, settings: RelaySettings, reached_at: ReachedAt, mbit_per_s: Callable[[], float]
    ) -> AsyncIterator[LentRelay]:
        self.settings.append(settings)
        self.rate = mbit_per_s
        self.said.put_nowait(" ".join(await reached_at(7000)))
        yield LentRelay(7000)
        self.said.put_nowait("ended")


async def mapped(port: int) -> str:
    return f"198.51.100.1:{port}"


async def unmapped(port: int) -> str:
    raise NoMapping("no router answers")


@pytest.fixture(autouse=True)
def own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no public address."""
    monkeypatch.setattr(lend, "interface_addresses", tuple)


@pytest.mark.parametrize(
    ("own", "also"),
    [(("192.168.1.7", "2606:4700::7", "fd00::7"), ["[2606:4700::7]:7000"]), (("fd00::7", "9.9.9.9"), [])],
)
async def test_it_is_offered_by_its_other_family_too(
    own: tuple[str, ...], also: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lend, "interface_addresses", lambda: tuple(map(ip_address, own)))
    registry = MemoryRegistry(MemoryNetwork())
    lender = lend.RelayLender(registry, ServeConfig("0-4"), Whereabouts(MAPPED), mapped)
    assert await lender._reached_at(7000) == ["198.51.100.1:7000", *also]
    bound = lend.RelayLender(registry, ServeConfig("0-4", host="192.168.1.7"), Whereabouts(MAPPED), mapped)
    assert await bound._reached_at(7000) == ["198.51.100.1:7000"]


async def test_it_lends_while_it_is_reached_without_help(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, whereabouts, uplink = Lent(), Whereabouts(RELAYED), list[float]()
    monkeypatch.setattr(lend, "lend", lent.lend)
    monkeypatch.setattr(lend, "LOOK_S", 0.001)
    lender = lend.RelayLender(MemoryRegistry(MemoryNetwork()), ServeConfig("0-4"), whereabouts, mapped)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(lender.run(lambda: uplink[0] if uplink else None))
        whereabouts.move(DIRECT)
        assert await lent.said.get() == "[2001:db8::1]:7000"
        assert lent.rate() == 10.0
        uplink.append(41.0)
        assert lent.rate() == 10.2, "a quarter of what was measured"
        whereabouts.move(RELAYED)
        assert await lent.said.get() == "ended"
        whereabouts.move(MAPPED)
        assert await lent.said.get() == "198.51.100.1:7000"
        assert [one.port for one in lent.settings] == [0, 7000], "the same port again"
        running.cancel()


async def test_without_a_mapping_of_its_port_a_relay_is_not_reached() -> None:
    lender = lend.RelayLender(MemoryRegistry(MemoryNetwork()), ServeConfig("0-4"), Whereabouts(MAPPED), unmapped)
    assert await lender._reached_at(7000) == []


async def test_an_option_says_how_much_and_zero_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lent = Lent()
    monkeypatch.setattr(lend, "lend", lent.lend)
    registry = MemoryRegistry(MemoryNetwork())
    await lend.RelayLender(registry, ServeConfig("0-4", relay_mbit=0.0), Whereabouts(DIRECT), mapped).run(lambda: 100.0)
    assert not lent.settings
    for options in ({"relay_mbit": -1.0}, {"relay_port": 70_000}, {"relay_mbit": 0.0, "tls_port": 443}):
        with pytest.raises(ConfigError, match="--relay-"):
            ServeConfig("0-4", **options).check()


@pytest.mark.parametrize(
    ("options", "measured", "lent_mbit"),
    [({}, 100.0, 5.0), ({}, None, 5.0), ({}, 8.0, 2.0), ({"relay_mbit": 50.0}, 100.0, 50.0)],
    ids=["less than the line", "not measured", "more than the line", "an option of its own"],
)
async def test_who_bounds_what_sessions_send_bounds_its_relay_too(
    options: dict[str, float], measured: float | None, lent_mbit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = Lent()
    monkeypatch.setattr(lend, "lend", lent.lend)
    config = ServeConfig("0-4", max_mbit=20.0, **options)  # type: ignore[arg-type]
    lender = lend.RelayLender(MemoryRegistry(MemoryNetwork()), config, Whereabouts(DIRECT), mapped)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(lender.run(lambda: measured))
        await lent.said.get()
        assert lent.rate() == lent_mbit
        running.cancel()


@pytest.mark.parametrize(("reached", "ports"), [(DIRECT, [443]), (MAPPED, [])])
async def test_a_tls_port_is_offered_while_callers_reach_it(
    reached: Reached, ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mapped node it is another port of the router, which is not asked for."""
    lent, offered = Lent(), list[int]()

    class Offer(TlsOffer):
        def lend(self, *arguments: Any) -> Any:  # noqa: ANN401 - as the one that it replaces
            offered.append(self.port)
            return lent.lend(*arguments)

    monkeypatch.setattr(lend, "lend", lent.lend)
    monkeypatch.setattr(lend, "TlsOffer", Offer)
    config = ServeConfig("0-4", tls_port=443)
    lender = lend.RelayLender(DhtRegistry.open(DhtConfig()), config, Whereabouts(reached), mapped)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(lender.run(lambda: 100.0))
        await lent.said.get()
        assert offered == ports
        running.cancel()
