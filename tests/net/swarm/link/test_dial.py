"""Connections that do not come about are given up and tried again soon."""

from __future__ import annotations

import asyncio

import grpc.aio

from swarm.base.ids import PeerId
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import Dialer, bind_port
from swarm.link.endpoint import Endpoint

SOMEBODY = PeerId("somebody")
CERTIFICATE = ServerCertificate.fresh(SOMEBODY)
FAR_BELOW_GRPCS_OWN_S = 12
"""gRPC's own limit of one attempt is 20 s."""


def endpoint(address: str) -> Endpoint:
    return Endpoint(SOMEBODY, address, CERTIFICATE.der)


async def test_a_machine_that_takes_a_connection_and_says_nothing_is_dialled_again() -> None:
    """As when the first frame was damaged on its way."""
    dialled: asyncio.Queue[None] = asyncio.Queue()
    done = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.put_nowait(None)
        await done.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, Dialer() as dialer:
        host, port = server.sockets[0].getsockname()[:2]
        dialer.channel(endpoint(f"{host}:{port}")).get_state(try_to_connect=True)
        async with asyncio.timeout(FAR_BELOW_GRPCS_OWN_S):
            await dialled.get()
            await dialled.get()
        done.set()


async def test_channels_to_machines_that_went_are_closed_and_connected_ones_are_left() -> None:
    server = grpc.aio.server()
    port = bind_port(server, "127.0.0.1:0", CERTIFICATE)
    await server.start()
    async with Dialer() as dialer:
        living, gone = endpoint(f"127.0.0.1:{port}"), endpoint("127.0.0.1:1")
        channel = dialer.channel(living)
        await channel.channel_ready()
        dead = dialer.channel(gone)
        await dialer.tidy()
        assert dialer.channel(gone) is dead, "it was asked for just now"
        await dialer.tidy(idle_s=-1.0)
        assert dialer.channel(living) is channel
        assert dialer.channel(gone) is not dead
    await server.stop(None)
