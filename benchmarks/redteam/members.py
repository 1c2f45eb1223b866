"""Members of the directory that keep none of its rules, in one process: each files what it is told at every peer.

python -m benchmarks.redteam.members JOIN

Standard input has msgpack messages [number, key file, entries]. The first one for a key file lets that identity join,
from a network of the attackers' own. Each entry is [key, subkey, data, expiry]; they are filed unchecked, in as few
calls as peers take. Each message is answered by a line: its number, and a digit per entry, 1 where a peer took it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgpack

from swarm.directory.dht.hivemind_node import DHTID, Daemon, DHTNode
from swarm.directory.dht.protocol import MAX_ASKED, kademlia_id
from swarm.directory.registry import storage_key

SOURCE = "127.0.66.1"
"""Where they come from: a network of its own, as a stranger's is."""
CALL_S = 10.0
JOINING = 4
"""Members that join at a time."""

Entry = tuple[str, str, bytes, float]


class Members:
    """All members of this process, by key file."""

    def __init__(self, join: str, group: asyncio.TaskGroup) -> None:
        self._join = join
        self._group = group
        self._nodes: dict[str, asyncio.Task[DHTNode | None]] = {}
        self._slots = asyncio.Semaphore(JOINING)

    async def answer(self, number: int, path: str, entries: Sequence[Entry]) -> None:
        taken = [False] * len(entries)
        if path not in self._nodes:
            self._nodes[path] = self._group.create_task(self._enter(path))
        node = await self._nodes[path]
        for start in range(0, len(entries) if node is not None else 0, MAX_ASKED):
            some = entries[start : start + MAX_ASKED]
            taken[start : start + len(some)] = await _file(node, some)
        sys.stdout.write(f"{number} {''.join(str(int(one)) for one in taken)}\n")
        sys.stdout.flush()

    async def _enter(self, path: str) -> DHTNode | None:
        """Join; None where that does not succeed, and then nothing is ever filed."""
        async with self._slots:
            with suppress(Exception):  # hivemind raises anything
                daemon = await Daemon.create(
                    initial_peers=[self._join],
                    host_maddrs=[f"/ip4/{SOURCE}/tcp/0"],  # it calls from where it listens
                    identity_path=path,
                    check_if_identity_free=False,
                    dht_mode="client",
                    auto_nat=False,
                    nat_port_map=False,
                    use_relay=False,
                )
                node_id = kademlia_id(daemon.peer_id)
                return await DHTNode.create(p2p=daemon, node_id=node_id, initial_peers=[self._join], client_mode=True)
        return None


async def _file(node: DHTNode, entries: Sequence[Entry]) -> list[bool]:
    """File at every peer that is known; which entries some peer took."""
    keys = [DHTID.from_bytes(storage_key(key)) for key, *_ in entries]
    _, subkeys, values, expiries = map(list, zip(*entries, strict=True))
    taken = [False] * len(entries)
    for peer in set(node.protocol.routing_table.uid_to_peer_id.values()):
        try:
            async with asyncio.timeout(CALL_S):
                answers = await node.protocol.call_store(peer, keys, values, expiries, subkeys)
        except Exception:  # noqa: BLE001 (refused, gone or too slow: the same to a stranger)
            continue
        taken = [one or bool(answer) for one, answer in zip(taken, answers or taken, strict=True)]
    return taken


async def serve(join: str) -> None:
    """Follow standard input until it closes; the daemons end with this process."""
    with tempfile.TemporaryDirectory(prefix="canopy-") as folder:
        Daemon.keep_sockets_in(folder)
        unpacker: Any = msgpack.Unpacker(max_buffer_size=64 << 20)
        async with asyncio.TaskGroup() as group:
            members = Members(join, group)
            while data := await asyncio.to_thread(os.read, sys.stdin.fileno(), 1 << 16):
                unpacker.feed(data)
                for number, path, entries in unpacker:
                    group.create_task(members.answer(number, path, entries))
            sys.exit()  # whatever still runs


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
