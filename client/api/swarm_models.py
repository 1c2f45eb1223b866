"""The models that a server answers for: each is opened when it is first asked for, and given up when nobody does.

What is open holds a draft model, a tokenizer and kept sessions. So few are, and the one that was used least recently
makes room for another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final

from client.api.backend import NO_CARD, AnswerEvent, ApiCaller, Backend, Job, ModelCard
from client.api.errors import RETRY_S, invalid, named_models, unavailable_model
from client.api.queue import FairQueue, QueueFull
from client.api.swarm_backend import BackendLimits, SwarmBackend
from client.api.swarm_directory import SwarmDirectory
from client.api.swarm_link import SwarmSource
from swarm.base.errors import RouteError, SwarmError
from swarm.base.tasks import TaskScope
from swarm.directory.coverage import Coverage, fill_lines

OPENING_S: Final = 60.0
"""How long a request waits for its model to be opened: its small files and a draft may have to be fetched."""
AGAIN_S: Final = 30.0
"""After a model could not be opened, for how long nobody tries again."""
MAX_KNOWN: Final = 64
"""Models whose counters are kept, at most."""


@dataclass(frozen=True, slots=True)
class ModelSources:
    """Which models a server answers for, and where they are.

    Attributes:
        named: at the start, by the user; the first one is meant where a request names none.
        directory: lists the swarm's models; None where nothing but `named` can be known.
        listed: where a model is that the directory lists; None serves no other than `named`.
    """

    named: Sequence[SwarmSource] = ()
    directory: SwarmDirectory | None = None
    listed: Callable[[str], SwarmSource] | None = None


class ModelBackend:
    """One of the models: a `Backend` that is opened before it runs.

    Attributes:
        backend: over the swarm.
        users: runs that go on or wait for their turn.
        used_at: when it was last asked for.
    """

    def __init__(
        self,
        backend: SwarmBackend,
        make_open: Callable[[ModelBackend], Awaitable[None]],
        clock: Callable[[], float],
        *,
        is_first: bool,
    ) -> None:
        self.backend = backend
        self.is_first = is_first
        self.users = 0
        self.used_at = clock()
        self._make_open = make_open
        self._clock = clock
        self._failed_at = float("-inf")
        self._keeping: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.backend.link.name

    @property
    def is_open(self) -> bool:
        """Whether it is open, or being opened."""
        return self._keeping is not None and not self._keeping.done()

    async def card(self) -> ModelCard:
        return await self.backend.card()

    def known_card(self) -> ModelCard:
        return self.backend.known_card()

    def count(self, job: Job) -> int:
        return self.backend.count(job)

    def token_bytes(self, token: int) -> bytes:
        return self.backend.token_bytes(token)

    async def run(self, job: Job, caller: ApiCaller) -> AsyncGenerator[AnswerEvent, None]:
        self.users += 1
        try:
            await self._make_open(self)
            async with aclosing(self.backend.run(job, caller)) as events:
                async for event in events:
                    yield event
        finally:
            self.users -= 1
            self.used_at = self._clock()

    def open(self, scope: TaskScope) -> None:
        """Begin to open it, unless that has just failed."""
        self.used_at = self._clock()
        if not self.is_open and self.used_at - self._failed_at >= AGAIN_S:
            self.backend.link.reset()
            self._keeping = scope.spawn(self._keep(), "link")

    async def ready(self) -> None:
        """Return when it was found, could not be, or takes too long; whoever waits for it uses it."""
        self.users += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPENING_S):
                    await self.backend.link.tried.wait()
        finally:
            self.users -= 1
            self.used_at = self._clock()

    async def close(self) -> None:
        """Give up its link, its sessions and its draft."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            self._keeping = None

    async def _keep(self) -> None:
        """Keep the link; where it cannot be, only the first model ends the server."""
        try:
            await self.backend.link.keep()
        except SwarmError as error:
            if self.is_first:
                raise
            self._failed_at = self._clock()
            self.backend.link.refuse(unavailable_model(self.name, error))


