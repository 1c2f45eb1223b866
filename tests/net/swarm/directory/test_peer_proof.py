"""A peer proves who it is at its address, to whoever has joined nothing."""

from __future__ import annotations

import asyncio

from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity
from swarm.directory.peer_proof import is_proof, prove_peer, proven
from swarm.link.certificate import ServerCertificate


async def test_a_peer_answers_for_itself_and_for_nobody_else() -> None:
    other = Identity.ephemeral().peer_id
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1")) as peer:
        (address,) = peer.join_addresses()
        taken = f"{address.rpartition('/')[0]}/{other}"
        assert await proven([address, taken]) == {address: True, taken: False}
        assert await prove_peer(address.replace("/ip4/127.0.0.1/", "/dns4/localhost/")) is True
        tls = address.replace("/p2p/", "/tls/p2p/")
        assert await prove_peer(tls) is None, "of another kind"
    assert await prove_peer(address) is False, "nobody is there any more"


async def test_whatever_answers_is_no_proof() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 1_000)
        await reader.read()
        writer.close()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    peer = Identity.ephemeral().peer_id
    for answer in (babble, keep_silent):
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await prove_peer(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}", limit_s=0.5) is False


def test_a_certificate_of_another_kind_is_no_proof() -> None:
    identity = Identity.ephemeral()
    assert not is_proof(identity.peer_id, ServerCertificate.fresh(identity.peer_id).der)
    assert not is_proof(identity.peer_id, b"")
    assert not is_proof(identity.peer_id, b"\x30" * 9_000)
