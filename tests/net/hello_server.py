"""A gRPC server that says hello and answers pings, as somebody and with some certificate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio

from swarm.directory.address_proof import HELLO_METHOD, hello_response
from swarm.directory.identity import Identity
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import bind_port
from swarm.link.endpoint import Endpoint
from swarm.protocol import wire


@asynccontextmanager
async def answering(
    identity: Identity,
    certificate: ServerCertificate | None = None,
    host: str = "127.0.0.1",
    link: Callable[[AsyncIterator[bytes], object], Awaitable[None]] | None = None,
) -> AsyncIterator[Endpoint]:
    """Answer as `identity` until left.

    Args:
        identity: who answers.
        certificate: a fresh one of its own unless one is given.
        host: where it listens.
        link: what becomes of a session's stream; without it there are none.
    """
    shown = certificate or ServerCertificate.fresh(identity.peer_id)

    async def hello(request: bytes, _context: object) -> bytes:
        return hello_response(identity, request, shown.digest)

    service, method = HELLO_METHOD.strip("/").split("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_unary_rpc_method_handler(hello)}

    async def info(_request: bytes, _context: object) -> bytes:
        return b""

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    service, method = wire.INFO.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(info)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    if link is not None:
        service, method = wire.LINK.strip("/").split("/")
        streams: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.stream_stream_rpc_method_handler(link)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, streams),))
    port = bind_port(server, f"{host}:0", shown)
    await server.start()
    try:
        yield Endpoint(identity.peer_id, f"{host}:{port}", shown.der)
    finally:
        await server.stop(None)