class SwarmModels:
    """The models of one swarm.

    Attributes:
        queue: of all of them: callers have their turns whichever they ask for.
    """

    def __init__(
        self,
        sources: ModelSources,
        scope: TaskScope,
        limits: BackendLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open nothing yet.

        Args:
            scope: owns the links.
        """
        self._limits = limits or BackendLimits()
        self._scope = scope
        self._directory = sources.directory
        self._listed_source = sources.listed
        self._clock = clock
        self._changing = asyncio.Lock()
        self._known: dict[str, ModelBackend] = {}
        self._named = [source.name for source in sources.named]
        self.queue = FairQueue(self._limits.queue, clock)
        for number, source in enumerate(sources.named):
            self._add(source, is_first=number == 0)

    @property
    def known(self) -> Sequence[ModelBackend]:
        """Those that were named or asked for."""
        return tuple(self._known.values())

    async def keep(self) -> None:
        """Open the first one, and give up those that nobody asks for; never ends."""
        for name in self._named[:1]:
            await self._make_open(self._known[name])
        idle_s = self._limits.models.idle_s
        while True:
            await asyncio.sleep(max(idle_s / 4, 0.05))
            async with self._changing:
                for model in self._idle():
                    if self._clock() - model.used_at >= idle_s:
                        await model.close()

    async def cards(self) -> list[ModelCard]:
        listed = {} if self._directory is None else {one.model.name: one for one in await self._directory.listed()}
        others = [name for name in listed if self._listed_source is not None and name not in self._named]
        return [await self._card(name, listed.get(name)) for name in (*self._named, *others)]

    async def backend(self, name: str) -> Backend | None:
        model = self._known.get(name or next(iter(self._named), ""))
        if model is None:
            source = await self._listed(name)
            if source is None:
                return None
            model = self._known.get(name) or self._add(source, is_first=False)
        await self._make_open(model)
        await model.ready()
        return model

    async def _listed(self, name: str) -> SwarmSource | None:
        """Where a model is that the directory lists.

        Raises:
            ApiError: no name was given.
            RouteError: and there is none that could be.
        """
        names = [] if self._directory is None else [one.model.name for one in await self._directory.listed()]
        if self._listed_source is None or (name and name not in names):
            return None
        if name:
            return self._listed_source(name)
        if not names:
            raise RouteError("nobody serves a model in this swarm yet; serve one with node serve MODEL", ())
        raise invalid(f"Which model? This swarm has {named_models(names)}.", "model", "missing_required_parameter")

    def _add(self, source: SwarmSource, *, is_first: bool) -> ModelBackend:
        backend = SwarmBackend(source, self._scope, self._limits, self._clock, self.queue)
        self._known[source.name] = model = ModelBackend(backend, self._make_open, self._clock, is_first=is_first)
        idle = [one for one in self._known.values() if not one.is_open and not one.users and one is not model]
        for one in sorted(idle, key=lambda one: one.used_at)[: max(len(self._known) - MAX_KNOWN, 0)]:
            if one.name not in self._named:
                del self._known[one.name]
        return model

    async def _make_open(self, model: ModelBackend) -> None:
        """Open a model, in the place of another one where as many are open as may be.

        Raises:
            QueueFull: all of those are in use.
        """
        async with self._changing:
            most = self._limits.models.open
            while not model.is_open and sum(one.is_open for one in self._known.values()) >= most:
                idle = min(self._idle(), key=lambda one: one.used_at, default=None)
                if idle is None:
                    raise QueueFull(f"{most} models are in use, and no more may be open; ask again later", RETRY_S)
                await idle.close()
            model.open(self._scope)

    def _idle(self) -> list[ModelBackend]:
        """Those that may be given up."""
        return [one for one in self._known.values() if one.is_open and not one.users and not one.is_first]

    async def _card(self, name: str, coverage: Coverage | None) -> ModelCard:
        model = self._known.get(name)
        if model is not None and model.is_open:
            return await model.card()
        card = replace(NO_CARD, id=name) if model is None else replace(model.known_card(), is_open=False)
        if coverage is None:
            return card
        lines = fill_lines(coverage, self._directory.join if self._directory is not None else ())
        return replace(
            card,
            fingerprint=coverage.model.fingerprint,
            is_complete=coverage.complete,
            missing=tuple(map(str, coverage.missing)),
            serve_line=lines[0] if lines else "",
        )
