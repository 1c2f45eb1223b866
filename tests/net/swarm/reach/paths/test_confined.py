"""Links of a machine whose network lets little out: nodes themselves where it can, else what a TLS port leads to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, check_hello
from swarm.directory.identity import Identity
from swarm.link.dial import Dialer
from swarm.link.egress.ports import Egress
from swarm.link.egress.proxy import HttpProxy
from swarm.link.egress.streams import Streams, connect, splice
from swarm.link.endpoint import Endpoint, LinkPath, RelayedAddress
from swarm.reach.paths.local_dialler import open_ways
from tests.net.hello_server import answering
from tests.net.relay_kit import serving
from tests.net.swarm.reach.relay.test_tls_port import tls_relay

NONCE = bytes(range(NONCE_BYTES))
SHUT = "127.0.0.1:1"
"""Where nothing can be had."""


async def greet(dialer: Dialer, endpoint: Endpoint) -> LinkPath | None:
    """Say hello over a link; how that goes."""
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = dialer.channel(endpoint).unary_unary(HELLO_METHOD)
    assert check_hello(endpoint.peer, NONCE, endpoint.digest, await call(NONCE, timeout=10))
    return dialer.path(endpoint)


async def test_a_node_that_cannot_be_dialled_is_led_to_by_the_port() -> None:
    async with answering(Identity.ephemeral()) as node, tls_relay() as (relay, port):

        async def find(_peer: PeerId) -> str:
            return node.address

        relay.server.lead_beyond(find)
        async with open_ways(egress=Egress((port,))) as ways, Dialer(ways=ways) as dialer:
            assert await greet(dialer, replace(node, address=SHUT)) is LinkPath.RELAYED
            assert relay.server.load.circuits == 1


async def test_a_node_that_can_be_dialled_is() -> None:
    async with (
        answering(Identity.ephemeral()) as node,
        tls_relay() as (relay, port),
        open_ways(egress=Egress((port,))) as ways,
        Dialer(ways=ways) as dialer,
    ):
        assert await greet(dialer, node) is LinkPath.DIRECT
        assert relay.server.load.circuits == 0


@pytest.mark.parametrize("shown", ["plain", SHUT], ids=["its relay can be dialled", "its relay cannot"])
async def test_a_node_that_stands_at_the_port_s_relay(shown: str) -> None:
    identity = Identity.ephemeral()
    async with answering(identity) as node, tls_relay() as (relay, port):

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await splice(Streams(reader, writer), await connect(node.address))

        async with serving(relay, serve, identity):
            where = relay.address if shown == "plain" else shown
            endpoint = replace(node, address=str(RelayedAddress(node.peer, where)))
            async with open_ways(egress=Egress((port,))) as ways, Dialer(ways=ways) as dialer:
                assert await greet(dialer, endpoint) is LinkPath.RELAYED


async def test_without_a_port_the_link_fails() -> None:
    async with (
        answering(Identity.ephemeral()) as node,
        open_ways(egress=Egress(is_narrow=True)) as ways,
        Dialer(ways=ways) as dialer,
    ):
        assert await greet(dialer, node) is LinkPath.DIRECT
        with pytest.raises(grpc.aio.AioRpcError):
            await greet(dialer, replace(node, address=SHUT))


async def test_a_system_without_local_sockets_does_not_pass_by_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.reach.paths.local_dialler.are_supported", lambda: False)
    with pytest.raises(ConfigError, match="proxy"):
        await open_ways(egress=Egress(proxy=HttpProxy("127.0.0.1", 1))).__aenter__()
    async with open_ways(egress=Egress(is_narrow=True)) as ways:
        assert ways is None
