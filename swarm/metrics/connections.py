"""The connections of an HTTP server: bounded in all and per address; idle ones make room, slow heads are not awaited.

Owns no requests: `swarm.metrics.http` answers them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from swarm.runtime.process_limits import file_limit
from swarm.runtime.quota import NEAR_WEIGHT, HoldingLimit, Quota, QuotaLimits, address_key, is_private

MAX_CONNECTIONS: Final = 800
OTHER_FILES: Final = 200
"""Files that the rest of the program may have open."""
PER_ADDRESS: Final = 64
HEAD_S: Final = 10.0
_KIND: Final = "connections"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What an HTTP server bears.

    Attributes:
        total: connections at a time.
        per_address: those of one address (`address_key`).
        head_s: how long a request's head may take, and a connection may be idle.
        stalled_s: how long a reader may take nothing of what waits for it; None bears it for ever.
    """

    total: int = MAX_CONNECTIONS
    per_address: int = PER_ADDRESS
    head_s: float = HEAD_S
    stalled_s: float | None = None


class Connections:
    """Those that are open. A new one beyond the limit takes the place of an idle one, of who has the most."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self.total = max(min(limits.total, file_limit() - OTHER_FILES), 1)
        holding = {_KIND: HoldingLimit(limits.per_address, self.total)}
        self._quota = Quota(QuotaLimits(holdings=holding, max_keys=self.total), clock, _weight)
        self._open: dict[HttpConnection, str] = {}

    def admit(self, connection: HttpConnection, address: str) -> bool:
        """Whether it may stay."""
        key = address_key(address)
        if self._quota.total(_KIND) >= self.total and self._has_room(key):
            self._end_an_idle_one()
        if not self._quota.take(_KIND, key):
            return False
        self._open[connection] = key
        return True

    def leave(self, connection: HttpConnection) -> None:
        """It has ended; or it never was admitted."""
        key = self._open.pop(connection, None)
        if key is not None:
            self._quota.give(_KIND, key)

    def _has_room(self, key: str) -> bool:
        return self._quota.held(_KIND, key) < self.limits.per_address * _weight(key)

    def _end_an_idle_one(self) -> None:
        held = self._quota.holders(_KIND)
        idle = [one for one in self._open if one.idle_since is not None]
        victim = max(idle, key=lambda one: (held[self._open[one]], -(one.idle_since or 0.0)), default=None)
        if victim is not None:
            self.leave(victim)
            victim.transport.abort()


class HttpConnection(H11Protocol):
    """uvicorn's connection, with a time within which each request's head must have come.

    Attributes:
        idle_since: since when no request is being answered; None while one is.
    """

    def __init__(self, connections: Connections, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._bounds = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.idle_since: float | None = connections.clock()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio: a connection beyond the limits is closed at once."""
        super().connection_made(transport)
        if self._bounds.admit(self, (transport.get_extra_info("peername") or ("",))[0]):
            self._watch()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when it has ended."""
        super().connection_lost(exc)
        self._bounds.leave(self)
        self._unwatch()
        self._end_stall()

    def pause_writing(self) -> None:
        """Called by asyncio: the reader is behind."""
        super().pause_writing()
        if self._bounds.limits.stalled_s is not None and self._stall is None:
            self._stall = self.loop.call_later(self._bounds.limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by asyncio: it has taken some."""
        super().resume_writing()
        self._end_stall()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called by uvicorn: the answer is written, and the next head may come."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle_since = None
            self._unwatch()
        elif self._deadline is None:
            self.idle_since = self._bounds.clock()
            self._deadline = self.loop.call_later(self._bounds.limits.head_s, self.transport.abort)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _weight(key: str) -> int:
    """A machine of the same network may be a proxy, through which many come."""
    return NEAR_WEIGHT if is_private(key) else 1
