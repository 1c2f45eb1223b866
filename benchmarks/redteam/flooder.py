"""A member of the directory that keeps none of its rules: it stores whatever it is given at every peer that it knows.

python -m benchmarks.redteam.flooder JOIN

Standard input has msgpack messages, each a list of [key, subkey, value, expiry]. They are stored in as few calls as the
peers take. Each message is answered by a line: how many were taken by some peer, and how many were refused by all.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import msgpack

from swarm.discovery.dht.hivemind_node import DHTID, Daemon, DHTNode

BATCH = 64
"""Records of one call."""
CALL_S = 10.0

Entry = tuple[str, str, bytes, float]


async def store(node: DHTNode, entries: Sequence[Entry]) -> tuple[int, int]:
    """Store at every known peer; how many some peer took, and how many none did."""
    keys = [DHTID.generate(key) for key, *_ in entries]
    subkeys = [subkey for _, subkey, *_ in entries]
    values = [msgpack.packb(value) for *_, value, _ in entries]
    expiries = [expiry for *_, expiry in entries]
    taken = [False] * len(entries)
    for peer in set(node.protocol.routing_table.uid_to_peer_id.values()):
        try:
            async with asyncio.timeout(CALL_S):
                answers = await node.protocol.call_store(peer, keys, values, expiries, subkeys)
        except Exception:  # noqa: BLE001 (refused, gone or too slow: the same to a flood)
            continue
        taken = [one or bool(answer) for one, answer in zip(taken, answers or taken, strict=True)]
    return sum(taken), len(taken) - sum(taken)


async def flood(join: str) -> None:
    """Join, and store what standard input has."""
    with tempfile.TemporaryDirectory(prefix="canopy-") as folder:
        Daemon.keep_sockets_in(folder)
        daemon = await Daemon.create(initial_peers=[join], dht_mode="client", no_listen=True, auto_nat=False)
        node = await DHTNode.create(p2p=daemon, initial_peers=[join], client_mode=True)
        say("ready")
        unpacker: Any = msgpack.Unpacker(max_buffer_size=64 << 20)
        while data := await asyncio.to_thread(os.read, sys.stdin.fileno(), 1 << 16):
            unpacker.feed(data)
            for entries in unpacker:
                for start in range(0, len(entries), BATCH):
                    say(*await store(node, entries[start : start + BATCH]))
                say("done")
        await node.shutdown()
        await daemon.shutdown()


def say(*words: object) -> None:
    """Tell the attack."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1]))
