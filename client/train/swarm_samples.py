"""Samples training text through a swarm: the same lines as a local copy, by seeded generations side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from client.library.aio import AsyncSwarm
from client.options import ConnectOptions
from client.train.samples import SampleAmount, sampling_of, start_of
from swarm.protocol.messages import Sampling
from swarm.runtime.tasks import TaskScope

LINES = 8
"""Lines that are generated side by side, each in a session of its own, without drafts."""


@dataclass(frozen=True, slots=True)
class SwarmSampler:
    """Samples through an open connection, `LINES` at a time."""

    swarm: AsyncSwarm
    portal: BlockingPortal

    @property
    def at_once(self) -> int:
        """Sessions side by side."""
        return LINES

    def make(self, amount: SampleAmount, first: int, count: int) -> torch.Tensor:
        """The lines `[first, first + count)`: int32 [count, tokens].

        Raises:
            SwarmError: a line cannot be made, or was interrupted; what the file has is kept.
        """
        return torch.tensor(self.portal.call(self._make, amount, range(first, first + count)), dtype=torch.int32)

    async def _make(self, amount: SampleAmount, numbers: Sequence[int]) -> list[list[int]]:
        lines = [start_of(amount, number, self.swarm.target.tokenizer) for number in numbers]
        async with TaskScope() as scope:
            work = zip(lines, (sampling_of(amount, number) for number in numbers), strict=True)
            await asyncio.wait([scope.spawn(self._go_on(*one, amount.tokens)) for one in work])
        return lines

    async def _go_on(self, line: list[int], sampling: Sampling, tokens: int) -> None:
        """Generate until a line is long enough; it goes on after an end of text, as in a local copy."""
        while (missing := tokens - len(line)) > 0:
            result = await self.swarm.generate(
                line, max_new_tokens=missing, temperature=sampling.temperature, seed=sampling.seed, nodes=0
            )
            line += result.tokens


@contextmanager
def open_sampler(model: str, **options: Unpack[ConnectOptions]) -> Iterator[SwarmSampler]:
    """Join a swarm as a client of one model, to sample from it; arguments and errors as in `AsyncSwarm.connect`."""
    plain: ConnectOptions = {**options, "lookup": False, "calibration": None}
    with start_blocking_portal("asyncio") as portal:
        connecting = AsyncSwarm.connect(model, **plain)
        with portal.wrap_async_context_manager(connecting) as swarm:
            yield SwarmSampler(swarm, portal)
