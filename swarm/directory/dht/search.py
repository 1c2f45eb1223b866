"""Reading from and writing to the directory's peers, some of which may lie, drop, stall or invent neighbours.

A question goes to the `BEAM` peers nearest to its key and to the peers that this machine joined through: those were
chosen by its user, so they cannot be crowded out by ids that somebody places beside a key. All answers are united, in
an order that a stranger does not set: what this machine holds, what the peers joined through say, then the others in
turn, each oldest first. Whatever did not answer in time is left out.

What a machine files counts when peers give it back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

from swarm.directory.dht.addresses import ListenAddresses
from swarm.directory.dht.admission import DirectoryAdmission
from swarm.directory.dht.hivemind_node import DHTID, Daemon, DHTNode, Multiaddr, PeerID, traverse_dht
from swarm.directory.dht.protocol import DirectoryProtocol, KeyAnswer, ReportedItem, kademlia_id
from swarm.directory.record_store import FiledItem, open_item
from swarm.directory.registry import StorageKey, item_key, storage_key
from swarm.directory.sealing import RecordError

MAX_KEYS = 32
"""Keys of one look-up: all blocks of the deepest model."""
BEAM = 20
"""Peers nearest to a key that are asked."""
REPLICAS = 5
"""Peers that an item is filed at, beside those joined through and this machine."""
ROUNDS = 4
"""How often the next peers are tried in place of those that did not keep it."""
LOOK_UP_S = 5.0
"""Time for one look-up; what has been answered until then is used."""
KEEP_S = 8.0
"""Time after which no further peers are tried to file something at."""
READ_BYTES = 24 << 20
"""Of all answers to one look-up; afterwards peers are asked no more."""
ANEW_S = 10.0
"""Where nobody answers at all, connections are given up at most this often."""
DROP_S = 1.0
"""How long that may take."""
MAX_BANNED = 4_096
"""Peers that did not answer and are left alone for a while; beyond so many, all are asked again."""
KEY_ITEMS, FOUND_BYTES = 2_048, 12 << 20
"""Of one look-up's result: items per key, and bytes of all keys together. They are checked one by one up to there."""


@dataclass(slots=True)
class LookUp:
    """What a question brought in.

    Attributes:
        answers: per peer that answered, what it says of each key.
        until: when the question ends, by the monotonic clock.
    """

    until: float
    answers: dict[DHTID, dict[DHTID, KeyAnswer]] = field(default_factory=dict)
    peers: dict[DHTID, PeerID] = field(default_factory=dict)
    size: int = 0


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """What became of items that were filed.

    Attributes:
        asked: peers that were asked to hold them.
        copies: per item, how many of them gave it back.
        is_outdated: whether a peer holds something under the same name that expires no earlier.
    """

    asked: int
    copies: tuple[int, ...]
    is_outdated: bool


