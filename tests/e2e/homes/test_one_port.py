"""Machines whose network lets little out write texts and serve: through one TLS port, a proxy, or small packets."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.emulation import homes_swarm
from benchmarks.emulation.homes import Home, HomesNetwork, HomesPlan
from benchmarks.emulation.homes_swarm import HomesClient, HomesSwarm, open_homes_swarm
from tests.forked.machines import forked_json_program, forked_program
from tests.net.connect_proxy import ConnectProxy, proxying

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.needs_program("nft", "nftables"),
    pytest.mark.needs_program("conntrack", "conntrack"),
]
TOKENS = 6
WHOLE, FIRST, SECOND = "0-12", "0-6", "6-12"
TLS_PORT, PROXY_PORT = 443, 3_128
NARROW_MTU = 1_280


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_swarm, "start_program", forked_program)
    monkeypatch.setattr(homes_swarm, "json_program", forked_json_program)


async def one_port(swarm: HomesSwarm, machine: str) -> str:
    """Run a bootstrap peer with a TLS port; the multiaddress of that."""
    await swarm.bootstrap(machine, "--tls-port", str(TLS_PORT))
    return await swarm.programs[machine].wait_for(r"/ip4/\S+/tls/\S+")


async def client_at(swarm: HomesSwarm, home: str, address: str) -> HomesClient:
    """Serve at Q, which anybody can dial, and at a home; a client there, which finds both nodes."""
    await swarm.serve("Q", WHOLE, [address])
    await swarm.serve(home, WHOLE, [address])
    client = await swarm.client(f"{home}.2", [address])
    await client.wait_up(swarm.peers[home], swarm.peers["Q"])
    assert client.listed[swarm.peers[home]]["reach"] == "relayed"
    return client


async def written(client: HomesClient, *hops: tuple[str, str]) -> list[int]:
    """The tokens of a text over these hops, each a peer and its layers."""
    told = await client.generate({"hops": [list(hop) for hop in hops], "new_tokens": TOKENS})
    assert told["error"] is None, told
    tokens: list[int] = told["tokens"]
    assert len(tokens) == TOKENS
    return tokens


async def test_a_network_that_lets_443_out_alone(tmp_path: Path) -> None:
    """A node that anybody can dial, and one in that network; the client is in it too."""
    office = Home("office", machines=2)
    async with HomesNetwork(HomesPlan((office,))) as world, open_homes_swarm(world, tmp_path) as swarm:
        await world.confine("office", hosts=["P"], port=TLS_PORT)
        address = await one_port(swarm, "P")
        client = await client_at(swarm, "office", address)
        near, far = swarm.peers["office"], swarm.peers["Q"]
        assert client.listed[far]["reach"] == "direct"
        assert await written(client, (near, FIRST), (far, SECOND)) == await written(client, (far, WHOLE))
        out = {other for _, other in await world.connections("office.2") if not other.startswith(("127.", "["))}
        assert out == {f"{world.address('P')}:{TLS_PORT}"}


@pytest.mark.crossing
async def test_a_network_that_lets_a_proxy_out_alone(tmp_path: Path) -> None:
    """The proxy stands between all machines of that network and the TLS port, and passes nothing else."""
    plan = HomesPlan((Home("office", machines=2),), public=("P", "proxy"))
    async with HomesNetwork(plan) as world, open_homes_swarm(world, tmp_path) as swarm:
        await world.confine("office", hosts=["proxy"], port=PROXY_PORT)
        address = await one_port(swarm, "P")
        listener = world.socket("proxy")
        listener.bind((world.address("proxy"), PROXY_PORT))
        passed = ConnectProxy((TLS_PORT,), "canopy:secret")
        async with proxying(listener, passed, partial(world.socket, "proxy")):
            swarm.settings = (f"CANOPY_PROXY=http://canopy:secret@{world.address('proxy')}:{PROXY_PORT}",)
            await swarm.serve("office", WHOLE, [address])
            client = await swarm.client("office.2", [address])
            near = swarm.peers["office"]
            await client.wait_up(near)
            assert client.listed[near]["reach"] == "relayed"
            await written(client, (near, WHOLE))
            out = {other for _, other in await world.connections("office.2") if not other.startswith("127.")}
            assert out == {f"{world.address('proxy')}:{PROXY_PORT}"}
        assert passed.connected == {f"{world.address('P')}:{TLS_PORT}"}
        assert "secret" not in "".join(program.log.read_text() for program in swarm.programs.values())


@pytest.mark.crossing
async def test_a_network_with_ipv6_alone_that_lets_443_out_alone(tmp_path: Path) -> None:
    plan = HomesPlan((Home("office", machines=2, ipv4=False),), ipv6=True)
    async with HomesNetwork(plan) as world, open_homes_swarm(world, tmp_path) as swarm:
        await world.confine("office", hosts=["P"], port=TLS_PORT)
        await swarm.bootstrap("P", "--tls-port", str(TLS_PORT), ipv6=True)
        address = await swarm.programs["P"].wait_for(r"/ip6/\S+/tls/\S+")
        client = await client_at(swarm, "office", address)
        await written(client, (swarm.peers["office"], FIRST), (swarm.peers["Q"], SECOND))


@pytest.mark.crossing
async def test_a_path_that_drops_large_packets_and_says_nothing(tmp_path: Path) -> None:
    """As behind a tunnel whose router sends no ICMP: what is short passes, so that everything seems to be well."""
    async with (
        HomesNetwork(HomesPlan((Home("tunnel", machines=2),))) as world,
        open_homes_swarm(world, tmp_path) as swarm,
    ):
        await world.narrow("tunnel", NARROW_MTU)
        address = await swarm.bootstrap("P")
        client = await client_at(swarm, "tunnel", address)
        await written(client, (swarm.peers["tunnel"], FIRST), (swarm.peers["Q"], SECOND))
        assert "path MTU" in swarm.programs["tunnel"].log.read_text()
