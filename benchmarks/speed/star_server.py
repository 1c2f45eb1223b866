"""A server of the star: some layers of the target, asked by the client itself, that keep KV and forward nothing.

One gRPC stream is one session and ends with it. Sweeps come in with ids at the first server and with rows at the
others; rows go back to the client, or picks from the last one. No engine, no queue, no registry: sweeps are run in the
event loop as they come, which spares a change of threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from node.model.span import SpanModel
from node.session.scheduler import Batch, BatchMember
from node.session.service import RpcContext
from node.session.sweep_run import HopRole, Picking, SweepRun
from swarm.base.errors import ConfigError, RemoteProtocolError, SwarmError
from swarm.compute.gumbel import gumbel_row
from swarm.compute.kv_cache import KvCache
from swarm.compute.row_codec import check_width, lossless_codec
from swarm.link.dial import SERVER_OPTIONS
from swarm.protocol.frames import FrameAssembler, split
from swarm.protocol.hop_log import HopLog
from swarm.protocol.messages import Reply, SweepFrame
from swarm.protocol.session import Limits

SERVICE = "canopy.benchmarks.Star"
SESSION = f"/{SERVICE}/Session"
"""Stream of parts both ways: sweeps there, sweeps with rows or replies back."""
WINDOW_TOKENS = 2_048
"""Tokens of a session, where the model's context is not shorter."""


class StarSession:
    """One session's rules and KV on one server."""

    def __init__(self, model: SpanModel, valid_tokens: int) -> None:
        """`valid_tokens`: ids from there on are padding and are never picked."""
        window = min(model.max_positions or WINDOW_TOKENS, WINDOW_TOKENS)
        self._model = model
        self._log = HopLog(Limits(model.vocab_size, window, sweeps=1, nodes=window))
        self._kv_cache = KvCache(model.layout, 2 * window)
        self._role = HopRole(model.span, lossless_codec(model.dtype), valid_tokens, gumbel_row)

    def answer(self, frame: SweepFrame) -> SweepFrame | Reply:
        """Run the next sweep.

        Raises:
            RemoteProtocolError: it breaks a rule, or is for another server.
            ContextFull: it goes beyond the window.
        """
        sweep = frame.sweep
        if (frame.rows is None) != (self._model.span.start == 0):
            raise RemoteProtocolError("rows", "the first server embeds ids, the others take rows: give them in order")
        if frame.rows is not None:
            check_width(frame.rows, self._model.hidden_size)
        if not self._log.receive(frame):
            raise RemoteProtocolError("sequence", f"sweep {sweep.sequence} came before")
        work = self._log.next_work()
        assert work is not None, "just received"
        run = SweepRun(self._model, self._kv_cache, self._role, work, Picking(self._log.executed.sampling))
        for error in Batch([BatchMember(self, run, run.remaining)]).run().values():
            raise error
        if run.rows is not None:
            return SweepFrame(sweep, None, run.rows)
        return Reply(sweep.sequence, sweep.generation, tuple(run.picks))


class StarService:
    """The star's one call on one server."""

    def __init__(self, model: SpanModel, valid_tokens: int) -> None:
        self._model = model
        self._valid_tokens = valid_tokens

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to route calls here."""
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self.session)
        return grpc.method_handlers_generic_handler(SERVICE, {SESSION.rpartition("/")[2]: handler})

    async def session(self, requests: AsyncIterator[bytes], context: RpcContext) -> None:
        """Answer one session's sweeps, one after the other; a wrong one ends the stream with a typed status."""
        try:
            session, joiner = StarSession(self._model, self._valid_tokens), FrameAssembler()
            async for part in requests:
                message = joiner.feed(part)
                if message is None:
                    continue
                if not isinstance(message, SweepFrame):
                    raise RemoteProtocolError("kind", f"{type(message).__name__} is not a sweep")
                for answer in split(session.answer(message)):
                    await context.write(answer)
        except SwarmError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


@asynccontextmanager
async def serve_star(service: StarService, host: str, port: int) -> AsyncIterator[str]:
    """Serve until left; yields the address, whose port is a free one if `port` is 0.

    Raises:
        ConfigError: the port cannot be opened.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service.handlers(),))
    try:
        port = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        raise ConfigError(f"port {port} of {host} cannot be opened; is another program using it?") from None
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(grace=None)
