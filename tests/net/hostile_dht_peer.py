"""A DHT peer that keeps none of our rules, as a program: it tries to store what it must not.

`python -m tests.net.hostile_dht_peer JOIN VICTIM_RECORD_HEX` prints as JSON which attacks were accepted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace

import msgpack

from swarm.discovery.dht.hivemind_node import DHTID, Daemon, DHTNode
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord, open_sealed, seal
from swarm.discovery.registry import MODELS_KEYS, record_keys


def too_long(record: NodeRecord, identity: Identity) -> tuple[bytes, float]:
    far = replace(record, expires_at=time.time() + 3_600)
    return seal(far, identity), far.expires_at


async def attack(join: str, stolen: bytes) -> dict[str, bool]:
    from hivemind.dht.storage import (
        DictionaryDHTValue,  # here: after swarm.discovery.dht.hivemind_node, which keeps torch out
    )

    victim = open_sealed(stolen, time.time()).record
    me = Identity.ephemeral()
    own = replace(victim, peer=me.peer_id, name="hostile", expires_at=time.time() + 80)
    good, (far, far_expiry) = seal(own, me), too_long(own, me)
    key, soon = record_keys(victim)[1], own.expires_at
    forged_key, body, _ = msgpack.unpackb(stolen)
    body = body.replace(b"victim", b"v1ct1m")
    forged = msgpack.packb([forged_key, body, me.sign(b"canopy-record" + body)])
    dictionary = DictionaryDHTValue()
    dictionary.store(victim.peer, msgpack.packb(good), soon)
    attempts: dict[str, tuple[str, object, float, str | None]] = {
        "rubbish under the victim's name": (key, b"rubbish", soon, victim.peer),
        "own record under the victim's name": (key, good, soon, victim.peer),
        "victim's record, forged": (key, forged, victim.expires_at, victim.peer),
        "victim's record, kept for longer": (key, stolen, soon, victim.peer),
        "own record for an hour": (key, far, far_expiry, me.peer_id),
        "own record, signed for an hour": (key, far, soon, me.peer_id),
        "value in place of the dictionary": (MODELS_KEY, good, soon, None),
        "whole dictionary with the victim's name": (key, dictionary, soon, None),
        "own record under a key of its own": ("canopy/v1/anything", good, soon, me.peer_id),
        "own record": (key, good, soon, me.peer_id),
    }
    with tempfile.TemporaryDirectory() as folder:
        Daemon.keep_sockets_in(folder)
        daemon = await Daemon.create(initial_peers=[join])
        node = await DHTNode.create(p2p=daemon, initial_peers=[join])
        [target] = node.protocol.routing_table.uid_to_peer_id.values()
        accepted = {}
        for name, (where, value, expiry, subkey) in attempts.items():
            raw = value if isinstance(value, DictionaryDHTValue) else msgpack.packb(value)
            subkeys = None if subkey is None else [subkey]
            answer = await node.protocol.call_store(target, [DHTID.generate(where)], [raw], [expiry], subkeys)
            accepted[name] = answer == [True]
        await node.shutdown()
        await daemon.shutdown()
    return accepted


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(attack(sys.argv[1], bytes.fromhex(sys.argv[2])))))
