"""Nodes of this process that lose all their sessions at random, and chains over them that count the steps."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from client.chain.answers import Answer
from client.chain.chain import Chain
from client.demo.delay_proxy import free_ports
from client.demo.link_shape import LinkShape
from client.demo.programs import start_program
from node.config import ServeConfig
from node.serve import Node
from swarm.demo import TARGET
from swarm.discovery.memory_registry import MemoryNetwork, MemoryRegistry
from swarm.protocol.messages import Credits, RouteHop, Sweep


@dataclass(slots=True)
class FailureInjector:
    """Makes hops lose their sessions at random.

    Attributes:
        nodes: The nodes, by peer id.
        chance: Probability that a hop loses its sessions, in each step.
        rng: Decides.
        steps: Steps so far.
        losses: Losses so far.
    """

    nodes: Mapping[str, Node]
    chance: float
    rng: random.Random
    steps: int = 0
    losses: int = 0

    def step(self, hops: Sequence[RouteHop]) -> None:
        """A sweep was just sent over these hops."""
        self.steps += 1
        for hop in hops:
            if self.rng.random() < self.chance:
                self.losses += 1
                self.nodes[hop.peer].sessions.close_all("lost its sessions")


@dataclass(frozen=True, slots=True)
class FailingChain:
    """A chain whose sweeps are the steps in which hops lose sessions.

    Attributes:
        chain: The chain.
        failures: What makes them lose.
    """

    chain: Chain
    failures: FailureInjector

    @property
    def credits(self) -> Credits:
        """What may be unanswered."""
        return self.chain.credits

    @property
    def first_link_ms(self) -> float:
        """One-way time to hop 0."""
        return self.chain.first_link_ms

    @property
    def has_answer(self) -> bool:
        """Whether `answer` would return at once."""
        return self.chain.has_answer

    @property
    def route_key(self) -> Hashable:
        """Names the machines that it goes over now."""
        return self.chain.route_key

    def send(self, sweep: Sweep) -> None:
        """Start a sweep; some hop may lose it."""
        self.chain.send(sweep)
        self.failures.step(self.chain.route.hops)

    async def answer(self) -> Answer:
        """The next reply."""
        return await self.chain.answer()

    async def idle(self, max_ms: float) -> None:
        """Until there is one, or so much time has passed."""
        await self.chain.idle(max_ms)


@asynccontextmanager
async def nodes_here(
    folder: Path, spans: Sequence[str], delay_ms: float
) -> AsyncIterator[tuple[MemoryNetwork, list[Node]]]:
    """Serve the demo model by one node per span, listed in a registry in memory.

    delay_ms is one way, on each link, by a proxy; 0 is loopback as it is.
    """
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        ports = free_ports(2 * len(spans))
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        if delay_ms:
            shape = json.dumps(asdict(LinkShape(delay_ms=delay_ms)))
            links = ["client.demo.delay_proxy", shape, *(f"{listen}:{target}" for listen, target in pairs)]
            proxy = await stack.enter_async_context(start_program("links", links, folder))
            await proxy.wait_for(r"\[null")
        nodes = []
        for span, (listen, target) in zip(spans, pairs, strict=True):
            config = ServeConfig(
                layers=span,
                model=str(TARGET),
                host="127.0.0.1",
                port=target,
                announce_address=f"127.0.0.1:{listen}" if delay_ms else None,
                threads=1,
                drain=0.0,
            )
            node = Node(config, lambda _: None, MemoryRegistry(network))
            nodes.append(await stack.enter_async_context(node))
        yield network, nodes
