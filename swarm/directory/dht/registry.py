"""The swarm's directory in hivemind's Kademlia DHT, as the program that uses it sees it.

hivemind itself runs in a process of its own (`swarm.directory.dht.process`): its `DHT` class forks, which is unsafe
beside CUDA, gRPC, threads or a running loop. This side starts that process and ends it and its daemon, exchanges
msgpack messages with it (`DhtPipe`), signs records, sends requests and checks what comes back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgpack

from swarm.base.errors import IdentityError, RegistryError
from swarm.base.ids import SWARM_ID_BYTES, ModelIdentity, PeerId, SwarmId, as_swarm_id, shown_swarm
from swarm.directory.dht.about import About
from swarm.directory.dht.addresses import (
    NOBODY_ANSWERS,
    REFUSED,
    SLOW,
    DhtConfig,
    MetSwarm,
    check_port_free,
    chooses_port,
    listen_addresses,
)
from swarm.directory.dht.way_out import read_egress
from swarm.directory.identity import Identity, fresh_swarm_id, keep_swarm, kept_swarm
from swarm.directory.model_pointer import listed_models, seal_announcement
from swarm.directory.node_record import NodeRecord, live_records, tombstone
from swarm.directory.peer_proof import is_provable
from swarm.directory.registry import MODELS_KEYS, RECENT_S, RelayOffer, block_keys, peer_key
from swarm.directory.sealing import MAX_TTL_S, RecordError
from swarm.link.egress.ports import Egress
from swarm.link.endpoint import Endpoint
from swarm.protocol.limits import MAX_LAYERS

_log = logging.getLogger(__name__)


_MAX_MESSAGE_BYTES = 16 * 2**20
_MAX_LINE_BYTES = 8_192
_MAX_RUNNING = 32  # requests that are unanswered at a time
_MAX_URGENT = 4  # those beside them, for which other requests never wait
_MAX_WAITING = 256  # requests that wait for their turn
NO_ANSWER = "the DHT process did not answer"
_LEAVE_S = 6.0  # for the process to end by itself


class DhtPipe(asyncio.SubprocessProtocol):
    """Requests to the DHT process and its answers. All callbacks run in the event loop; there is no task."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._slots = asyncio.Semaphore(_MAX_RUNNING)
        self._urgent_slots = asyncio.Semaphore(_MAX_URGENT)
        self._turns = 0
        self._ended = asyncio.Event()
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MAX_MESSAGE_BYTES)
        self._line = b""
        self._last_line = ""
        self._number = 0
        self._transport: asyncio.SubprocessTransport

    async def call(self, method: str, arguments: dict[str, Any], deadline_s: float, *, is_urgent: bool = False) -> Any:  # noqa: ANN401  (the answer)
        """Send the DHT process a request and return its answer.

        Args:
            is_urgent: whether it has places of its own, so that it waits for no look-up; announcements have.

        Raises:
            RegistryError: it refused, died, or did not answer in time, or too many wait already.
        """
        slots = self._urgent_slots if is_urgent else self._slots
        if self._turns >= _MAX_WAITING + _MAX_RUNNING and not is_urgent:
            raise RegistryError("too many questions to the DHT wait for their turn")
        self._turns += not is_urgent
        try:
            async with asyncio.timeout(deadline_s), slots:
                if self._ended.is_set():
                    raise self._gone()
                self._number += 1
                number = self._number
                answer = self._waiting[number] = asyncio.get_running_loop().create_future()
                try:
                    self._input.write(msgpack.packb([number, method, arguments]))
                    return await answer
                finally:
                    del self._waiting[number]
        except TimeoutError as error:
            raise RegistryError(f"{NO_ANSWER} within {deadline_s:.0f} s ({method})") from error
        finally:
            self._turns -= not is_urgent

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def aclose(self) -> None:
        """End the process and everything that it started."""
        self._input.close()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._ended.wait()
        except TimeoutError:
            _log.info("the DHT process did not leave by itself")
        finally:
            self._kill_group()
            self._transport.close()
        await self._ended.wait()

    @property
    def _input(self) -> asyncio.WriteTransport:
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def _kill_group(self) -> None:
        if self._ended.is_set():
            return  # its process id may belong to another process by now
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by asyncio: answers arrive on 1, log lines on 2."""
        if fd == 2:
            self._log_stderr(data)
            return
        try:
            self._unpacker.feed(data)
            for number, error, value in self._unpacker:
                self._resolve(number, error, value)
        except (ValueError, TypeError, msgpack.UnpackException):
            _log.exception("the DHT process does not speak its protocol")
            self._kill_group()

    def _resolve(self, number: int, error: str | None, value: Any) -> None:  # noqa: ANN401  (the answer)
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(RegistryError(error))

    def _log_stderr(self, data: bytes) -> None:
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._last_line = line[:_MAX_LINE_BYTES].decode(errors="replace").strip() or self._last_line
            _log.log(logging.WARNING if REFUSED in self._last_line else logging.INFO, "dht: %s", self._last_line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Called by asyncio: a process that has closed its output cannot answer any more."""
        if fd == 1:
            self._kill_group()

    def process_exited(self) -> None:
        """Called by asyncio when the process has ended: its daemon must end too."""
        self._kill_group()
        self._ended.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._gone())

    def _gone(self) -> RegistryError:
        return RegistryError(f"the DHT process has ended: {self._last_line or 'it was killed'}")