class DirectoryPeer:
    """This machine's Kademlia node, as the directory uses it.

    Attributes:
        is_confined: whether no peer can be dialled but those joined through, so that the others are not asked.
    """

    def __init__(self, node: DHTNode, joined: Iterable[PeerID]) -> None:
        self.node = node
        self._protocol: DirectoryProtocol = node.protocol
        admission = self._protocol.authorizer
        self._anchors = {kademlia_id(peer, admission): peer for peer in joined if peer != node.peer_id}
        self._anew_at = float("-inf")
        self.is_confined = False

    @property
    def joined(self) -> list[PeerID]:
        """The peers that this machine joined through, but itself."""
        return list(self._anchors.values())

    @classmethod
    async def join(
        cls,
        daemon: Daemon,
        listen: ListenAddresses,
        admission: DirectoryAdmission | None = None,
        alive: Sequence[str] = (),
    ) -> DirectoryPeer:
        """Join the DHT; raises what hivemind raises. Nothing is cached: values are read from peers each time.

        Args:
            alive: those of them that answer, where some do: hivemind waits for each that does not.
        """
        node = await DHTNode.create(
            p2p=daemon,
            node_id=kademlia_id(daemon.peer_id, admission),
            authorizer=admission,
            initial_peers=list(alive or listen.join) or None,
            bucket_size=BEAM,
            client_mode=listen.client,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            reuse_get_requests=False,
        )
        return cls(node, [PeerID.from_base58(Multiaddr(address)["p2p"]) for address in listen.join])

    def known(self, most: int) -> list[PeerID]:
        """Peers that can be asked something: those joined through, then others by lot; at most so many."""
        others = set(self._protocol.routing_table.uid_to_peer_id.values()) - set(self._anchors.values())
        drawn = random.sample(list(others), min(most, len(others)))
        return [*self._anchors.values(), *drawn][:most]

    async def fetch(self, names: Sequence[str], keys_per_question: int = 2) -> list[list[bytes]]:
        """What lies under these keys.

        Args:
            names: of at most `MAX_KEYS` keys.
            keys_per_question: how many fit into one answer.

        Returns:
            Per key, its checked items, the newest per subkey.
        """
        now = time.time()
        keys = {storage_key(name): DHTID.from_bytes(storage_key(name)) for name in names[:MAX_KEYS]}
        look_up = await self._look_up(list(keys.values()), keys_per_question)
        room = FOUND_BYTES // max(len(keys), 1)
        found = []
        for key, node_id in keys.items():
            own = [(item.subkey, item.data, item.expires_at) for item in self._protocol.records.get(key, now)]
            found.append(self._newest(key, self._in_order(own, look_up, node_id), room, now))
        return found

    def _in_order(self, own: list[ReportedItem], look_up: LookUp, key: DHTID) -> Iterator[ReportedItem]:
        """All rows about a key, those of the most trusted peers first."""
        rows = {node: answers.get(key, KeyAnswer()).rows for node, answers in look_up.answers.items()}
        yield from own
        for trusted in (True, False):
            for rank in zip_longest(*(told for node, told in rows.items() if (node in self._anchors) is trusted)):
                yield from (row for row in rank if row is not None)

    def _newest(self, key: StorageKey, rows: Iterable[ReportedItem], room: int, now: float) -> list[bytes]:
        """The newest valid item per subkey, in the order of the rows; work and result are bounded."""
        newest: dict[str, tuple[float, bytes]] = {}
        size = looked_at = 0
        for subkey, data, expires_at in rows:
            known = newest.get(subkey)
            if known is not None and known[0] >= expires_at:
                continue
            looked_at += 1
            if looked_at > 2 * KEY_ITEMS:
                break
            if (known is None and len(newest) >= KEY_ITEMS) or size + len(data) > room:
                continue
            try:
                item = open_item(key, subkey, data, expires_at, now)
            except RecordError:
                continue
            if not self._protocol.is_ours(item):
                continue
            size += len(data) - (len(known[1]) if known else 0)
            newest[subkey] = expires_at, data
        return [data for _, data in newest.values()]

    async def _look_up(self, keys: Sequence[DHTID], keys_per_question: int) -> LookUp:
        """Ask the peers nearest to each key, and those joined through, all at once."""
        result = LookUp(time.monotonic() + LOOK_UP_S)
        asking: dict[DHTID, asyncio.Task[dict[DHTID, tuple[DHTID, ...]]]] = {}
        for key in () if self.is_confined else keys:
            result.peers |= dict(self._protocol.routing_table.get_nearest_neighbors(key, BEAM))
        result.peers |= self._anchors
        groups = [keys[at : at + keys_per_question] for at in range(0, len(keys), keys_per_question)]

        async def ask_all(node: DHTID) -> dict[DHTID, tuple[DHTID, ...]]:
            answers = await asyncio.gather(*(self._ask(result, node, group) for group in groups))
            return {key: nearer for answer in answers for key, nearer in answer.items()}

        async def ask(node: DHTID, queries: Sequence[DHTID]) -> dict[DHTID, tuple[tuple[DHTID, ...], bool]]:
            task = asking.get(node)
            nearer = await (self._ask(result, node, queries) if task is None else asyncio.shield(task))
            is_over = time.monotonic() >= result.until  # then it ends; cancelled, it would leave tasks behind
            return {query: (nearer.get(query, ()), is_over) for query in queries}

        async with asyncio.TaskGroup() as tasks:
            asking |= {node: tasks.create_task(ask_all(node)) for node in self._anchors}
            await traverse_dht(
                list(keys),
                initial_nodes=list(result.peers),
                beam_size=BEAM,
                num_workers=BEAM,
                queries_per_call=keys_per_question,
                get_neighbors=ask,
                visited_nodes={key: {self.node.node_id} for key in keys},
            )
        if result.peers and not result.answers:
            await self.begin_anew(list(result.peers.values())[: BEAM + len(self._anchors)])
        return result

    async def begin_anew(self, silent: Sequence[PeerID]) -> None:
        """Nobody answered: it is this machine that was cut off, as by a restart of its router.

        Such connections carry nothing any more, but libp2p would keep them for half a minute or longer, and hivemind
        would ban the peers for twice as long each time. So both are given up; the next question dials.
        """
        self.node.blacklist.clear()
        now = time.monotonic()
        if now - self._anew_at < ANEW_S:
            return
        self._anew_at = now
        with suppress(TimeoutError):
            async with asyncio.timeout(DROP_S):
                await asyncio.gather(*map(self._protocol.p2p.hang_up, {*silent, *self._anchors.values()}))

    async def _ask(self, result: LookUp, node: DHTID, keys: Sequence[DHTID]) -> dict[DHTID, tuple[DHTID, ...]]:
        """Ask one peer and note its answer; whom it knows nearer to each key."""
        if len(self.node.blacklist.ban_counter) > MAX_BANNED:
            self.node.blacklist.clear()
        if result.size >= READ_BYTES:
            return {}
        answer = None
        with suppress(TimeoutError):
            async with asyncio.timeout(result.until - time.monotonic()):
                answer = await self.node._call_find_with_blacklist(result.peers[node], keys)
        if not answer:
            return {}
        told = result.answers.setdefault(node, {})
        for key, (found, nearer) in answer.items():
            told[key] = found
            result.size += found.size
            result.peers |= nearer
        if self.is_confined:
            return {}
        return {key: tuple(nearer) for key, (_, nearer) in answer.items()}

    async def keep(self, items: Sequence[FiledItem]) -> StoreOutcome:
        """File this machine's own items, and read each back from every peer that was asked to hold it."""
        started, outdated = time.monotonic(), not self._protocol.keep(items)
        # Beside a key nothing lies, so this finds the peers and fetches no data.
        beside = {DHTID.from_bytes(item.key): DHTID(int.from_bytes(item.key, "big") ^ 1) for item in items}
        look_up = await self._look_up(list(beside.values()), len(beside))
        queues = [_nearest_first(DHTID.from_bytes(item.key), look_up.answers, self._anchors) for item in items]
        copies, asked = Counter[int](), set[DHTID]()
        for turn in range(ROUNDS):
            extra = len(self._anchors) if turn == 0 else 0
            wanted: dict[DHTID, list[int]] = {}
            for number, queue in enumerate(queues):
                for node in [queue.pop(0) for _ in range(REPLICAS + extra - copies[number]) if queue]:
                    wanted.setdefault(node, []).append(number)
            if not wanted or time.monotonic() - started > KEEP_S:
                break
            asked |= set(wanted)
            stored = await asyncio.gather(
                *(self._keep_at(look_up.peers[node], [items[one] for one in chosen]) for node, chosen in wanted.items())
            )
            for chosen, (held, is_outdated) in zip(wanted.values(), stored, strict=True):
                outdated |= is_outdated
                copies.update(one for one, is_held in zip(chosen, held, strict=True) if is_held)
        return StoreOutcome(len(asked), tuple(copies[number] for number in range(len(items))), outdated)

    async def _keep_at(self, peer: PeerID, items: Sequence[FiledItem]) -> tuple[list[bool], bool]:
        """File items at one peer; which of them it gives back, and whether it has something later under their name."""
        keys = [DHTID.from_bytes(item.key) for item in items]
        taken = await self._protocol.call_store(
            peer,
            keys,
            [item.data for item in items],
            [item.expires_at for item in items],
            [item.subkey for item in items],
        )
        alone = {DHTID.from_bytes(item_key(item.key, item.subkey)): item for item in items if not item.group}
        back = await self._protocol.call_find(peer, list(alone)) if taken and alone else None
        told = {key: answer.rows for key, (answer, _) in (back or {}).items()}
        held, is_outdated = [], False
        for item, is_taken in zip(items, taken or [False] * len(items), strict=False):
            if item.group:
                held.append(bool(is_taken))  # as good as held where enough others point to the model
                continue
            rows = told.get(DHTID.from_bytes(item_key(item.key, item.subkey)), ())
            held.append(any(row[1] == item.data for row in rows))
            is_outdated |= any(_is_later(row, item) for row in rows)
        return held, is_outdated


def _nearest_first(key: DHTID, nodes: Iterable[DHTID], anchors: Iterable[DHTID]) -> list[DHTID]:
    """Peers to file something at: those joined through, then the others by their distance."""
    first = set(anchors)
    return sorted(nodes, key=lambda node: (node not in first, key.xor_distance(node)))


def _is_later(row: ReportedItem, item: FiledItem) -> bool:
    """Whether a peer holds another word of the same signer that expires no earlier; others cannot make it up."""
    if row[0] != item.subkey or row[1] == item.data or row[2] < item.expires_at:
        return False
    try:
        open_item(item.key, *row, time.time())
    except RecordError:
        return False
    return True
