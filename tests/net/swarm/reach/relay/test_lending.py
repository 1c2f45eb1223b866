"""A relay in a process of its own: started, offered, restarted, taken back, and ended with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from swarm.base.errors import ConfigError, SwarmError
from swarm.base.ids import PeerId
from swarm.directory.address_proof import check_who
from swarm.directory.dht.dialback import call_who
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity
from swarm.directory.registry import RelayOffer
from swarm.reach.relay import lending
from swarm.reach.relay.child import RelaySettings
from swarm.reach.relay.lending import lend, lent_settings, offered_hosts, relay_process
from tests.leftovers import descendants
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.relay_kit import HOST, dialled

ROOT = Path(__file__).parents[5]
LOCAL = DhtConfig(host=HOST)
PEER = PeerId("QmOwner")
NONCE = bytes(range(16))


async def here(port: int) -> list[str]:
    return [f"{HOST}:{port}"]


async def proven(peer: PeerId, address: str) -> bool:
    """As a peer that is asked to call a relay."""
    try:
        return check_who(peer, NONCE, await call_who(address, NONCE))
    except OSError:
        return False


class Offering(MemoryRegistry):
    """A directory that tells of every offer."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network)
        self.offers: asyncio.Queue[str | None] = asyncio.Queue()

    async def offer_relay(self, *addresses: str) -> None:
        await super().offer_relay(*addresses)
        self.offers.put_nowait(" ".join(addresses) or None)

    async def next_offer(self) -> str | None:
        return await asyncio.wait_for(self.offers.get(), 20)


async def test_a_relay_is_offered_once_it_is_reached_and_again_after_it_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "RESTART_S", 0.1)
    network = MemoryNetwork()
    network.dial_relay = proven
    async with Offering(network) as one, MemoryRegistry(network) as two:
        async with lend(one, RelaySettings(one.peer_id, 20.0, HOST), here) as lent:
            address = f"{HOST}:{lent.port}"
            assert await one.next_offer() == address
            assert await two.relays() == [RelayOffer(one.peer_id, address)]
            async with dialled(lent.port, b"LOAD\n") as (reader, _):
                assert await reader.read() == b"LOAD 0 128 0.0 20\n"
            [child] = descendants()
            os.kill(child.pid, signal.SIGKILL)
            assert await one.next_offer() is None
            assert await two.relays() == []
            assert await one.next_offer() == address
            assert await proven(one.peer_id, address), "at the same port again"
        assert await one.next_offer() is None
        assert await two.relays() == []
    assert not descendants()


@pytest.mark.parametrize("verdict", [True, False, None])
async def test_a_relay_that_nobody_reaches_is_not_offered(
    verdict: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can be asked, it is offered: the first machine of a swarm lends to the second."""
    asked = asyncio.Event()
    network = MemoryNetwork()

    class Registry(Offering):
        async def dial_back_relay(self, address: str) -> bool | None:
            asked.set()
            return verdict

    async with Registry(network) as one, lend(one, RelaySettings(one.peer_id, 20.0, HOST), here) as lent:
        await asyncio.wait_for(asked.wait(), 20)
        if verdict is False:
            assert lent.addresses == ()
            assert not network.relays
        else:
            assert await one.next_offer() == f"{HOST}:{lent.port}"


async def test_a_relay_of_a_peer_of_the_dht_is_tried_by_another_one_and_found_by_a_client() -> None:
    async with DhtRegistry.open(LOCAL) as one:
        join = (one.join_addresses()[0],)
        async with (
            DhtRegistry.open(replace(LOCAL, join=join)) as two,
            lend(two, RelaySettings(two.peer_id, 20.0, HOST), here) as lent,
            DhtRegistry.open(replace(LOCAL, join=(*join, two.join_addresses()[0]), client_mode=True)) as client,
        ):
            async with asyncio.timeout(30):
                while not (found := await client.relays()):
                    pass
            assert found == [RelayOffer(two.peer_id, f"{HOST}:{lent.port}")]


async def test_the_rate_follows_what_the_owner_can_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "RATE_S", 0.01)
    spare = [3.0]
    async with (
        MemoryRegistry(MemoryNetwork()) as one,
        lend(one, RelaySettings(one.peer_id, 3.0, HOST), here, lambda: spare[0]) as lent,
    ):
        assert await load(lent.port) == b"LOAD 0 128 0.0 3\n"
        spare[0] = 7.5
        async with asyncio.timeout(20):
            while await load(lent.port) != b"LOAD 0 128 0.0 7.5\n":
                pass


async def load(port: int) -> bytes:
    async with dialled(port, b"LOAD\n") as (reader, _):
        return await reader.read()


@pytest.mark.parametrize(
    ("mbit", "port", "words"),
    [(-1.0, None, "--relay-mbit -1"), (float("nan"), None, "--relay-mbit nan"), (1.0, 65_536, "--relay-port")],
)
def test_odd_options_are_refused_by_name(mbit: float, port: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lent_settings(PEER, mbit, host="0.0.0.0", port=port)


def test_options_say_what_is_lent() -> None:
    assert lent_settings(PEER, 0.0, host="0.0.0.0", port=None) is None
    usual = lent_settings(PEER, 20.0, host="localhost", port=None, usual_port=31_338)
    assert usual == RelaySettings(PEER, 20.0, HOST, 31_338, takes_any_port=True)
    assert lent_settings(PEER, 20.0, host="::", port=5) == RelaySettings(PEER, 20.0, "::", 5)
    local, public = "/ip4/192.168.1.2/tcp/1/p2p/Qm", "/ip4/8.8.8.8/tcp/1/p2p/Qm"
    v6 = "/ip6/2606:4700::1111/tcp/1/p2p/Qm"
    assert offered_hosts([local, public]) == ["8.8.8.8"]
    assert offered_hosts([local]) == ["192.168.1.2"]
    assert offered_hosts([v6]) == ["[2606:4700::1111]"]
    assert offered_hosts([local, public, v6]) == ["8.8.8.8", "[2606:4700::1111]"], "of each family one"
    assert offered_hosts([local, v6]) == ["[2606:4700::1111]"], "a private one is of no use beside a public one"
    assert offered_hosts([local, "/dns/relay.example.org/tcp/1/p2p/Qm"]) == ["relay.example.org"]


async def test_a_taken_port_is_refused_or_replaced() -> None:
    identity = Identity.ephemeral()
    with closing(socket.create_server((HOST, 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SwarmError, match=f"port {port} cannot be had"):
            async with relay_process(identity, RelaySettings(identity.peer_id, 1.0, HOST, port)):
                pass
        settings = RelaySettings(identity.peer_id, 1.0, HOST, port, takes_any_port=True)
        async with relay_process(identity, settings) as relay:
            assert relay.port not in (0, port)
            assert await proven(identity.peer_id, f"{HOST}:{relay.port}")


PARENT = """
import asyncio, sys
from swarm.directory.identity import Identity
from swarm.reach.relay.child import RelaySettings
from swarm.reach.relay.lending import relay_process

async def main():
    identity = Identity.ephemeral()
    async with relay_process(identity, RelaySettings(identity.peer_id, 1.0, "127.0.0.1")) as relay:
        print(relay.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_relay_dies_with_its_parent() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=PIPE, env=environment)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    child.suspend()  # also one that hangs
    parent.kill()
    await parent.wait()
    assert await asyncio.to_thread(psutil.wait_procs, [child], 10) == ([child], [])