DHT_PROCESS = (sys.executable, "-P", "-m", "swarm.directory.dht.process")


async def start_pipe(command: Sequence[str] = DHT_PROCESS) -> DhtPipe:
    """Start the DHT process in a session of its own, so that Ctrl-C in the terminal reaches only its parent."""
    root = str(Path(__file__).parents[3])  # found also where the package is not installed, whatever the folder
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    loop = asyncio.get_running_loop()
    _, pipe = await loop.subprocess_exec(DhtPipe, *command, start_new_session=True, env=environment)
    return pipe


__all__ = ["DhtConfig", "DhtRegistry"]

START_S = (15.0, 60.0)
"""How long the p2p daemon may take to start, at each try: a machine that has much to do takes long."""
JOIN_SLACK_S = 20.0
"""How much later the answer comes, at most."""
CALL_DEADLINE_S = 18.0
DIAL_BACK_DEADLINE_S = 25.0
MAX_PROVEN = 4
"""Own addresses that other peers are asked to call."""
PORTS_TRIED = 3
"""Ports that are tried where one is chosen here: it may be taken again by the time that the daemon has started."""
SHARDS_PER_QUESTION = 8
"""Keys of models that are asked for together; one question is small where one key is full."""
ENOUGH_REPLICAS = 2
"""So many other peers should give an announcement back; it counts from the first, for this machine holds it too."""
_TAKEN = "address already in use"
SMALL_PACKETS = (
    "large packets do not pass on the way to the swarm, and nobody says so (path MTU): this program sends small ones; "
    "an MTU of 1280 on this machine's or the router's uplink would help all programs"
)
PEERS_DEADLINE_S = 4.0
"""For the addresses of other peers, which nobody waits for but who leaves."""
NOTE_S = 600.0
"""How often a machine that stays notes other peers of the swarm."""


@dataclass(frozen=True, slots=True)
class PeerSurvey:
    """What became of one question to a peer of the DHT.

    Attributes:
        ahead_s: seconds by which its clock is ahead of this machine's; None if it did not answer.
        about: what it says of itself; None if it did not answer, or its release cannot.
    """

    peer: PeerId
    ahead_s: float | None
    about: About | None


