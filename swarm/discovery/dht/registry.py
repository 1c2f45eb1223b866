"""The swarm's directory in hivemind's Kademlia DHT, as the program that uses it sees it.

hivemind itself runs in a process of its own (`swarm.discovery.dht.process`): its `DHT` class forks, which is unsafe
beside CUDA, gRPC, threads or a running loop. This side signs, asks, checks what comes back, and ends that process with
itself.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarm.discovery.dht.child import DhtPipe, start_pipe
from swarm.discovery.identity import Identity, is_peer_id
from swarm.discovery.node_record import MAX_TTL_S, NodeRecord, RecordError, live_records, open_filed, seal, tombstone
from swarm.discovery.registry import MODELS_KEY, RECENT_S, block_keys, record_keys
from swarm.errors import ConfigError, IdentityError, RegistryError
from swarm.ids import ModelIdentity, PeerId

JOIN_DEADLINE_S = 22.0
CALL_DEADLINE_S = 18.0
DIAL_BACK_DEADLINE_S = 25.0
PORTS_TRIED = 3
"""A port that was free when it was chosen may be somebody's a second later, when the daemon has started."""
_TAKEN = "address already in use"


@dataclass(frozen=True, slots=True)
class DhtConfig:
    """How to take part in the DHT.

    join: peers' multiaddresses. host: the IP address to listen on; port 0: any free one. announce_host: the IP address
    or name under which others reach this machine, where it differs. identity_path: None for a throw-away identity.
    client_mode: read only: nothing listens, nothing is stored here.
    """

    join: tuple[str, ...] = ()
    host: str = "0.0.0.0"
    port: int = 0
    announce_host: str | None = None
    identity_path: Path | None = None
    client_mode: bool = False


