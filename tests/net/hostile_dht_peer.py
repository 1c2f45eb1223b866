"""A DHT peer that keeps none of our rules, as a program: it stores what it must not, and answers what is not so.

`python -m tests.net.hostile_dht_peer JOIN VICTIM_RECORD_HEX` prints as JSON which attacks were accepted, and then goes
on answering questions with nonsense until its input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgpack

from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span
from swarm.directory.dht.addresses import ListenAddresses
from swarm.directory.dht.hivemind_node import DHTID, Daemon, PeerID, dht_pb2, start_daemon
from swarm.directory.dht.protocol import DirectoryProtocol
from swarm.directory.dht.search import DirectoryPeer
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import ModelPointer, seal_pointer
from swarm.directory.node_record import NodeRecord, open_sealed, seal
from swarm.directory.registry import block_keys, models_key, record_keys, storage_key

FLOOD = 100
Attempt = tuple[str, bytes, float, str | None]
"""Key, value, expiry, subkey."""


def attempts_of(victim: NodeRecord, stolen: bytes, me: Identity) -> dict[str, Attempt]:
    """What must be refused, and the one thing that must not."""
    own = replace(victim, peer=me.peer_id, name="hostile", expires_at=time.time() + 80)
    soon, key = own.expires_at, block_keys(victim.model.fingerprint, victim.span.start, victim.span.end)[0]
    good, far = seal(own, me), replace(own, expires_at=time.time() + 3_600)
    forged_key, body, _ = msgpack.unpackb(stolen)
    body = body.replace(b"victim", b"v1ct1m")
    forged = msgpack.packb([forged_key, body, me.sign(b"canopy-record" + body)])
    other = Identity.ephemeral()
    bystander = replace(own, peer=other.peer_id)
    pointer = ModelPointer(me.peer_id, victim.model, soon)
    listing, listed = models_key(victim.model.fingerprint), seal_pointer(pointer, me)
    return {
        "rubbish under the victim's name": (key, b"rubbish", soon, victim.peer),
        "own record under the victim's name": (key, good, soon, victim.peer),
        "victim's record, forged": (key, forged, victim.expires_at, victim.peer),
        "victim's record, as it is": (key, stolen, victim.expires_at, victim.peer),
        "victim's record, kept for longer": (key, stolen, soon, victim.peer),
        "a record that another identity signed": (key, seal(bystander, other), soon, other.peer_id),
        "own record for an hour": (key, seal(far, me), far.expires_at, me.peer_id),
        "own record, signed for an hour": (key, seal(far, me), soon, me.peer_id),
        "value in place of the dictionary": (key, good, soon, None),
        "own record under a key of its own": ("canopy/v2/anything", good, soon, me.peer_id),
        "own record among the pointers": (listing, good, soon, me.peer_id),
        "own pointer under another model": (listing, listed, soon, f"{'0' * 64}/{me.peer_id}"),
        "victim's place in the list": (listing, listed, soon, f"{victim.model.fingerprint}/{victim.peer}"),
        "own record": (key, good, soon, me.peer_id),
        "own pointer": (listing, listed, soon, pointer.subkey),
    }


def flood_of(victim: NodeRecord, me: Identity) -> list[Attempt]:
    """Records and pointers of models that nobody has, all validly signed."""
    soon, attempts = time.time() + 80, list[Attempt]()
    for number in range(FLOOD):
        model = ModelIdentity.of(f"made-up-{number}", f"{number:064x}", "c3" * 32, "d4" * 32, 12)
        record = replace(victim, peer=me.peer_id, model=model, span=Span(0, 12), expires_at=soon)
        [_, block] = record_keys(record)
        pointer = ModelPointer(me.peer_id, model, soon)
        attempts.append((block, seal(record, me), soon, me.peer_id))
        attempts.append((models_key(model.fingerprint), seal_pointer(pointer, me), soon, pointer.subkey))
    return attempts


async def store(protocol: DirectoryProtocol, target: PeerID, attempts: list[Attempt]) -> list[bool]:
    keys, values, expiries, subkeys = zip(*attempts, strict=True)
    ids = [DHTID.from_bytes(storage_key(key)) for key in keys]
    answer = await protocol.call_store(target, ids, values, expiries, subkeys)
    return [bool(taken) for taken in answer or [False] * len(attempts)]


async def attack(join: str, stolen: bytes) -> None:
    victim = open_sealed(stolen, time.time())
    me = Identity.ephemeral()
    with tempfile.TemporaryDirectory() as folder:
        Daemon.keep_sockets_in(folder)
        me.save(Path(folder) / "identity.key")
        listen = ListenAddresses((join,), ("/ip4/127.0.0.1/tcp/0",), None, client=False)
        daemon = await start_daemon(listen, str(Path(folder) / "identity.key"), start_s=15.0)
        peer = await DirectoryPeer.join(daemon, listen)
        protocol = peer.node.protocol
        target = PeerID.from_base58(join.rpartition("/")[2])
        accepted: dict[str, object] = {}
        for name, attempt in attempts_of(victim, stolen, me).items():
            [accepted[name]] = await store(protocol, target, [attempt])
        flood = flood_of(victim, me)
        accepted["flood"] = sum([sum(await store(protocol, target, flood[at : at + 40])) for at in range(0, 200, 40)])
        await odd_answers(daemon, protocol)
        sys.stdout.write(json.dumps(accepted) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        await daemon.shutdown()


async def odd_answers(daemon: Daemon, protocol: DirectoryProtocol) -> None:
    """Answer every question with what no honest peer says."""
    odd = [b"\xc1", msgpack.packb(7), msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(["x", 1.0, []])))]

    async def find(request: dht_pb2.FindRequest, _context: object) -> dht_pb2.FindResponse:
        results = [
            dht_pb2.FindResult(
                type=dht_pb2.FOUND_DICTIONARY, value=odd[key[0] % len(odd)], expiration_time=float("inf")
            )
            for key in request.keys
        ]
        return dht_pb2.FindResponse(results=results, peer=protocol.node_info)

    name = DirectoryProtocol._get_handle_name(None, "rpc_find")
    await daemon.remove_protobuf_handler(name)
    await daemon.add_protobuf_handler(name, find, dht_pb2.FindRequest)


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], bytes.fromhex(sys.argv[2])))
