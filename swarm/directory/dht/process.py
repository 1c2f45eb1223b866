"""The process that owns the DHT node and its p2p daemon; `swarm.directory.dht.registry` starts it.

Requests arrive as msgpack `[number, method, arguments]` on standard input, answers leave as `[number, error, value]` on
standard output; error is nil or a message. The process ends when its standard input closes: its parent has ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO

import msgpack
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue

from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId, SwarmId, as_swarm_id, shown_swarm
from swarm.base.quota import is_stand_in
from swarm.base.tasks import TaskScope
from swarm.directory.dht import about
from swarm.directory.dht.addresses import (
    NOBODY_ANSWERS,
    OPEN_SWARM,
    SLOW,
    ListenAddresses,
    Membership,
    answers,
    check_join_address,
    host_and_port,
    lacking_family,
    names_at_fault,
)
from swarm.directory.dht.admission import (
    STRANGER,
    DirectoryAdmission,
    NetworkAdmission,
    StrangerRefused,
    SwarmAdmission,
    seal_for,
    unseal_from,
)
from swarm.directory.dht.dialback import (
    DEADLINE_S,
    HANDLER,
    PEER_HANDLER,
    RELAY_HANDLER,
    DialBack,
    call_hello,
    pack_request,
)
from swarm.directory.dht.hivemind_node import (
    Daemon,
    Multiaddr,
    P2PContext,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    ValidationError,
    dht_pb2,
    start_daemon,
)
from swarm.directory.dht.meeting import Meeting, OtherSwarm, meet
from swarm.directory.dht.protocol import DirectoryProtocol
from swarm.directory.dht.relay_offers import ASK_S, ASKS_ALL, PEERS_ASKED, RelayDesk, parse_offer
from swarm.directory.dht.relay_offers import HANDLER as OFFER_HANDLER
from swarm.directory.dht.search import DirectoryPeer
from swarm.directory.dht.way_out import WayOut, find_way_out
from swarm.directory.dialable import DialPolicy
from swarm.directory.record_store import open_item
from swarm.directory.registry import storage_key
from swarm.link.network_key import NetworkKey

MAX_MESSAGE_BYTES = 16 * 2**20
MAX_RUNNING = 40
"""More than the parent has unanswered at a time, so that no request waits behind others here."""
DIRECTORY_S = 3.0
"""For the directory, beside the time that the p2p daemon may take to start and to reach a peer."""
OTHERS_S = 1.0
"""How long other peers may take to say which swarm they are of once one has said it whose word counts most."""
MEETING_S = about.ASK_S + OTHERS_S
CALL_S = 15.0
SURVEY_S = 3.0
PEERS_SURVEYED = 8
_LEAVE_S = 4
_PEERS_ASKED = 3  # peers asked to dial back: one alone could veto
_NEXT_S = 1.5  # until the next one is asked; most answer sooner, and a call that nobody takes costs one seconds
MAX_NAMED = 16
"""Peers whose addresses are told to the parent, at most."""
NAMING_S = 1.5
"""How long their addresses are looked up."""


Request = tuple[int, str, dict[str, Any]]


class ParentEnded(Exception):
    """Standard input has closed."""


class RequestRefused(Exception):
    """A request that cannot be carried out; the message is the answer's error."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(slots=True)