class DhtRegistry:
    """One machine's membership of the DHT: `async with DhtRegistry.open(config)`, or `await` it and `aclose`."""

    def __init__(self, config: DhtConfig) -> None:
        self._config = config
        self._listen = listen_on(config)
        self._held = ExitStack()
        self._pipe: DhtPipe | None = None
        self._addresses: list[str] = []
        self._cache: dict[str, tuple[float, list[bytes]]] = {}

    @classmethod
    def open(cls, config: DhtConfig) -> DhtRegistry:
        """Make a registry that joins when it is entered or awaited.

        Raises:
            ConfigError: a malformed address.
        """
        return cls(config)

    def __await__(self) -> Generator[Any, None, DhtRegistry]:
        """Join; raises what `__aenter__` raises."""
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        """Join the swarm.

        Raises:
            IdentityError: the identity file is bad or in use.
            RegistryError: no peer answers, or the clocks differ.
        """
        if self._pipe is None:
            try:
                await self._join()
            except BaseException:
                await self.aclose()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _join(self) -> None:
        if not self._config.client_mode:
            check_port_free(self._config)
        self._check_join()
        self._held.enter_context(self.identity.lock())
        for tries_left in reversed(range(PORTS_TRIED)):
            try:
                await self._start()
            except RegistryError as error:
                if not tries_left or not _chooses_port(self._config) or _TAKEN not in str(error):
                    raise
                await self._end()
                self._listen = listen_on(self._config)
            else:
                return

    async def _start(self) -> None:
        roomy = len(tempfile.gettempdir()) <= 50  # a socket's whole path has at most 104 bytes
        folder = Path(tempfile.mkdtemp(prefix="canopy-", dir=None if roomy else "/tmp"))
        self._held.callback(shutil.rmtree, folder, ignore_errors=True)
        path = self.identity.path
        if path is None:
            path = folder / "identity.key"
            self.identity.save(path)
        self._pipe = await start_pipe()
        arguments = {"folder": str(folder), "identity_path": str(path), "listen": asdict(self._listen)}
        described = await self._pipe.call("join", arguments, JOIN_DEADLINE_S)
        if described["peer_id"] != self.peer_id:
            raise RegistryError(f"the p2p daemon runs as {described['peer_id']}, not as {self.peer_id}")
        self._addresses = sorted(described["addresses"], key=_is_loopback)

    def _check_join(self) -> None:
        """Refuse to join this machine by itself: libp2p would say only that nobody answers."""
        join = self._config.join
        if join and all(address.endswith(f"/p2p/{self.peer_id}") for address in join):
            raise IdentityError(
                f"--join {join[0]} is this machine's own identity; if another machine runs there, "
                "a copy of its key is used here: give this one its own with --identity FILE"
            )

    @cached_property
    def identity(self) -> Identity:
        """Who this machine is."""
        path = self._config.identity_path
        return Identity.ephemeral() if path is None else Identity.load_or_create(path)

    @property
    def peer_id(self) -> PeerId:
        """This machine's name in the swarm."""
        return self.identity.peer_id

    def join_addresses(self) -> list[str]:
        """Multiaddresses for `--join`, those that other machines can reach first; empty for a client."""
        return [] if self._config.client_mode else list(self._addresses)

    async def announce(self, record: NodeRecord) -> None:
        """Publish this machine's record; the next one must expire later.

        Raises:
            RecordError: the record breaks its bounds.
            RegistryError: the DHT did not take it.
        """
        await self._store(record, left=False)

    async def withdraw(self, record: NodeRecord) -> None:
        """Take back what was last announced."""
        await self._store(tombstone(record), left=True)

    async def _store(self, record: NodeRecord, *, left: bool) -> None:
        if record.expires_at > time.time() + MAX_TTL_S:
            raise RecordError("expires_at", f"more than {MAX_TTL_S:.0f} s ahead")
        value = seal(record, self.identity, left=left)
        open_filed(value, record.peer, record.expires_at, time.time())
        keys = record_keys(record)
        self._cache = {name: (at - RECENT_S, blobs) for name, (at, blobs) in self._cache.items()}  # not recent any more
        arguments = {"keys": keys, "subkey": record.peer, "value": value, "expires_at": record.expires_at}
        if not await self._call("store", arguments):
            raise RegistryError(
                "the DHT refused this machine's record: it expires no later than the last one; "
                "is the clock right, and is no copy of this identity in use elsewhere?"
            )

    async def models(self) -> list[ModelIdentity]:
        """The models that somebody serves now."""
        records = live_records(await self._fetch([MODELS_KEY], 0.0), time.time())
        found = {record.model.fingerprint: record.model for record in records}
        return sorted(found.values(), key=lambda model: (model.name, model.fingerprint))

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = RECENT_S) -> list[NodeRecord]:
        """Valid, unexpired records of a model, the newest per peer, as known at most `within_s` seconds ago."""
        blobs = await self._fetch(block_keys(fingerprint, 0, num_layers), within_s)
        return [record for record in live_records(blobs, time.time()) if record.model.num_layers == num_layers]

    async def mine(self) -> NodeRecord | None:
        """The newest valid record under this machine's own name, whoever wrote it; always fresh."""
        records = live_records(await self._fetch([MODELS_KEY], 0.0), time.time())
        return next((record for record in records if record.peer == self.peer_id), None)

    async def _fetch(self, keys: list[str], within_s: float) -> list[bytes]:
        name, now = keys[0], time.monotonic()
        cached = self._cache.get(name)
        if cached is None or now - cached[0] >= within_s:
            cached = (now, await self._call("fetch", {"keys": keys}))
            if len(self._cache) >= 64:
                self._cache.clear()
            self._cache[name] = cached
        return cached[1]

    async def dial_back(self, address: str, nonce: bytes) -> bool | None:
        """Ask up to three peers to call `address`: does this machine answer there? None: nobody could be asked."""
        verdict: bool | None = await self._call("dial_back", {"address": address, "nonce": nonce}, DIAL_BACK_DEADLINE_S)
        return verdict

    async def _call(self, method: str, arguments: dict[str, Any], deadline_s: float = CALL_DEADLINE_S) -> Any:  # noqa: ANN401
        if self._pipe is None:
            raise RegistryError("this registry is not open")
        return await self._pipe.call(method, arguments, deadline_s)

    async def wait_closed(self) -> None:
        """Return when the DHT process has ended, for whatever reason."""
        if self._pipe is not None:
            await self._pipe.wait_ended()

    async def aclose(self) -> None:
        """Leave the DHT; its process and daemon are gone afterwards."""
        try:
            await self._end()
        finally:
            self._held.close()

    async def _end(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            await pipe.aclose()


@dataclass(frozen=True, slots=True)
class ListenOn:
    """The same as multiaddresses, as `swarm.discovery.dht.hivemind_node.Listen` takes it."""

    join: tuple[str, ...]
    host: tuple[str, ...]
    announce: tuple[str, ...] | None
    client: bool


def listen_on(config: DhtConfig) -> ListenOn:
    """Turn a configuration into multiaddresses.

    Raises:
        ConfigError: an address is malformed.
    """
    for address in config.join:
        check_join_address(address)
    try:
        host = ipaddress.ip_address("127.0.0.1" if config.host == "localhost" else config.host)
    except ValueError as error:
        raise ConfigError(f"--host {config.host!r} is not an IP address; 0.0.0.0 listens everywhere") from error
    port, announce = config.port, None
    if config.announce_host is not None:
        port = port or _free_port(host.version)
        announce = (f"{_host_part(config.announce_host)}/tcp/{port}",)
    return ListenOn(config.join, (f"/ip{host.version}/{host}/tcp/{port}",), announce, config.client_mode)


def _chooses_port(config: DhtConfig) -> bool:
    """Whether a port is chosen here, since it is announced before anything listens there."""
    return config.announce_host is not None and config.port == 0


def check_port_free(config: DhtConfig) -> None:
    """Raise ConfigError when somebody listens there; libp2p would share the port, and peers reach either of the two."""
    if config.port == 0:
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error}; choose another") from error


def check_ours(host: str) -> None:
    """Raise ConfigError unless this machine has that address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            raise ConfigError(f"--host {host}: this machine has no such address") from None


def check_join_address(address: str) -> None:
    """Raise ConfigError unless this is a libp2p address that ends in a peer id."""
    match = _JOIN.fullmatch(address)
    if match is None or not is_peer_id(match["peer"]) or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(
            f"--join {address[:120]!r} is no peer address; it looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm…, "
            "as `swarm bootstrap` and `node serve` print it"
        )


_JOIN = re.compile(
    r"/(ip4/[0-9.]+|ip6/[0-9A-Fa-f:.]+|dns[46]?/[A-Za-z0-9._-]+)"
    r"/(tcp|udp)/(?P<port>[0-9]{1,5})(/quic(-v1)?)?/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]+)"
)


def _host_part(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host):
            return f"/dns/{host}"
        raise ConfigError(f"--announce-address {host!r} is neither an IP address nor a host name") from error
    return f"/ip{address.version}/{address}"


def _free_port(version: int) -> int:
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_loopback(address: str) -> bool:
    return address.startswith(("/ip4/127.", "/ip6/::1/"))
