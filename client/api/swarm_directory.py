"""The swarm's directory as a server of models uses it: joined once for all of them, and which models it lists.

Owns no model. Whoever is in a swarm may list a model by any name, and a name alone may have its files fetched from the
hub: nothing is fetched for a listing, but for a name that a caller asks for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, cast

from client.base.options import ConnectOptions
from client.library.aio import AsyncSwarm
from swarm.base.errors import IncompatibleDraft, RegistryError
from swarm.base.ids import ModelIdentity
from swarm.base.logs import CountedLog
from swarm.base.plain_text import plain_line
from swarm.directory.coverage import Coverage, cover
from swarm.directory.dht.addresses import OPEN_SWARM
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.registry import KNOWN_S, Registry

logger = logging.getLogger(__name__)

MAX_LISTED: Final = 32
"""Models of the swarm that are listed at most; those come first that it has known for longest."""
LISTED_S: Final = 5.0
"""How old a list may be that is told."""
PATIENCE_S: Final = 3.0
"""How long the directory is waited for before what was known is told."""
RETRY_S: Final = 5.0
"""Between tries to join."""


class SwarmDirectory:
    """The directory, while it is kept joined by `keep`."""

    def __init__(
        self,
        options: ConnectOptions,
        opened: Callable[[DhtConfig], Registry] = DhtRegistry.open,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to join.

        Args:
            options: how to join, and how every model is connected to.
            opened: makes the directory.
        """
        self._options = options
        self._opened = opened
        self._clock = clock
        self._registry: Registry | None = None
        self._why = RegistryError("the directory was not joined yet")
        self._tried = asyncio.Event()
        self._log = CountedLog(logger, clock)
        self._listed: list[Coverage] = []
        self._listed_at = float("-inf")
        self._is_listing = asyncio.Lock()

    @property
    def join(self) -> tuple[str, ...]:
        """Addresses of the swarm."""
        return tuple(self._options.get("peers", ()))

    @property
    def current(self) -> Registry:
        """The directory as it is joined now.

        Raises:
            RegistryError: it is not; the error says why.
        """
        if self._registry is None:
            raise self._why
        return self._registry

    async def joined(self) -> Registry:
        """The same, once the first try to join has ended."""
        await self._tried.wait()
        return self.current

    async def keep(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Join, and again where the directory's process ends; never ends itself.

        Raises:
            ConfigError: what the user asked for cannot be.
        """
        config = DhtConfig(join=self.join, client_mode=True, membership=self._options.get("membership", OPEN_SWARM))
        while True:
            try:
                async with self._opened(config) as registry:
                    self._registry = registry
                    self._tried.set()
                    await registry.wait_closed()
            except RegistryError as error:
                self._why = error
                self._log.say("join", f"{plain_line(str(error))}; trying again")
            finally:
                self._registry = None
            self._tried.set()
            await pause(RETRY_S)

    async def listed(self) -> Sequence[Coverage]:
        """Models of which somebody serves layers, each name once: those first of which every layer is served.

        As of now, or as last known where the directory takes too long.
        """
        async with self._is_listing:
            if self._clock() - self._listed_at >= LISTED_S:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        self._listed = await self._read()
                except (TimeoutError, RegistryError) as error:
                    logger.debug("the directory did not answer", exc_info=error)
                self._listed_at = self._clock()
        return self._listed

    async def _read(self) -> list[Coverage]:
        registry = await self.joined()
        models = (await registry.models())[:MAX_LISTED]

        async def covered(model: ModelIdentity) -> Coverage:
            return cover(model, await registry.records(model.fingerprint, model.num_layers, within_s=KNOWN_S))

        found = await asyncio.gather(*map(covered, models))
        found = sorted((one for one in found if one.records), key=lambda one: not one.complete)
        return list({one.model.name: one for one in reversed(found)}.values())[::-1]

    @asynccontextmanager
    async def connect(self, model: str, drafts: Sequence[Any], **further: Any) -> AsyncIterator[AsyncSwarm]:  # noqa: ANN401
        """A client of one model. A draft that does not fit it is left out, for it may be another model's.

        Args:
            drafts: what drafts for it.
            further: options that are this model's alone; errors as of `AsyncSwarm.connect`.
        """
        shared = cast("Registry", _Shared(self))
        options = cast("ConnectOptions", {**self._options, **further, "registry": shared, "draft": tuple(drafts)})
        async with AsyncExitStack() as stack:
            try:
                swarm = await stack.enter_async_context(AsyncSwarm.connect(model, **options))
            except IncompatibleDraft as error:
                logger.warning("%s: no draft: %s", model, plain_line(str(error)))
                options["draft"] = ()
                swarm = await stack.enter_async_context(AsyncSwarm.connect(model, **options))
            yield swarm

    def forgetful(self) -> dict[str, object]:
        """Options of a model that is opened by the way: it is not remembered as the one that was used last."""
        membership = self._options.get("membership", OPEN_SWARM)
        return {"membership": replace(membership, note_model=None), "fingerprint": None, "revision": None}


class _Shared:
    """The directory as one model's client has it: it stays when that ends, and is what is joined now."""

    def __init__(self, directory: SwarmDirectory) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> object:
        return getattr(self._directory.current, name)

    async def __aenter__(self) -> Self:
        await self._directory.joined()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it joined."""
