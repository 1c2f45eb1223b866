"""A relay in a process of its own: started, offered, restarted, taken back, and ended with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from swarm.discovery.address_proof import check_who
from swarm.discovery.dht.dialback import call_who
from swarm.discovery.identity import Identity
from swarm.discovery.memory_registry import MemoryNetwork, MemoryRegistry
from swarm.discovery.registry import RelayOffer
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.relay import lending
from swarm.relay.child import RelaySettings
from swarm.relay.lending import lend
from swarm.relay.process import relay_process
from tests.net.relay_kit import HOST, dialled

ROOT = Path(__file__).parents[4]
NONCE = bytes(range(16))


async def here(port: int) -> str | None:
    return f"{HOST}:{port}"


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

    async def offer_relay(self, address: str | None) -> None:
        await super().offer_relay(address)
        self.offers.put_nowait(address)

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
            [child] = psutil.Process().children()
            os.kill(child.pid, signal.SIGKILL)
            assert await one.next_offer() is None
            assert await two.relays() == []
            assert await one.next_offer() == address
            assert await proven(one.peer_id, address), "at the same port again"
        assert await one.next_offer() is None
        assert await two.relays() == []
    assert not psutil.Process().children()


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
            assert lent.address is None
            assert not network.relays
        else:
            assert await one.next_offer() == f"{HOST}:{lent.port}"


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
from swarm.discovery.identity import Identity
from swarm.relay.child import RelaySettings
from swarm.relay.process import relay_process

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