class DhtPeer:
    """One running DHT node and its daemon.

    Attributes:
        admission: says which swarm it is of; None in an open one that has no id.
        others: peers that were to be joined through and are of other swarms.
    """

    daemon: Daemon
    directory: DirectoryPeer
    way: WayOut
    admission: DirectoryAdmission | None = None
    swarm: SwarmId | None = None
    others: tuple[tuple[SwarmId, str], ...] = ()
    desk: RelayDesk = field(default_factory=RelayDesk)

    @classmethod
    async def join(
        cls,
        listen: ListenAddresses,
        identity_path: str,
        start_s: float,
        stack: AsyncExitStack,
        which: Membership = OPEN_SWARM,
    ) -> DhtPeer:
        """Start both.

        Raises:
            RequestRefused: no peer answers, the clocks differ, or the daemon did not start; it begins with `SLOW`
                where only time was missing.
        """
        network, daemon = which.network, None
        way = await find_way_out(listen, stack)
        listen = way.led(listen)
        try:
            async with asyncio.timeout(start_s + MEETING_S + DIRECTORY_S):
                dialled = replace(listen, join=way.answering or listen.join)
                daemon = await start_daemon(dialled, identity_path, start_s)
                own_id = PeerId(daemon.peer_id.to_base58())
                found = await _meet(daemon, listen, which, way)
                admission: DirectoryAdmission | None = None if found.swarm is None else SwarmAdmission(found.swarm)
                if network is not None:
                    admission = NetworkAdmission(network, own_id)
                directory = await DirectoryPeer.join(daemon, found.listen, admission, found.alive)
                others = tuple((swarm, way.as_named(address)) for swarm, address in found.others)
                peer = cls(daemon, directory, way, admission, found.swarm, others)
                peer.directory.is_confined = way.is_confined
                if not listen.client:
                    await peer._answer_others(listen, network)
                return peer
        except TimeoutError as error:
            raise RequestRefused(await _late(start_s, listen, way)) from error
        except (P2PDaemonError, ValidationError, RuntimeError, OSError) as error:
            is_late = "start in" in str(error)
            told = None if daemon is None else await _told_apart(daemon, listen, network)
            reason = await _late(start_s, listen, way) if is_late else told or await _explain(str(error), listen, way)
            raise RequestRefused(reason) from error

    async def _answer_others(self, listen: ListenAddresses, network: NetworkKey | None) -> None:
        """Answer what other peers ask beside the DHT; in a private swarm its members alone."""
        own = listen.announce or [str(one) for one in await self.daemon.get_visible_maddrs(latest=True)]
        policy = await DialPolicy.of(*map(host_and_port, own), allow_private=listen.allow_private)
        service = DialBack(policy, partial(call_hello, network=network))

        def heard(request: BytesValue, context: P2PContext) -> tuple[PeerId, bytes]:
            asked = unseal_from(self.admission, context.remote_id, request.value)
            return PeerId(context.remote_id.to_base58()), asked

        async def dial_back(request: BytesValue, context: P2PContext) -> BytesValue:
            return BytesValue(value=await service.answer(*heard(request, context)))

        async def dial_back_relay(request: BytesValue, context: P2PContext) -> BytesValue:
            return BytesValue(value=await service.answer_relay(*heard(request, context)))

        async def dial_back_peer(request: BytesValue, context: P2PContext) -> BytesValue:
            return BytesValue(value=await service.answer_peer(*heard(request, context)))

        async def offer(request: BytesValue, context: P2PContext) -> BytesValue:
            return BytesValue(value=self.desk.answer(*heard(request, context)))

        async def say_about(request: BytesValue, context: P2PContext) -> BytesValue:
            protocol: DirectoryProtocol = self.directory.node.protocol
            origin = await protocol.origin(context.remote_id)
            meant = as_swarm_id(request.value)
            if None not in (meant, self.swarm) and meant != self.swarm:
                who = f"means {shown_swarm(meant)}, and this is {shown_swarm(self.swarm)}"
                protocol.say_refused(context.remote_id, StrangerRefused("", who))
            seen = "" if is_stand_in(origin.link) else origin.link
            return BytesValue(value=about.pack_about(time.time(), seen, self.swarm))

        await self.daemon.add_protobuf_handler(HANDLER, dial_back, BytesValue)
        await self.daemon.add_protobuf_handler(RELAY_HANDLER, dial_back_relay, BytesValue)
        await self.daemon.add_protobuf_handler(PEER_HANDLER, dial_back_peer, BytesValue)
        await self.daemon.add_protobuf_handler(OFFER_HANDLER, offer, BytesValue)
        await self.daemon.add_protobuf_handler(about.HANDLER, say_about, BytesValue)

    async def describe(self) -> dict[str, Any]:
        """This peer's id, and the multiaddresses under which it listens."""
        listens = not self.directory.node.protocol.client_mode
        addresses = [str(address) for address in await self.daemon.get_visible_maddrs(latest=True)] if listens else []
        found = {"swarm": self.swarm, "others": self.others, "egress": self.way.describe()}
        return {"peer_id": self.daemon.peer_id.to_base58(), "addresses": addresses, **found}

    async def peers(self) -> list[str]:
        """Multiaddresses of other peers of the swarm that can be joined through, at most `MAX_NAMED`."""
        known: list[PeerID] = list(self.directory.node.protocol.routing_table.uid_to_peer_id.values())
        chosen = random.sample(known, min(MAX_NAMED, len(known)))
        found: dict[PeerID, list[str]] = {}

        async def look_up(peer: PeerID) -> None:
            with suppress(P2PDaemonError, OSError, ValueError, asyncio.IncompleteReadError):
                found[peer] = await self.daemon.addresses_of(peer)

        with suppress(TimeoutError):
            async with asyncio.timeout(NAMING_S), asyncio.TaskGroup() as tasks:
                for peer in chosen:
                    tasks.create_task(look_up(peer))
        named = [
            self.way.meant.get(address, f"{address}/p2p/{peer.to_base58()}")
            for peer, own in found.items()
            for address in own
        ]
        return list(dict.fromkeys(address for address in named if _is_joinable(address)))

    async def dial_back(self, address: str, nonce: bytes, certificate: bytes) -> bool | None:
        """Ask up to three peers to call this machine; one that got through is enough."""
        return await self._called_by_others(HANDLER, pack_request(address, nonce, certificate))

    async def _called_by_others(self, handler: str, request: bytes) -> bool | None:
        """Ask one after another, a little apart, until one got through; None where none of them tried."""
        known: list[PeerID] = list(self.directory.node.protocol.routing_table.uid_to_peer_id.values())
        verdicts: list[object] = []

        async def ask(place: int, peer: PeerID) -> None:
            await asyncio.sleep(place * _NEXT_S)
            with suppress(TimeoutError, P2PHandlerError, P2PDaemonError, ValueError, msgpack.UnpackException):
                async with asyncio.timeout(DEADLINE_S + 1):
                    asked = BytesValue(value=seal_for(self.admission, peer, request))
                    answer = await self.daemon.call_protobuf_handler(peer, handler, asked, BytesValue)
                    verdicts.append(msgpack.unpackb(answer.value))
            if True in verdicts:
                for other in asking:
                    other.cancel()

        async with asyncio.TaskGroup() as tasks:
            chosen = enumerate(random.sample(known, min(_PEERS_ASKED, len(known))))
            asking = [tasks.create_task(ask(place, peer)) for place, peer in chosen]
        said = [verdict for verdict in verdicts if isinstance(verdict, bool)]
        return any(said) if said else None

    async def relays(self) -> list[tuple[str, str]]:
        """Who of a few known peers lends a relay, and where; in the order in which they were asked."""
        offers: dict[PeerID, tuple[str, ...]] = {}

        async def ask(peer: PeerID) -> None:
            question = BytesValue(value=seal_for(self.admission, peer, ASKS_ALL))
            try:
                answer = await self.daemon.call_protobuf_handler(peer, OFFER_HANDLER, question, BytesValue)
            except Exception:  # noqa: BLE001  (hivemind and strangers raise anything: that peer lends nothing)
                return silent.discard(peer)
            silent.discard(peer)
            offers[peer] = parse_offer(answer.value)

        asked = self.directory.known(PEERS_ASKED)
        silent = set(asked)
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_S), asyncio.TaskGroup() as tasks:
                for peer in asked:
                    tasks.create_task(ask(peer))
        if asked and len(silent) == len(asked):
            await self.directory.begin_anew(asked)
        return [(peer.to_base58(), address) for peer in asked for address in offers.get(peer, ())]

    async def survey(self) -> list[tuple[str, float | None, dict[str, Any] | None]]:
        """What a few known peers say: who, seconds by which its clock is ahead of this one, what it says of itself.

        A peer of an older release says nothing of itself; the second is None for who does not answer at all.
        """
        found: dict[PeerID, tuple[float, dict[str, Any] | None]] = {}

        async def ask(peer: PeerID) -> None:
            with suppress(Exception):  # hivemind and strangers raise anything: that peer did not answer
                found[peer] = await self._ask_about(peer) or await self._ask_time(peer)

        asked = self.directory.known(PEERS_SURVEYED)
        with suppress(TimeoutError):
            async with asyncio.timeout(SURVEY_S), asyncio.TaskGroup() as tasks:
                for peer in asked:
                    tasks.create_task(ask(peer))
        return [(peer.to_base58(), *found.get(peer, (None, None))) for peer in asked]

    async def _ask_about(self, peer: PeerID) -> tuple[float, dict[str, Any]] | None:
        asked_at = time.time()
        found = await _ask_about(self.daemon, peer, self.swarm)
        if found is None or found.time is None:
            return None
        return found.time - (asked_at + time.time()) / 2, asdict(found)

    async def _ask_time(self, peer: PeerID) -> tuple[float, None]:
        protocol, asked_at = self.directory.node.protocol, time.time()
        pong = await protocol.get_stub(peer).rpc_ping(dht_pb2.PingRequest(peer=protocol.node_info), timeout=SURVEY_S)
        return pong.dht_time - (asked_at + time.time()) / 2, None

    async def store(self, filings: list[tuple[str, str, bytes]], expires_at: float) -> dict[str, Any]:
        """File this machine's own items, given as key, subkey and sealed bytes; what became of them."""
        now = time.time()
        items = [open_item(storage_key(name), subkey, data, expires_at, now) for name, subkey, data in filings]
        return asdict(await self.directory.keep(items))

    async def answer(self, method: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401  (whatever the method gives)
        match method:
            case "describe":
                return await self.describe()
            case "store":
                return await self.store(**arguments)
            case "fetch":
                return await self.directory.fetch(**arguments)
            case "peers":
                return await self.peers()
            case "dial_back":
                return await self.dial_back(**arguments)
            case "dial_back_relay" | "dial_back_peer":
                handler = RELAY_HANDLER if method == "dial_back_relay" else PEER_HANDLER
                return await self._called_by_others(handler, msgpack.packb(arguments["address"]))
            case "survey":
                return await self.survey()
            case "relays":
                return await self.relays()
            case "offer_relay":
                self.desk.addresses = tuple(arguments["addresses"])
                return None
            case _:
                raise RequestRefused(f"no method {method}")

    async def leave(self) -> None:
        """Shut down the node, then its daemon."""
        await self.directory.node.shutdown()
        await self.daemon.shutdown()


async def _ask_about(daemon: Daemon, peer: PeerID, meant: SwarmId | None) -> about.About | None:
    """What a peer says of itself; None where it says nothing that can be read, as before release 0.2.

    Raises:
        TimeoutError, P2PDaemonError: it does not answer.
    """
    question = BytesValue(value=meant or b"")
    async with asyncio.timeout(about.ASK_S):
        try:
            answer = await daemon.call_protobuf_handler(peer, about.HANDLER, question, BytesValue)
        except (P2PHandlerError, DecodeError):
            return None
    return about.parse_about(answer.value)


async def _meet(daemon: Daemon, listen: ListenAddresses, which: Membership, way: WayOut) -> Meeting:
    """Ask the peers to join through what they speak and which swarm they are of.

    Raises:
        RequestRefused: none of them understands this program, or they are of another swarm.
    """
    said: dict[str, SwarmId | None] = {}
    answers: list[about.About] = []
    first = min((rank for rank, _ in listen.sources), default=0)
    waits_for = {one for one, (rank, _) in zip(listen.join, listen.sources, strict=True) if rank == first}
    own = daemon.peer_id.to_base58()
    silent = {one for one in listen.join if not one.endswith(f"/{own}")}
    is_known = asyncio.Event()

    async def ask(address: str) -> None:
        with suppress(TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError):
            found = await _ask_about(daemon, PeerID.from_base58(Multiaddr(address)["p2p"]), which.swarm)
            said[address] = None if found is None else found.swarm
            answers.extend([] if found is None else [found])
        silent.discard(address)
        if not silent or (address in said and address in waits_for):
            is_known.set()

    if silent:
        async with TaskScope() as scope:
            asking = [scope.spawn(ask(one)) for one in tuple(silent)]
            await is_known.wait()
            await asyncio.wait(asking, timeout=OTHERS_S)
    if (refused := about.refusal(answers)) is not None:
        raise RequestRefused(refused)
    if which.network is not None:
        return Meeting(None, listen, alive=tuple(one for one in listen.join if one in said))
    try:
        return meet(listen, which.swarm, said, is_certain=which.is_certain)
    except OtherSwarm as error:
        raise RequestRefused(way.as_named(str(error))) from error


def _is_joinable(address: str) -> bool:
    try:
        check_join_address(address)
    except ConfigError:
        return False
    return True


async def _told_apart(daemon: Daemon, listen: ListenAddresses, network: NetworkKey | None) -> str | None:
    """Why peers that are connected do not take this machine in: their swarm is private, or this machine's is."""
    wanted = {address.rpartition("/")[2] for address in listen.join}
    with suppress(P2PDaemonError, OSError, TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            for peer in [one.peer_id for one in await daemon.list_peers() if one.peer_id.to_base58() in wanted]:
                try:
                    await daemon.call_protobuf_handler(peer, _PING, dht_pb2.PingRequest(), dht_pb2.PingResponse)
                except P2PHandlerError as error:
                    return _PRIVATE if STRANGER in str(error) else None
                return None if network is None else _OPEN
    return None


_PING = f"{DirectoryProtocol.__name__}.rpc_ping"
_PRIVATE = (
    "the peers there hear members of their private swarm only, and this machine has not their network key: "
    "get an invite from a member, or give --network-key FILE"
)
_OPEN = "the peers there are of an open swarm, and this machine has a private one's network key: join without it"


async def _late(start_s: float, listen: ListenAddresses, way: WayOut) -> str:
    """Why nothing had started in time: peers that are not there, or a machine with too much to do."""
    if way.trouble or (listen.join and not await answers(listen.join)):
        return await _nobody(listen, way, f" (waited {start_s:.0f} s)")
    return f"{SLOW} within {start_s:.0f} s"


async def _nobody(listen: ListenAddresses, way: WayOut, waited: str = "") -> str:
    """A `RequestRefused` reason where no peer answers: who was asked, and what may be in the way."""
    trouble = f" ({way.trouble})" if way.trouble else ""
    found = f"{await names_at_fault(listen.join)}{lacking_family(listen.join)}"
    return f"{NOBODY_ANSWERS} {way.as_named(listen.listed())}{trouble}{waited}{found}"


async def _explain(reason: str, listen: ListenAddresses, way: WayOut) -> str:
    text = " ".join(reason.split())
    if "local time must be within" in text:
        return f"this machine's clock differs by more than 3 s from the swarm's: set it (NTP) and try again ({text})"
    if "can't access this node" in text:
        return f"the swarm's peers cannot reach this machine: open its DHT port or set --announce-address ({text})"
    if listen.join and "bootstrap" in text:
        return await _nobody(listen, way)
    return f"the p2p daemon did not start: {text[:300]}"


class ParentPipe:
    """The pipes from and to the parent process."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output

    async def requests(self, source: BinaryIO) -> AsyncIterator[Request]:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: _Pipe(reader), source)
        unpacker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES)
        while data := await reader.read(2**16):
            unpacker.feed(data)
            for number, method, arguments in unpacker:
                yield number, method, arguments

    def reply(self, number: int, error: str | None, value: Any = None) -> None:  # noqa: ANN401
        """Answer one request. The parent always reads, and has few requests open, so this does not block for long."""
        with suppress(BrokenPipeError):
            self._output.write(msgpack.packb([number, error, value]))
            self._output.flush()


class _Pipe(asyncio.StreamReaderProtocol):
    def connection_lost(self, exc: Exception | None) -> None:
        signal.alarm(_LEAVE_S)  # bounds the shutdown; the daemon dies with this process
        super().connection_lost(exc)


async def serve(parent: ParentPipe, source: BinaryIO) -> None:
    """Join on the first request, then answer until the parent closes the pipe or the daemon dies."""
    requests = parent.requests(source)
    number, _, arguments = await anext(requests)
    folder = str(arguments["folder"])
    try:
        Daemon.keep_sockets_in(folder)
        async with AsyncExitStack() as stack:
            peer = await _open(parent, number, arguments, stack)
            if peer is not None:
                await _answer_all(peer, parent, requests)
                await peer.leave()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _answer_all(peer: DhtPeer, parent: ParentPipe, requests: AsyncIterator[Request]) -> None:
    slots = asyncio.Semaphore(MAX_RUNNING)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_end_with_daemon(peer.daemon))
            async for request in requests:
                await slots.acquire()
                tasks.create_task(_answer(peer, parent, request, slots))
            raise ParentEnded
    except* ParentEnded:
        pass


async def _open(parent: ParentPipe, number: int, arguments: dict[str, Any], stack: AsyncExitStack) -> DhtPeer | None:
    try:
        listen, secret = ListenAddresses(**arguments["listen"]), arguments["network_key"]
        network = None if secret is None else NetworkKey(secret)
        swarm, is_certain = as_swarm_id(arguments["swarm"]), arguments["is_certain"]
        which = Membership(network, swarm=swarm, is_certain=is_certain)
        peer = await DhtPeer.join(listen, arguments["identity_path"], arguments["start_s"], stack, which)
    except RequestRefused as error:
        parent.reply(number, error.message)
        return None
    parent.reply(number, None, await peer.describe())
    return peer


async def _answer(peer: DhtPeer, parent: ParentPipe, request: Request, slots: asyncio.Semaphore) -> None:
    number, method, arguments = request
    try:
        async with asyncio.timeout(CALL_S):
            parent.reply(number, None, await peer.answer(method, arguments))
    except TimeoutError:
        parent.reply(number, f"the DHT did not answer within {CALL_S:.0f} s")
    except Exception as error:  # noqa: BLE001  (hivemind raises anything; the answer says so, and this process goes on)
        parent.reply(number, f"{method} failed: {error!r:.300}")
    finally:
        slots.release()


async def _end_with_daemon(daemon: Daemon) -> None:
    await daemon.wait_ended()
    sys.exit("the p2p daemon died")


def main() -> None:
    """Run until standard input closes. Ctrl-C and SIGTERM are left to the parent."""
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)  # unlike SIG_IGN, not inherited by the daemon
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints does not disturb the protocol
    try:
        asyncio.run(serve(ParentPipe(output), sys.stdin.buffer))
    except SystemExit as end:
        print(end, file=sys.stderr, flush=True)  # noqa: T201 - the parent shows its user the last line
        os._exit(1)  # or hivemind's destructors, which miss the loop, would have the last word


if __name__ == "__main__":
    main()
