"""The client of a swarm in homes, in a process of its own: generates texts over chains that it is told.

Jobs come on standard input and events go to standard output, as JSON lines. A chain is named by its machines and their
layers, so that every link of a matrix can be asked for; a machine may compute a part of the layers that it serves.

    {"hops": [["Qm…", "0-6"], ["Qm…", "6-12"]], "spare": ["Qm…"], "new_tokens": 8}

Links' delays are as the nodes and the client's pings measure them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import torch

from benchmarks.emulation.json_program import jobs, tell
from client.base.stats import Result
from client.library.aio import AsyncSwarm
from swarm.base.errors import SwarmError
from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span
from swarm.base.library_logging import quiet_libraries
from swarm.base.tasks import TaskScope
from swarm.demo import TARGET
from swarm.directory.dht.addresses import DhtConfig, Membership
from swarm.directory.dht.registry import DhtRegistry
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import Registry
from swarm.link.egress.proxy import VARIABLE

PROMPT = (11, 7, 23, 42, 5, 11, 7, 23, 42, 5, 11, 7, 23, 42, 5, 11)
GIVE_UP_S = 90.0
LIST_POLL_S = 0.3


class ChosenMachines:
    """A directory that lists some machines alone, with a part of the layers that they serve.

    Attributes:
        spans: layers by peer; who is missing is not listed.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.spans: dict[str, Span] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a directory has
        return getattr(self._registry, name)

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = 1.5) -> list[NodeRecord]:
        found = await self._registry.records(fingerprint, num_layers, within_s=within_s)
        return [replace(record, span=self.spans[record.peer]) for record in found if record.peer in self.spans]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The directory behind it is its owner's."""


class HomesTexts:
    def __init__(self, swarm: AsyncSwarm, chosen: ChosenMachines, registry: Registry) -> None:
        self._swarm = swarm
        self._chosen = chosen
        self._registry = registry

    async def tell(self, job: dict[str, Any]) -> None:
        began = time.monotonic()
        told: dict[str, Any] = {"tokens": [], "error": None}
        self._chosen.spans = {peer: Span.parse(layers) for peer, layers in [*job["hops"], *job.get("spare", [])]}
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await self._listed([peer for peer, _ in job["hops"]])
                told |= await self._generate(job)
        except (SwarmError, TimeoutError) as error:
            told["error"] = f"{type(error).__name__}: {error}"
        say("told", seconds=time.monotonic() - began, **told)

    async def _generate(self, job: dict[str, Any]) -> dict[str, Any]:
        result: Result | None = None
        came_at: list[float] = []
        options = {name: job[name] for name in ("temperature", "seed") if name in job}
        async for piece in self._swarm.stream(PROMPT, max_new_tokens=job["new_tokens"], nodes=0, **options):
            result = piece.result
            came_at.append(time.monotonic())
            say("piece", pieces=len(came_at))
        assert result is not None, "a stream ends with a result or an error"
        stats = result.stats
        sweeps = [sweep for sweep in stats.sweeps if len(sweep.hops) == len(job["hops"])]  # not those that a repair cut
        links = [[sweep.first_link_ms, *(hop.link_ms for hop in sweep.hops)] for sweep in sweeps]
        return {
            "tokens": result.tokens,
            "repairs": len(stats.repairs),
            "pause_s": max((later - sooner for sooner, later in pairwise(came_at)), default=0.0),
            "first_token_s": stats.time_to_first_token_s,
            "links_ms": [statistics.median(column) for column in zip(*links, strict=True)],
        }

    async def _listed(self, peers: Sequence[str]) -> None:
        identity = self._swarm.identity
        while True:
            found = await self._registry.records(identity.fingerprint, identity.num_layers, within_s=0.0)
            if {record.peer for record in found} >= set(peers):
                return
            await asyncio.sleep(LIST_POLL_S)


def say(event: str, **words: object) -> None:
    """Tell an event, and when it was, on the clock that all of this machine's programs share."""
    tell(event, at=time.monotonic(), **words)


async def list_machines(registry: Registry, model: ModelIdentity) -> None:
    """Say each machine once it is listed, and again whenever its record changes."""
    known: dict[str, tuple[str, str]] = {}
    while True:
        with suppress(SwarmError):
            for record in await registry.records(model.fingerprint, model.num_layers, within_s=0.0):
                is_at = (record.address, str(record.reach.value))
                if known.get(record.peer) != is_at:
                    known[record.peer] = is_at
                    say("listed", peer=record.peer, address=record.address, reach=is_at[1])
        await asyncio.sleep(LIST_POLL_S)


async def some_model(registry: Registry) -> None:
    """Wait until the swarm serves a model."""
    while True:
        if await registry.models():
            return
        await asyncio.sleep(LIST_POLL_S)


async def work(peers: Sequence[str]) -> None:
    """Take jobs until standard input is closed."""
    membership = Membership(proxy=os.environ.get(VARIABLE))
    config = DhtConfig(join=tuple(peers), client_mode=True, membership=membership)
    async with DhtRegistry.open(config) as registry, TaskScope() as scope:
        chosen = ChosenMachines(registry)
        say("joined")
        await some_model(registry)
        connecting = AsyncSwarm.connect(
            TARGET, registry=chosen, threads=1, calibration=None, lookup=False, siblings=False
        )
        async with connecting as swarm:
            scope.spawn(list_machines(registry, swarm.identity))
            texts = HomesTexts(swarm, chosen, registry)
            say("up")
            async for job in jobs():
                await texts.tell(job)


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet_libraries()
    asyncio.run(work(sys.argv[1:]))
