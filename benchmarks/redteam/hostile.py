"""A machine of the swarm that does what it likes: it stands in the directory, and answers what an attack says.

Nothing of it computes. Machines that compute and lie are in `benchmarks.redteam.byzantine`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc.aio

from benchmarks.redteam.kit import RECORD_S, Kit
from swarm.discovery.address_proof import hello_response
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord, tombstone
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.protocol import wire
from swarm.protocol.frames import split
from swarm.protocol.messages import Ack, Attach, Ping, Pong, Upstream
from swarm.transport.certificate import ServerCertificate
from swarm.transport.dial import bind_port

Behave = Callable[["HostileHop", Attach, "HopStream"], Awaitable[None]]


class HopStream:
    """One stream that an honest machine opened to a hostile hop."""

    def __init__(self, requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:  # noqa: ANN401
        self.requests = requests
        self.context = context
        self.parts = 1

    async def say(self, *messages: Upstream) -> None:
        """Send answers up the link."""
        for message in messages:
            await self.context.write(wire.encode_upstream(message))

    async def receipt(self) -> None:
        """Receipt and answer whatever comes, as a living machine would, until the stream ends."""
        async for part in self.requests:
            self.parts += 1
            await self.say(Ack(0, self.parts))
            with suppress(Exception):
                message = wire.decode_frame(wire.decode_part(part).data)
                if isinstance(message, Ping):
                    await self.context.write(wire.encode_upstream(Pong(message.nonce)))


class HostileHop:
    """A machine of the swarm that does what it likes: it stands in the directory and answers as `behave` says."""

    def __init__(self, kit: Kit, behave: Behave, who: Identity | None = None) -> None:
        self.kit = kit
        self.who = who or Identity.ephemeral()
        self._certificate = ServerCertificate.fresh(self.who.peer_id)
        self.address = ""
        self.record: NodeRecord
        self.asked = 0
        self._behave = behave
        self._info = b""

    @property
    def peer(self) -> PeerId:
        return self.who.peer_id

    async def start(self, span: str, **claims: Any) -> HostileHop:  # noqa: ANN401
        """Listen, and prepare the record of a machine that serves these layers."""
        self.kit.tally.identities += 1
        self._info = await self.kit.unary(await self.kit.connection(self.kit.ground.nodes[0]), wire.INFO)
        server = grpc.aio.server()
        port = bind_port(server, "127.0.0.1:0", self._certificate)
        server.add_generic_rpc_handlers((self._handlers(),))
        await server.start()
        self.kit._held.push_async_callback(server.stop, 0.0)
        self.address = f"127.0.0.1:{port}"
        claims = {"certificate": self._certificate.der, **claims}
        self.record = self.kit.record(self.who, Span.parse(span), self.address, **claims)
        return self

    async def announce(self) -> bool:
        """List it; whether the directory took that."""
        self.record = replace(self.record, sequence=self.record.sequence + 1, expires_at=time.time() + RECORD_S)
        return await self.kit.announce(self.record, self.who)

    async def withdraw(self) -> None:
        """Take it off the list."""
        await self.kit.announce(tombstone(self.record), self.who)

    def _handlers(self) -> grpc.GenericRpcHandler:
        async def hello(request: bytes, context: object) -> bytes:
            return hello_response(self.who, request, self._certificate.digest)

        async def info(request: bytes, context: object) -> bytes:
            return self._info

        async def link(requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:  # noqa: ANN401
            part = await anext(requests, b"")
            self.asked += 1
            self.kit.tally.acts += 1
            attach = wire.decode_frame(wire.decode_part(part).data)
            assert isinstance(attach, Attach), "an honest machine begins so"
            await self._behave(self, attach, HopStream(requests, context))

        async def replies(requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:  # noqa: ANN401
            await anext(requests, b"")
            nonce = 0
            while True:
                nonce += 1
                for part in split(Ping(nonce)):
                    await context.write(part)
                await asyncio.sleep(0.4)

        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            wire.HELLO: grpc.unary_unary_rpc_method_handler(hello),
            wire.INFO: grpc.unary_unary_rpc_method_handler(info),
            wire.LINK: grpc.stream_stream_rpc_method_handler(link),
            wire.REPLIES: grpc.stream_stream_rpc_method_handler(replies),
        }
        by_name = {path.rsplit("/", 1)[1]: handler for path, handler in methods.items()}
        return grpc.method_handlers_generic_handler(wire.SERVICE, by_name)
