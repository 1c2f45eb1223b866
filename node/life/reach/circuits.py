"""A machine's end of circuits: connections that it opens itself, spliced to its own gRPC server on loopback.

What arrives in this way counts for the address of whoever dialled: each dialler gets a loopback address of its own as
the source of the spliced connection (`swarm.base.quota.stand_in`), so that one relay's diallers share no quota.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

from swarm.base.logs import CountedLog, describe
from swarm.base.quota import Quota, QuotaLimits, RateLimit, stand_in
from swarm.base.tasks import TaskScope, spawn_on
from swarm.link.egress.streams import CHUNK_BYTES, Streams, connect, splice, tuned
from swarm.reach.paths.local_dialler import DialRelay

CONNECT_S: Final = 5.0
"""How long the connection to the relay may take; the relay gives the circuit up after a while too."""
MAX_CIRCUITS: Final = 128
"""Circuits of one relay at a time: it may lie about who dials, so all of its circuits together are bounded too."""
_OPENED: Final = "circuits"
_LIMITS: Final = QuotaLimits(rates={_OPENED: RateLimit(per_key=20, burst=MAX_CIRCUITS, total=100, total_burst=512)})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalServer:
    """Where this machine's own gRPC server listens.

    Attributes:
        host: an IP address that it is bound to; a wildcard stands for this machine.
        port: its TCP port.
    """

    host: str
    port: int

    @property
    def address(self) -> str:
        """The IP address to connect to from here."""
        ip = ip_address("127.0.0.1" if self.host == "localhost" else self.host)
        return "127.0.0.1" if ip.is_unspecified else str(ip)

    async def connect(self, source: str) -> Streams:
        """Open a connection to it.

        Args:
            source: the loopback address that it comes from; where the system has none but 127.0.0.1, that.

        Raises:
            OSError: it does not listen now.
        """
        here = self.address
        source_too: dict[str, Any] = {} if ":" in here else {"local_addr": (source, 0)}
        try:
            return tuned(*await asyncio.open_connection(here, self.port, limit=CHUNK_BYTES, **source_too))
        except ConnectionRefusedError:
            raise
        except OSError:  # such as on macOS, which has one loopback address
            return tuned(*await asyncio.open_connection(here, self.port, limit=CHUNK_BYTES))


class Circuits:
    """All circuits of this machine, bounded per relay."""

    def __init__(
        self,
        server: LocalServer,
        scope: TaskScope,
        clock: Callable[[], float] = time.monotonic,
        dial: DialRelay = connect,
    ) -> None:
        """Carry none yet.

        Args:
            dial: connects to `host:port` of a relay, or of a dialler.
        """
        self._dial = dial
        self._server = server
        self._scope = scope
        self._quota = Quota(_LIMITS, clock)
        self._open: dict[str, int] = {}
        self._log = CountedLog(logger, clock)

    def count(self, way: str) -> int:
        """Circuits of one way that are open now."""
        return self._open.get(way, 0)

    def take(self, way: str, address: str, token: str, dialler: str) -> None:
        """Open a connection for a circuit and splice it, in a task of its own; one too many is dropped.

        Args:
            way: whose circuits this one counts with: the relay's `host:port`.
            address: where to connect and say TAKE.
            token: of the circuit.
            dialler: `host:port` of whoever dialled, as far as it is known.
        """
        if not self._admit(way):
            return
        self._scope.spawn(self._carry(way, address, token, stand_in(way, dialler)))

    def adopt(self, way: str, ends: Streams, dialler: str) -> None:
        """Splice a connection that is open already, such as a punched one; one too many is closed."""
        if not self._admit(way):
            ends.close()
            return
        spawn_on(self._scope, ends.writer, self._splice_here(way, ends, stand_in(way, dialler)))

    def _admit(self, way: str) -> bool:
        if self.count(way) >= MAX_CIRCUITS or not self._quota.spend(_OPENED, way):
            self._log.say(way, f"{way} opens more circuits than one relay may; dropped one")
            return False
        self._open[way] = self.count(way) + 1
        return True

    async def _carry(self, way: str, address: str, token: str, source: str) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                far = await self._dial(address)
            far.writer.write(f"TAKE {token}\n".encode())
        except (OSError, TimeoutError) as error:
            self._log.say(address, f"no connection to {address} for a circuit: {describe(error)}")
            self._left(way)
            return
        await self._splice_here(way, far, source)

    async def _splice_here(self, way: str, far: Streams, source: str) -> None:
        """Splice a connection to the server; where that does not listen, the other end learns it at once."""
        try:
            near = await self._server.connect(source)
            await splice(far, near)
        except OSError as error:
            self._log.say("server", f"a circuit found no server here: {describe(error)}")
        finally:
            far.close()
            self._left(way)

    def _left(self, way: str) -> None:
        left = self.count(way) - 1
        if left:
            self._open[way] = left
        else:
            del self._open[way]
