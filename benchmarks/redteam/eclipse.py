"""Many peers of the directory under identities that lie beside some keys, in one process; on order they keep nothing.

python -m benchmarks.redteam.eclipse JOIN KEY_FILE…

Prints `ready` when all have joined. From the first line of standard input on they say that they store, keep nothing,
and find nothing; until standard input closes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence

from swarm.directory.dht.hivemind_node import DHTID, Daemon, DHTNode, PeerID
from swarm.directory.dht.protocol import kademlia_id
from swarm.directory.identity import Identity
from swarm.directory.record_store import FiledItem, RecordStore
from swarm.directory.registry import StorageKey, storage_key


class Forgetful(RecordStore):
    """A store that, once it is told so, takes everything and has nothing."""

    is_forgetful = False
    asked = 0

    def put(self, item: FiledItem, now: float) -> bool:
        """Say that it is held."""
        self.asked += 1
        return self.is_forgetful or super().put(item, now)

    def get(self, key: StorageKey, now: float) -> list[FiledItem]:
        return [] if self.is_forgetful else super().get(key, now)


def nearest(identities: Sequence[Identity], names: Sequence[str], count: int) -> list[Identity]:
    """Those that lie nearest to some keys, for each key in turn."""
    keys = [DHTID.from_bytes(storage_key(name)) for name in names]
    left = {who.peer_id: (kademlia_id(PeerID.from_base58(who.peer_id)), who) for who in identities}
    chosen = []
    for number in range(count):
        key = keys[number % len(keys)]
        peer = min(left, key=lambda one: key.xor_distance(left[one][0]))
        chosen.append(left.pop(peer)[1])
    return chosen


async def surround(join: str, paths: Sequence[str]) -> None:
    """Join under all these identities, and forget on order."""
    stores: list[Forgetful] = []
    with tempfile.TemporaryDirectory(prefix="canopy-") as folder:
        Daemon.keep_sockets_in(folder)
        daemons, nodes = [], []
        for path in paths:
            daemon = await Daemon.create(
                initial_peers=[join],
                identity_path=path,
                check_if_identity_free=False,
                dht_mode="server",
                auto_nat=False,
                use_relay=False,
            )
            node = await DHTNode.create(p2p=daemon, node_id=kademlia_id(daemon.peer_id), initial_peers=[join])
            stores.append(Forgetful())
            node.protocol.records = stores[-1]
            daemons.append(daemon)
            nodes.append(node)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        for store in stores:
            store.is_forgetful = True
            store.asked = 0
        await asyncio.to_thread(sys.stdin.read)
        sys.stdout.write(f"{sum(store.asked for store in stores)} items were taken and forgotten\n")
        sys.stdout.flush()
        for node in nodes:
            await node.shutdown()
        for daemon in daemons:
            await daemon.shutdown()


if __name__ == "__main__":
    asyncio.run(surround(sys.argv[1], sys.argv[2:]))