class DhtRegistry:
    """One machine's membership of the DHT: `async with DhtRegistry.open(config)`, or `await` it and `aclose`.

    Attributes:
        swarm_id: of the open swarm that it joined or began; None before, in a private one, and in one without an id.
    """

    def __init__(self, config: DhtConfig) -> None:
        self._config = config
        self._listen = listen_addresses(config)
        self._held = ExitStack()
        self._pipe: DhtPipe | None = None
        self._addresses: list[str] = []
        self._others: tuple[tuple[SwarmId, str], ...] = ()
        self._reached: dict[str, bool | None] = {}
        self.swarm_id: SwarmId | None = None
        self._cache: dict[str, tuple[float, list[bytes]]] = {}
        self._noted_at = float("-inf")
        self._egress: Egress | None = None
        self._tls_port: int | None = None

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
                await self._close()
                raise
            await self._note_peers()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _join(self) -> None:
        if not self._config.client_mode:
            check_port_free(self._config)
        self._check_join()
        try:
            self._held.enter_context(self.identity.lock())
            await self._start_in_time()
        except OSError as error:  # no process, file or socket to be had
            raise RegistryError(f"the DHT process cannot be started: {error.strerror or error}") from error

    async def _start_in_time(self) -> None:
        """Start, with more time at a second try where this machine was too busy.

        Raises:
            RegistryError: it did not start.
        """
        for start_s, longer_s in zip(START_S, (*START_S[1:], None), strict=True):
            try:
                await self._start_on_free_port(start_s)
            except RegistryError as error:
                if longer_s is None or not _is_late(error):
                    raise
                _log.warning(
                    "this machine is busy: joining took %.0f s; tried once more, for %.0f s", start_s, longer_s
                )
                await self._end()
            else:
                return

    async def _start_on_free_port(self, start_s: float) -> None:
        for tries_left in reversed(range(PORTS_TRIED)):
            try:
                await self._start(start_s)
            except RegistryError as error:
                if not tries_left or not chooses_port(self._config) or _TAKEN not in str(error):
                    raise
                await self._end()
                self._listen = listen_addresses(self._config)
            else:
                return

    async def _start(self, start_s: float) -> None:
        is_short = len(tempfile.gettempdir()) <= 50  # a socket's whole path has at most 104 bytes
        folder = Path(tempfile.mkdtemp(prefix="canopy-", dir=None if is_short else "/tmp"))
        self._held.callback(shutil.rmtree, folder, ignore_errors=True)
        path = self.identity.path
        if path is None:
            path = folder / "identity.key"
            self.identity.save(path)
        self._pipe = await start_pipe()
        membership = self._config.membership
        network = membership.network
        arguments = {
            "folder": str(folder),
            "identity_path": str(path),
            "listen": asdict(self._listen),
            "start_s": start_s,
            "network_key": None if network is None else network.secret,
            "swarm": self._meant(),
            "is_certain": membership.is_certain,
        }
        try:
            described = await self._pipe.call("join", arguments, start_s + JOIN_SLACK_S)
        except RegistryError as error:
            if membership.nobody and str(error).startswith(NOBODY_ANSWERS):
                raise RegistryError(f"{error}: {membership.nobody}") from error
            raise
        if described["peer_id"] != self.peer_id:
            raise RegistryError(f"the p2p daemon runs as {described['peer_id']}, not as {self.peer_id}")
        self._egress = read_egress(described["egress"], self._config.membership.proxy)
        if self._egress is not None and self._egress.is_narrow:
            _log.warning("%s", SMALL_PACKETS)
        self.swarm_id = as_swarm_id(described["swarm"])
        if self.swarm_id is not None and not self._config.client_mode:
            keep_swarm(self.identity.path, self.swarm_id)
        self._others = tuple((SwarmId(swarm), address) for swarm, address in described["others"])
        for swarm, address in self._others:
            _log.info("%s is of %s, and is left out", address, shown_swarm(swarm))
        self._addresses = sorted(described["addresses"], key=lambda one: (_is_loopback(one), one.startswith("/ip6/")))

    def _meant(self) -> SwarmId | None:
        """The id of the swarm that is meant: where one begins here, that which this identity was of last, or its own.

        Its own comes from its key, so that it is the same one after a restart where no file can be written. A private
        swarm is told by its network key.
        """
        membership = self._config.membership
        if membership.network is not None:
            return None
        if membership.swarm is not None or self._config.join or self._config.client_mode:
            return membership.swarm
        if membership.is_new:
            return fresh_swarm_id()
        return kept_swarm(self.identity.path) or SwarmId(self.identity.derive(b"swarm")[:SWARM_ID_BYTES])

    def _check_join(self) -> None:
        """Refuse to join this machine through itself: libp2p would report only that nobody answers."""
        join = self._config.join
        if join and all(address.endswith(f"/p2p/{self.peer_id}") for address in join):
            raise IdentityError(
                f"--join {join[0]} is this machine's own identity; if another machine runs there, "
                "a copy of its key is used here: give this one its own with --identity FILE"
            )

    @cached_property
    def identity(self) -> Identity:
        path = self._config.identity_path
        return Identity.ephemeral() if path is None else Identity.load_or_create(path)

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def egress(self) -> Egress | None:
        """How other connections should leave this machine, as joining has shown; None: as they are."""
        return self._egress

    def join_addresses(self) -> list[str]:
        """Multiaddresses for `--join`, those that other machines can reach first; empty for a client.

        Once another machine has proven one of them, those that none could reach are left out.
        """
        if self._config.client_mode:
            return []
        is_known = True in self._reached.values()
        proven = [one for one in self._addresses if not is_known or self._reached.get(one) is not False]
        return [*proven, *self._tls_addresses()]

    def is_proven(self, address: str) -> bool:
        """Whether another machine has reached this one at one of its multiaddresses."""
        return self._reached.get(address) is True

    async def prove_addresses(self) -> None:
        """Have other peers call this one at each of its addresses, and note those at which they reach it."""
        asked = [one for one in self.join_addresses() if not _is_loopback(one) and is_provable(one)][:MAX_PROVEN]
        with suppress(RegistryError):
            verdicts = await asyncio.gather(
                *(self._call("dial_back_peer", {"address": one}, DIAL_BACK_DEADLINE_S) for one in asked)
            )
            self._reached |= dict(zip(asked, verdicts, strict=True))
            if True in verdicts:
                await self._note_peers()

    async def offer_tls_port(self, port: int | None) -> None:
        """Name a TLS port of this machine too, which offers its directory (`swarm.reach.relay.tls_port`); None: no
        more."""
        self._tls_port = port
        if port is not None:
            await self._note_peers()

    def _tls_addresses(self) -> list[str]:
        """The same hosts at the TLS port."""
        if self._tls_port is None:
            return []
        places = dict.fromkeys("/".join(address.split("/")[1:3]) for address in self._addresses)
        return [f"/{place}/tcp/{self._tls_port}/tls/p2p/{self.peer_id}" for place in places]

    async def announce(self, record: NodeRecord) -> None:
        """Publish this machine's record; the next one must expire later.

        Raises:
            RecordError: the record breaks its bounds.
            RegistryError: the DHT did not take it.
        """
        await self._store(record)

    async def withdraw(self, record: NodeRecord) -> None:
        """Take back what was last announced."""
        await self._store(tombstone(record))

    async def _store(self, record: NodeRecord) -> None:
        if record.expires_at > time.time() + MAX_TTL_S:
            raise RecordError("expires_at", f"more than {MAX_TTL_S:.0f} s ahead")
        filings = seal_announcement(replace(record, swarm=self.swarm_id), self.identity)
        # What is cached lacks this record, so it no longer counts as recent.
        self._cache = {name: (at - RECENT_S, blobs) for name, (at, blobs) in self._cache.items()}
        arguments = {"filings": [(one.key, one.subkey, one.data) for one in filings], "expires_at": record.expires_at}
        kept = await self._call("store", arguments, is_urgent=True)
        if time.monotonic() - self._noted_at > NOTE_S:
            await self._note_peers()
        if kept["is_outdated"]:
            raise RegistryError(
                "the DHT refused this machine's record: it expires no later than the last one; "
                "is the clock right, and is no copy of this identity in use elsewhere?"
            )
        self._check_kept(kept["asked"], kept["copies"][:-1])
        if kept["copies"][-1] < min(1, kept["asked"]) and not record.left:
            _log.warning("this machine serves, but the DHT's list of models is full: clients may not see its model")

    def _check_kept(self, asked: int, copies: Sequence[int]) -> None:
        """An announcement counts once another peer gave it back; this machine answers for it too."""
        kept = min(copies)
        if asked and not kept:
            raise RegistryError(f"the DHT did not keep this machine's record: none of {asked} peers gave it back")
        if kept < min(ENOUGH_REPLICAS, asked):
            _log.warning("of %d peers of the DHT only %d gave this machine's record back", asked, kept)

    async def models(self) -> list[ModelIdentity]:
        """The models that nodes say they serve, each fingerprint once; in front those known for longest."""
        shards = await self._call("fetch", {"names": MODELS_KEYS, "keys_per_question": SHARDS_PER_QUESTION})
        blobs = [blob for rank in zip_longest(*shards) for blob in rank if blob is not None]
        return listed_models(blobs, time.time())

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = RECENT_S) -> list[NodeRecord]:
        """Valid, unexpired records of a model, the newest per peer, from an answer at most `within_s` seconds old.

        Raises:
            RegistryError: the DHT did not answer, or no model has so many layers.
        """
        if not 0 < num_layers <= MAX_LAYERS:
            raise RegistryError(f"no model has {num_layers} layers")
        blobs = await self._fetch(block_keys(fingerprint, 0, num_layers), within_s)
        return [record for record in live_records(blobs, time.time()) if record.model.num_layers == num_layers]

    async def mine(self) -> NodeRecord | None:
        """The newest valid record under this machine's own name, whoever wrote it; always fresh."""
        return await self.record_of(self.peer_id)

    async def record_of(self, peer: PeerId) -> NodeRecord | None:
        """The newest valid record of any machine, by its name; always fresh."""
        found = await self._call("fetch", {"names": [peer_key(peer)]}, is_urgent=True)
        records = live_records(chain.from_iterable(found), time.time())
        return next((record for record in records if record.peer == peer), None)

    async def survey(self) -> list[PeerSurvey]:
        """What a few known peers say of themselves and of this machine; those joined through come first.

        Raises:
            RegistryError: the DHT process did not answer.
        """
        return [
            PeerSurvey(
                PeerId(peer),
                ahead_s,
                None
                if about is None
                else About(
                    release=about["release"],
                    formats=tuple(about["formats"]),
                    wires=tuple(about["wires"]),
                    time=about["time"],
                    seen=about["seen"],
                    swarm=about["swarm"],
                ),
            )
            for peer, ahead_s, about in await self._call("survey", {})
        ]

    async def _fetch(self, keys: list[str], within_s: float) -> list[bytes]:
        name, now = keys[0], time.monotonic()
        cached = self._cache.get(name)
        if cached is None or now - cached[0] >= within_s:
            found = await self._call("fetch", {"names": keys})
            cached = (now, list(chain.from_iterable(found)))
            if len(self._cache) >= 64:
                self._cache.clear()
            self._cache[name] = cached
        return cached[1]

    async def dial_back(self, endpoint: Endpoint, nonce: bytes) -> bool | None:
        """Whether this machine answers at its address: up to three peers call it; None if none could be asked."""
        arguments = {"address": endpoint.address, "nonce": nonce, "certificate": endpoint.certificate}
        verdict: bool | None = await self._call("dial_back", arguments, DIAL_BACK_DEADLINE_S)
        return verdict

    async def dial_back_relay(self, address: str) -> bool | None:
        """Whether this machine's relay answers there: up to three peers call it; None if none could be asked."""
        verdict: bool | None = await self._call("dial_back_relay", {"address": address}, DIAL_BACK_DEADLINE_S)
        return verdict

    async def relays(self) -> list[RelayOffer]:
        """The relays that up to 16 known peers lend; those of the peers joined through come first.

        Raises:
            RegistryError: the DHT process did not answer.
        """
        found = await self._call("relays", {})
        return [RelayOffer(PeerId(peer), address) for peer, address in found]

    async def offer_relay(self, *addresses: str) -> None:
        """Say to whoever asks that this machine lends a relay there; none: no more. Nobody asks a client."""
        await self._call("offer_relay", {"addresses": list(addresses)}, is_urgent=True)

    async def _call(
        self, method: str, arguments: dict[str, Any], deadline_s: float = CALL_DEADLINE_S, *, is_urgent: bool = False
    ) -> Any:  # noqa: ANN401
        if self._pipe is None:
            raise RegistryError("this registry is not open")
        return await self._pipe.call(method, arguments, deadline_s, is_urgent=is_urgent)

    async def wait_closed(self) -> None:
        if self._pipe is not None:
            await self._pipe.wait_ended()

    async def _note_peers(self) -> None:
        """Let those peers be remembered through which the swarm can be joined again."""
        note = self._config.membership.note_peers
        if note is None or self._pipe is None:
            return
        self._noted_at = time.monotonic()
        with suppress(RegistryError):
            peers = await self._call("peers", {}, PEERS_DEADLINE_S)
            note(MetSwarm(self.swarm_id, tuple(peers), tuple(self.join_addresses()), self._others))

    async def aclose(self) -> None:
        """Leave the DHT; its process and daemon are gone afterwards."""
        await self._close()

    async def _close(self) -> None:
        try:
            await self._end()
        finally:
            self._held.close()

    async def _end(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            await pipe.aclose()


def _is_late(error: RegistryError) -> bool:
    """Whether time was all that was missing: for the daemon, or before that for the process that starts it."""
    return str(error).startswith((SLOW, NO_ANSWER))


def _is_loopback(address: str) -> bool:
    return address.startswith(("/ip4/127.", "/ip6/::1/"))
