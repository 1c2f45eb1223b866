"""Whole nodes that nobody can dial: they serve through relays, and a text survives the loss of one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio
import pytest

from client.base.options import GenerateOptions
from node.life.reach import watch
from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.base.errors import ConfigError, SwarmError
from swarm.demo import TARGET
from swarm.directory.address_proof import check_hello
from swarm.directory.dht.dialback import call_hello
from swarm.directory.node_record import NodeRecord, Reach
from swarm.directory.registry import RelayOffer
from swarm.link.endpoint import Endpoint, parse_relayed
from tests.in_process_swarm import InProcessSwarm, in_process_swarm, swarm_in
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.lent_relay import lent_relay
from tests.net.three_nodes import prompt, until

SPANS = ["0-6", "6-12"]


async def dial_relayed(endpoint: Endpoint, nonce: bytes) -> bool:
    """A peer of a world in which every router drops what comes unasked: it reaches machines through relays alone."""
    if endpoint.relay is None:
        return False
    try:
        answer = await call_hello(endpoint, nonce)
    except (grpc.aio.AioRpcError, SwarmError):
        return False
    return check_hello(endpoint.peer, nonce, endpoint.digest, answer)


@dataclass
class Homes:
    """Nodes behind routers, and the two relays at which they stand."""

    swarm: InProcessSwarm
    relays: dict[str, AsyncExitStack]

    async def records(self) -> list[NodeRecord]:
        identity = self.swarm.nodes[0].identity
        return await MemoryRegistry(self.swarm.network).records(identity.fingerprint, identity.num_layers)


@asynccontextmanager
async def homes() -> AsyncIterator[Homes]:
    network = MemoryNetwork(dial=dial_relayed)
    async with AsyncExitStack() as stack:
        relays: dict[str, AsyncExitStack] = {}
        for _ in range(2):
            own = await stack.enter_async_context(AsyncExitStack())
            offer: RelayOffer = await own.enter_async_context(lent_relay())
            network.relays[offer.peer] = offer.address
            relays[offer.address] = own
        swarm = await stack.enter_async_context(swarm_in(network, TARGET, SPANS, {}))
        yield Homes(swarm, relays)


async def test_nodes_that_nobody_can_dial_serve_through_relays_and_survive_one() -> None:
    options: GenerateOptions = {"max_new_tokens": 40, "seed": 3}
    async with in_process_swarm(TARGET, SPANS) as here, here.client() as client:
        plain = await client.generate(prompt(1), **options)
        assert plain.stats.paths == ("direct", "direct")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "LOOK_S", 0.05)
        async with homes() as away, away.swarm.client() as client:
            records = await away.records()
            assert [record.reach for record in records] == [Reach.RELAYED, Reach.RELAYED]
            first = await client.generate(prompt(1), **options)
            assert first.tokens == plain.tokens
            assert set(first.stats.paths) <= {"punched", "LAN", "relayed"}, "whichever is found first"
            lost = records[0].endpoint.relay
            assert lost is not None
            stream = client.stream(prompt(1), **options)
            text = (await anext(stream)).text
            await away.relays[lost].aclose()
            async for piece in stream:
                text += piece.text
                result = piece.result
            assert result is not None
            assert (result.tokens, text) == (plain.tokens, plain.text)

            async def announced_anew() -> bool:
                return all(record.endpoint.relay != lost for record in await away.records())

            await until(announced_anew)


async def test_a_node_that_has_no_way_in_says_so_before_it_loads_anything() -> None:
    said: list[str] = []
    network = MemoryNetwork(dial=dial_relayed)
    config = ServeConfig(layers="0-4", model="no/such-model", host="127.0.0.1", relay="off")
    with pytest.raises(ConfigError, match=r"peers cannot reach 127\.0\.0\.1:") as caught:
        async with Node(config, said.append, MemoryRegistry(network)):
            pass
    assert "\n" not in str(caught.value)
    assert [line.partition(":")[0] for line in said] == ["direct", "mapped", "relayed"]


async def test_the_relay_that_a_user_names_is_the_one() -> None:
    said: list[str] = []
    async with lent_relay() as named, lent_relay() as other:
        network = MemoryNetwork(dial=dial_relayed)
        network.relays[other.peer] = other.address
        config = ServeConfig("0-12", str(TARGET), host="127.0.0.1", threads=1, drain=0.0, relay=named.address)
        async with Node(config, said.append, MemoryRegistry(network)) as node:
            assert node.address == f"{node.peer_id}.via.{named.address}"
            assert parse_relayed(node.serving().address) is not None
        assert f"reached: through the relay {named.address}" in said
    with pytest.raises(ConfigError, match="--relay"):
        replace(config, relay="a relay").check()
