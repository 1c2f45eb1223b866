"""Many peers of the directory with ids chosen beside some keys, in one process; on order they keep nothing.

python -m benchmarks.redteam.eclipse JOIN COUNT KEY…

Prints `ready` when all have joined. From the first line of standard input on they say that they store, keep nothing,
and find nothing; until standard input closes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from typing import Any

from swarm.discovery.dht.hivemind_node import DHTID, Daemon, DHTNode


class Forgetful:
    """A storage that takes everything and has nothing."""

    def __init__(self, kept: Any) -> None:  # noqa: ANN401 (hivemind is untyped)
        self._kept = kept
        self.is_forgetful = False
        self.asked = 0

    def store(self, *arguments: Any, **options: Any) -> bool:  # noqa: ANN401
        """Say that it is stored."""
        self.asked += 1
        return True if self.is_forgetful else bool(self._kept.store(*arguments, **options))

    def store_subkey(self, *arguments: Any, **options: Any) -> bool:  # noqa: ANN401
        """Say that it is stored."""
        self.asked += 1
        return True if self.is_forgetful else bool(self._kept.store_subkey(*arguments, **options))

    def get(self, key: Any) -> Any:  # noqa: ANN401
        """Nothing."""
        return None if self.is_forgetful else self._kept.get(key)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._kept, name)


async def surround(join: str, count: int, keys: list[str]) -> None:
    """Join so many times, beside the keys in turn, and forget on order."""
    storages: list[Forgetful] = []
    with tempfile.TemporaryDirectory(prefix="canopy-") as folder:
        Daemon.keep_sockets_in(folder)
        daemons, nodes = [], []
        for number in range(count):
            daemon = await Daemon.create(initial_peers=[join], dht_mode="server", auto_nat=False, use_relay=False)
            beside = DHTID(int(DHTID.generate(keys[number % len(keys)])) ^ (1 + number))
            node = await DHTNode.create(p2p=daemon, node_id=beside, initial_peers=[join], cache_locally=False)
            storages.append(Forgetful(node.protocol.storage))
            node.protocol.storage = storages[-1]
            daemons.append(daemon)
            nodes.append(node)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        for storage in storages:
            storage.is_forgetful = True
        await asyncio.to_thread(sys.stdin.read)
        sys.stdout.write(f"{sum(storage.asked for storage in storages)} stores were taken\n")
        for node in nodes:
            await node.shutdown()
        for daemon in daemons:
            await daemon.shutdown()


if __name__ == "__main__":
    asyncio.run(surround(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
