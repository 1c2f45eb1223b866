"""A whole swarm in one process: real nodes and real gRPC on loopback; the registry is in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from client import AsyncSwarm
from node.life import span_host
from node.life.serve import Node
from node.model.config import ServeConfig
from tests.devices import DEVICE
from tests.memory_registry import MemoryNetwork, MemoryRegistry

SPEED = ((1, 8.0), (8, 9.0), (64, 20.0))
"""What nodes of one process say of their speed: to measure it took half of their start, and was chance."""
STOP_GRACE_S = 0.05
"""In which streams of sessions that were ended get their last message. Nodes of one process end one after another."""


@dataclass(frozen=True, slots=True)
class InProcessSwarm:
    """Running nodes and the registry that lists them.

    Attributes:
        model: folder of the target model.
        network: the memory in which all registries of this swarm meet.
        nodes: in the order of the spans that were asked for.
    """

    model: Path
    network: MemoryNetwork
    nodes: tuple[Node, ...]

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[AsyncSwarm]:  # noqa: ANN401
        """A client of this swarm; it keeps no calibration, and checks no picks, unless an option says so."""
        defaults: dict[str, Any] = {
            "registry": MemoryRegistry(self.network),
            "calibration": None,
            "draft_device": DEVICE,
            "check_picks": 0.0,
            "audit": 0.0,
        }
        async with AsyncSwarm.connect(self.model, **{**defaults, **options}) as swarm:
            yield swarm


@asynccontextmanager
async def in_process_swarm(model: Path, spans: Sequence[str], **options: Any) -> AsyncIterator[InProcessSwarm]:  # noqa: ANN401
    """Serve `model` with one node per span; `options` are fields of `ServeConfig`."""
    async with swarm_in(MemoryNetwork(), model, spans, options) as swarm:
        yield swarm


@asynccontextmanager
async def swarm_in(
    network: MemoryNetwork, model: Path, spans: Sequence[str], options: Mapping[str, Any]
) -> AsyncIterator[InProcessSwarm]:
    """The same in a network that the test made."""
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(span_host, "STOP_GRACE_S", STOP_GRACE_S)
        patch.setattr(span_host, "measure_sweeps", lambda _: SPEED)
        nodes = []
        for span in spans:
            defaults = {"layers": span, "model": str(model), "host": "127.0.0.1", "threads": 1, "drain": 0.0}
            defaults |= {"device": DEVICE, "dtype": "float32"}
            config = ServeConfig(**{**defaults, **options})
            node = Node(config, lambda _: None, MemoryRegistry(network))
            nodes.append(await stack.enter_async_context(node))
        yield InProcessSwarm(model, network, tuple(nodes))
