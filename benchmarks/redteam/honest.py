"""An honest user: generates the same few texts again and again, and compares each with what it must be.

Reads its job as JSON from the command line, writes a line of JSON per text, and ends when its standard input closes.
One that *stays* keeps its connection; one that *comes* connects anew for each text, as those do who read the directory
for the first time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from client.base.stats import Result
from client.library.aio import AsyncSwarm
from swarm.base.errors import SwarmError
from swarm.base.library_logging import quiet_libraries
from swarm.base.process_limits import freeze_imports
from swarm.demo import TARGET
from swarm.directory.dht.registry import DhtConfig, DhtRegistry

PATIENCE_S = 30.0
"""A text that is not over by then counts as lost."""
REJOIN_S = 8.0
"""For how long one that comes uses a membership of the directory."""
AFTER_ERROR_S = 0.3
Case = tuple[Sequence[int], Sequence[int]]
"""A prompt, and the tokens that must follow."""
Say = Callable[["HonestText"], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate.

    Attributes:
        cases: Prompts, and the tokens that must follow.
        comes: Whether it connects anew for each text.
    """

    join: str
    cases: Sequence[Case]
    comes: bool
    result: str


@dataclass(frozen=True, slots=True)
class HonestText:
    """One text. Times of day are in seconds.

    Attributes:
        ended: When it was there, or lost.
        connect_s: Until the swarm's model was found; 0 for one that stays.
        tokens: New tokens that came.
        right: Whether they are all, and the right ones.
    """

    began: float
    ended: float
    connect_s: float
    tokens: int
    right: bool
    repairs: int
    error: str = ""

    @property
    def seconds(self) -> float:
        """From asking to the last token."""
        return self.ended - self.began

    @property
    def tokens_per_s(self) -> float:
        """Speed, from asking to the last token; a text that was lost has none."""
        return 0.0 if self.error else self.tokens / max(self.ended - self.began, 1e-6)


class KeptMembership(DhtRegistry):
    """A membership of the directory that outlives the connections which use it."""

    async def __aexit__(self, *exc: object) -> None:
        """Stay."""


class HonestUser:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._registry: KeptMembership | None = None
        self._joined_s = 0.0

    async def work(self, say: Say) -> None:
        ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        cases = cycle(self._job.cases)
        while not ending.done():
            try:
                if self._job.comes:
                    await self._membership()
                    say(await self._text(next(cases), None, time.time()))
                    continue
                async with self._connected() as swarm:
                    while not ending.done():
                        say(await self._text(next(cases), swarm, time.time()))
            except SwarmError as error:
                say(HonestText(time.time(), time.time(), 0.0, 0, False, 0, f"{type(error).__name__}: {error}"))
                await asyncio.sleep(AFTER_ERROR_S)
        if self._registry is not None:
            await self._registry.aclose()

    async def _text(self, case: Case, swarm: AsyncSwarm | None, began: float) -> HonestText:
        prompt, right = case
        connected = began
        result: Result | None = None
        error = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                if swarm is not None:
                    result = await _generate(swarm, prompt, len(right))
                else:
                    async with self._connected() as fresh:
                        connected = time.time()
                        result = await _generate(fresh, prompt, len(right))
        except TimeoutError:
            error = f"TimeoutError: no text within {PATIENCE_S:.0f} s"
        except Exception as trouble:  # noqa: BLE001 (a client that breaks is what is looked for)
            error = f"{type(trouble).__name__}: {trouble}"
        ended = time.time()
        if result is None:
            await asyncio.sleep(AFTER_ERROR_S)
            return HonestText(began, ended, connected - began, 0, False, 0, error[:300])
        repairs = len(result.stats.repairs)
        return HonestText(
            began, ended, connected - began, len(result.tokens), tuple(result.tokens) == tuple(right), repairs, error
        )

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncSwarm]:
        if self._job.comes:
            options: dict[str, Any] = {"registry": await self._membership()}
        else:
            options = {"peers": (self._job.join,)}
        async with AsyncSwarm.connect(TARGET, threads=1, calibration=None, wait=10.0, **options) as swarm:
            yield swarm

    async def _membership(self) -> DhtRegistry:
        if self._registry is None or time.monotonic() - self._joined_s > REJOIN_S:
            if self._registry is not None:
                await self._registry.aclose()
            joined = KeptMembership(DhtConfig(join=(self._job.join,), client_mode=True))
            self._registry = await joined.__aenter__()
            self._joined_s = time.monotonic()
        return self._registry


async def _generate(swarm: AsyncSwarm, prompt: Sequence[int], count: int) -> Result:
    swarm.forget_texts()
    options: dict[str, Any] = {"max_new_tokens": count, "temperature": 0.0}
    result: Result | None = None
    async with aclosing(swarm.stream(prompt, **options)) as pieces:
        async for piece in pieces:
            result = piece.result
    assert result is not None, "a stream ends with a result or an error"
    return result


def main() -> None:
    torch.set_num_threads(1)
    quiet_libraries()
    freeze_imports()
    job = Job(**json.loads(sys.argv[1]))
    with Path(job.result).open("w", encoding="utf-8", buffering=1) as lines:
        asyncio.run(HonestUser(job).work(lambda told: print(json.dumps(asdict(told)), file=lines)))


if __name__ == "__main__":
    main()
