"""Lending a relay: keeps one running in a process of its own, and offers it for as long as others reach it.

The parent's end of that process starts it, signs for it, hears its load, and ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError, RegistryError, SwarmError
from swarm.base.ids import PeerId
from swarm.base.logs import describe
from swarm.base.plain_text import plain_line
from swarm.base.tasks import TaskScope
from swarm.directory.address_proof import who_answer
from swarm.directory.dialable import is_public
from swarm.directory.identity import Identity
from swarm.directory.registry import Registry
from swarm.link.egress.streams import bracketed
from swarm.reach.relay.child import MAX_LINE_BYTES, RelaySettings
from swarm.reach.relay.server import FindNode, RelayLoad

logger = logging.getLogger(__name__)


START_S = 20.0
LEAVE_S = 4.0
_COMMAND = (sys.executable, "-P", "-m", "swarm.reach.relay.child")


class RelayProcess:
    """A relay that runs in a process of its own."""

    def __init__(self, process: Process, identity: Identity, ports: tuple[int, int | None], find: FindNode) -> None:
        self.port, self.tls_port = ports
        self.load: RelayLoad | None = None
        self._process = process
        self._identity = identity
        self._find = find

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ended(self) -> None:
        await self._process.wait()

    async def listen(self) -> None:
        """Answer what it asks, until it ends."""
        assert self._process.stdout is not None
        async with TaskScope() as scope:
            while line := await self._process.stdout.readline():
                message: dict[str, Any] = json.loads(line)
                if "load" in message:
                    self.load = RelayLoad(**message["load"])
                if "sign" in message:
                    signed = who_answer(self._identity, bytes.fromhex(message["sign"]))
                    await self._say(signed=signed.decode())
                if "find" in message:
                    scope.spawn(self._tell_where(PeerId(message["find"])))

    async def _tell_where(self, peer: PeerId) -> None:
        await self._say(found=peer, at=await self._find(peer))

    async def lend(self, mbit_per_s: float) -> None:
        await self._say(mbit_per_s=float(mbit_per_s))

    async def _say(self, **message: object) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()


@asynccontextmanager
async def relay_process(
    identity: Identity, settings: RelaySettings, find: FindNode | None = None
) -> AsyncIterator[RelayProcess]:
    """Run a relay; leaving ends it, and with it every circuit.

    Args:
        find: finds listed nodes for whoever comes by its TLS port; it never raises. None: there are none.

    Raises:
        SwarmError: it does not start; the message says why.
    """
    process = await _start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with TaskScope() as scope:
            scope.spawn(_log_lines(process))
            process.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
            relay = RelayProcess(process, identity, await _ports(process), find or _no_node)
            scope.spawn(relay.listen())
            yield relay
    finally:
        await _end(process)


async def _start() -> Process:
    root = str(Path(__file__).parents[3])  # found also where the package is not installed, whatever the folder
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    try:
        return await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        raise SwarmError(f"the relay's process cannot be started: {error.strerror or error}") from error


async def _no_node(_peer: PeerId) -> str:
    return ""


async def _ports(process: Process) -> tuple[int, int | None]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
    except TimeoutError:
        raise SwarmError(f"the relay did not start within {START_S:.0f} s") from None
    said: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
    if "error" in said:
        raise SwarmError(f"the relay did not start: {said['error']}")
    return said["port"], said["tls_port"]


async def _log_lines(process: Process) -> None:
    assert process.stderr is not None
    with suppress(ValueError):  # a line beyond all bounds: no more are read
        while line := await process.stderr.readline():
            logger.info("relay: %s", plain_line(line.decode(errors="replace").rstrip()))


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(LEAVE_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


CHECK_S = 60.0
"""How often peers are asked whether they reach the relay."""
UNSURE_S = 5.0
"""The same while nobody could be asked yet."""
MAX_MBIT = 100_000.0
RATE_S = 1.0
"""How often the rate is looked at that the relay is to carry."""
RESTART_S = 5.0
"""Pause before a relay that died is started again."""

NO_RELAY = "--tls-port offers the relay that this machine lends, and --relay-mbit 0 lends none: leave one of them out"


ReachedAt = Callable[[int], Awaitable[Sequence[str]]]
"""`host:port` under which others may reach a local TCP port, the best first, of each family one; none: they do not."""


def lent_settings(
    peer: PeerId, mbit_per_s: float, *, host: str, port: int | None, usual_port: int = 0
) -> RelaySettings | None:
    """What the options of a command line say; None where nothing is lent.

    Args:
        mbit_per_s: what it carries at most; 0 lends nothing.
        port: 0 takes a free one, and None the usual one.

    Raises:
        ConfigError: an option is none.
    """
    if not 0 <= mbit_per_s <= MAX_MBIT:
        raise ConfigError(f"--relay-mbit {mbit_per_s:g}: give Mbit/s from 0 (lend none) to {MAX_MBIT:g}")
    if port is not None and not 0 <= port < 65_536:
        raise ConfigError(f"--relay-port {port}: a TCP port is 1 to 65535, or 0 for a free one")
    if mbit_per_s == 0:
        return None
    chosen = usual_port if port is None else port
    return RelaySettings(peer, mbit_per_s, "127.0.0.1" if host == "localhost" else host, chosen, port is None)


def offered_hosts(addresses: Sequence[str]) -> list[str]:
    """The hosts of the multiaddresses under which most others reach a DHT peer, as they stand before a port.

    Args:
        addresses: as the registry lists them, best first; those with a public IP address are preferred.

    Returns:
        One of each family at most. Names count as IPv4.
    """
    hosts = sorted((address.split("/")[2] for address in addresses), key=lambda host: not _is_public(host))
    best: dict[bool, str] = {}
    for host in hosts:
        best.setdefault(":" in host, host)
    public = [host for host in best.values() if _is_public(host)]
    return [bracketed(host) for host in (public or list(best.values()))]


def _is_public(host: str) -> bool:
    try:
        return is_public(ip_address(host))
    except ValueError:
        return True  # a name: its owner gave it


@dataclass(slots=True)
class LentRelay:
    """A relay that this machine lends.

    Attributes:
        port: where it listens.
        tls_port: where it listens for TLS, if it does.
        addresses: `host:port` under which it is offered; none while it is not.
        load: what it carries; None before it said so.
    """

    port: int
    tls_port: int | None = None
    addresses: tuple[str, ...] = ()
    load: RelayLoad | None = None


@asynccontextmanager
async def lend(
    registry: Registry,
    settings: RelaySettings,
    reached_at: ReachedAt,
    mbit_per_s: Callable[[], float] | None = None,
    find: FindNode | None = None,
) -> AsyncIterator[LentRelay]:
    """Run a relay and offer it; leaving takes the offer back and ends it.

    It is offered once a peer has reached it and it has proved whose it is, and where nobody could be asked yet: the
    first machine of a swarm lends to the second. A relay that nobody reaches any more is offered no more.

    Args:
        reached_at: under which address others reach its port; asked again before each check.
        mbit_per_s: what it carries at most, as of now; None: what the settings say.
        find: finds listed nodes for whoever comes by its TLS port.

    Raises:
        SwarmError: it does not start.
    """
    async with TaskScope() as scope:
        started: asyncio.Future[LentRelay] = asyncio.get_running_loop().create_future()
        lender = _LentRelayKeeper(registry, settings, reached_at, mbit_per_s or (lambda: settings.mbit_per_s), find)
        scope.spawn(lender.run(started))
        lent = await started
        try:
            yield lent
        finally:
            if lent.addresses:
                with suppress(RegistryError):
                    await registry.offer_relay()


class _LentRelayKeeper:
    """Keeps a relay running, and offered while others reach it."""

    def __init__(
        self,
        registry: Registry,
        settings: RelaySettings,
        reached_at: ReachedAt,
        mbit_per_s: Callable[[], float],
        find: FindNode | None,
    ) -> None:
        self._find = find
        self._registry = registry
        self._settings = settings
        self._reached_at = reached_at
        self._mbit_per_s = mbit_per_s
        self._lent: LentRelay | None = None

    async def run(self, started: asyncio.Future[LentRelay]) -> None:
        """Run one, and another one at the same port where it dies."""
        while True:
            settings = replace(self._settings, mbit_per_s=self._mbit_per_s())
            try:
                async with relay_process(self._registry.identity, settings, self._find) as relay, TaskScope() as scope:
                    if self._lent is None:
                        self._lent = LentRelay(relay.port, relay.tls_port)
                        self._settings = replace(
                            settings, port=relay.port, takes_any_port=False, tls_port=relay.tls_port
                        )
                        started.set_result(self._lent)
                    scope.spawn(self._keep_offering(self._lent))
                    scope.spawn(self._keep_rate(relay, self._lent, settings.mbit_per_s))
                    await relay.wait_ended()
                    logger.warning("the relay that this machine lends has died; it is started again")
            except SwarmError as error:
                if self._lent is None:
                    started.set_exception(error)
                    return
                logger.warning("the relay that this machine lends is down: %s", describe(error))
            if self._lent is not None:
                await self._offer(self._lent, ())
            await asyncio.sleep(RESTART_S)

    async def _keep_rate(self, relay: RelayProcess, lent: LentRelay, told: float) -> None:
        while True:
            lent.load = relay.load
            wanted = self._mbit_per_s()
            if wanted != told:
                told = wanted
                await relay.lend(wanted)
            await asyncio.sleep(RATE_S)

    async def _keep_offering(self, lent: LentRelay) -> None:
        while True:
            asked = await self._reached_at(lent.port)
            verdicts = {address: await self._is_reached(address) for address in asked}
            is_unsure = None in verdicts.values()
            # What nobody could be asked about stays as it is; at first it is offered.
            reached = [
                address
                for address, verdict in verdicts.items()
                if verdict or (verdict is None and (not lent.addresses or address in lent.addresses))
            ]
            if reached or not is_unsure:
                await self._offer(lent, tuple(reached))
            await asyncio.sleep(UNSURE_S if is_unsure else CHECK_S)

    async def _is_reached(self, address: str) -> bool | None:
        try:
            return await self._registry.dial_back_relay(address)
        except RegistryError as error:
            logger.info("nobody could be asked whether this machine's relay is reached: %s", describe(error))
            return None

    async def _offer(self, lent: LentRelay, addresses: tuple[str, ...]) -> None:
        if lent.addresses == addresses:
            return
        try:
            await self._registry.offer_relay(*addresses)
        except RegistryError as error:
            logger.info("the relay's offer was not taken: %s", describe(error))
            return
        lent.addresses = addresses
        where = ", ".join(addresses)
        logger.info("lends a relay at %s" if where else "lends no relay now: %s", where or "nobody reaches it")
