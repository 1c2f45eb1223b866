"""A whole swarm in one process for tests: real nodes, real gRPC on loopback, the registry in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client import AsyncSwarm
from node.config import ServeConfig
from node.serve import Node
from swarm.discovery.memory_registry import MemoryNetwork, MemoryRegistry
from tests.devices import DEVICE


@dataclass(frozen=True, slots=True)
class InProcessSwarm:
    """Running nodes, in the order of their spans, and the network on which they are listed."""

    model: Path
    network: MemoryNetwork
    nodes: tuple[Node, ...]

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[AsyncSwarm]:  # noqa: ANN401
        """A client of this swarm, which keeps no calibration unless it is told where."""
        kept: dict[str, Any] = {"registry": MemoryRegistry(self.network), "calibration": None, "draft_device": DEVICE}
        async with AsyncSwarm.connect(self.model, **{**kept, **options}) as swarm:
            yield swarm


@asynccontextmanager
async def in_process_swarm(model: Path, spans: Sequence[str], **options: Any) -> AsyncIterator[InProcessSwarm]:  # noqa: ANN401
    """Serve `model` by one node per span."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        nodes = []
        for span in spans:
            usual = {"layers": span, "model": str(model), "host": "127.0.0.1", "threads": 1, "drain": 0.0}
            usual |= {"device": DEVICE, "dtype": "float32"}
            config = ServeConfig(**{**usual, **options})
            node = Node(config, lambda _: None, MemoryRegistry(network))
            nodes.append(await stack.enter_async_context(node))
        yield InProcessSwarm(model, network, tuple(nodes))
