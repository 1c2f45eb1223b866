"""Records of machines that are not there, beside an honest swarm: a client gets the same text as without."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from client.library.aio import AsyncSwarm
from swarm.base.errors import RouteError
from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span
from swarm.cli import report
from swarm.commands.route import ShowRoute, show_route
from swarm.directory.coverage import cover
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import KNOWN_S
from swarm.directory.sealing import RecordError
from swarm.link.certificate import ServerCertificate
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.three_nodes import three_nodes

LIARS = (Identity.ephemeral(), Identity.ephemeral())


async def announce(network: MemoryNetwork, model: ModelIdentity, **other: Any) -> None:  # noqa: ANN401
    """List a machine with all layers of a model, at an address where nobody listens."""
    node = MemoryRegistry(network, LIARS[model.weights_digest[-1] == "1"])
    about = (node.peer_id, model, Span(0, model.num_layers), "127.0.0.1:9", NodeState.SERVING, "cpu-float32", "0")
    record = NodeRecord(*about, None, ((1, 0.01),), 10**6, 10**6, 1, time.time() + 60)
    record = replace(record, certificate=ServerCertificate.fresh(node.peer_id).der, **other)
    await node.announce(record)


async def generated(client: AsyncSwarm) -> str:
    return (await client.generate("It was", max_new_tokens=12, nodes=4, seed=3, temperature=0.7)).text


async def test_what_is_only_listed_hinders_nobody() -> None:
    async with three_nodes() as running:
        network, honest = running.swarm.network, running.client.identity
        text = await generated(running.client)
        parts = (honest.config_digest, honest.weights_digest, honest.tokenizer_digest)
        weights = [ModelIdentity.of(honest.name, parts[0], f"{n:064x}", parts[2], honest.num_layers) for n in range(2)]
        for model in weights:  # other weights under the same name
            await announce(network, model)
        with pytest.raises(RecordError, match="fingerprint"):  # the honest fingerprint and a layer more
            await announce(network, replace(honest, num_layers=13))
        with pytest.raises(RecordError, match="fingerprint"):  # and another config
            await announce(network, replace(honest, config_digest="62" * 32))
        for number in (-1e308, float("inf"), 5e-324, 0.0):  # a speed that would end routing
            with pytest.raises(RecordError, match="sweep_ms"):
                await announce(network, honest, sweep_ms=((1, number),))
        async with running.swarm.client() as client:
            assert client.identity == honest
            assert await generated(client) == text
        async with running.swarm.client(fingerprint=honest.fingerprint[:12]) as client:
            assert client.identity == honest
        with pytest.raises(RouteError, match="nobody serves"):
            async with running.swarm.client(fingerprint="ab" * 32):
                pass
        registry = MemoryRegistry(network)
        out = Console(record=True, width=200, soft_wrap=True)
        (listed,) = [model for model in await registry.models() if model.fingerprint == honest.fingerprint]
        report(cover(listed, await registry.records(listed.fingerprint, listed.num_layers)), (), out)
        await show_route(ShowRoute((), honest.name, nodes=4), registry, out)
        shown = out.export_text()
        assert f"fingerprint {honest.fingerprint[:12]} · 12 layers" in shown
        assert "every layer is served" in shown
        assert shown.count("0…3 of 12") == 2, "status lists the node, and the route leads over it"


async def test_after_a_refusal_the_directory_is_asked_only_where_what_it_said_does_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with three_nodes() as running:
        opener = running.client.opener
        asked: list[float] = []
        records = MemoryRegistry.records

        async def noted(own: MemoryRegistry, fingerprint: str, num_layers: int, *, within_s: float) -> list[NodeRecord]:
            asked.append(within_s)
            return await records(own, fingerprint, num_layers, within_s=within_s)

        monkeypatch.setattr(MemoryRegistry, "records", noted)
        route = await opener.route(avoid=frozenset({LIARS[0].peer_id}))
        assert asked == [KNOWN_S]
        with pytest.raises(RouteError):
            await opener.route(avoid=frozenset(hop.peer for hop in route.hops))
        assert asked == [KNOWN_S, KNOWN_S, 0.0]
