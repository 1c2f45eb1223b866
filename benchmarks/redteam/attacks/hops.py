"""Machines that stand in the directory as quick hops and compute nothing: what they answer is all that they are."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc.aio

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.kit import RECORD_S, Kit
from benchmarks.redteam.sealing import quick_identities
from swarm.base.errors import LocalProtocolError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.address_proof import hello_response
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, tombstone
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import bind_port
from swarm.protocol import wire
from swarm.protocol.frames import split
from swarm.protocol.messages import Ack, Attach, Attached, Credits, Fault, FaultKind, Ping, Pong, Ready, Upstream

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


WHOLE, FIRST = "0-12", "0-9"
AGAIN_S = 0.02
ANNOUNCE_S = 15.0
LONG_S = 20.0
"""Silence that is hidden behind pings must be borne for longer than a moment."""


async def stand(
    fight: Fight, behave: Behave, *, spans: tuple[str, ...] = (WHOLE,), **claims: object
) -> list[HostileHop]:
    """List machines that behave so, again and again, until the attack is stopped; then take them off the list."""
    everybody = await asyncio.to_thread(quick_identities, len(spans))
    hops = [
        await HostileHop(fight.kit, behave, who).start(span, **claims)
        for who, span in zip(everybody, spans, strict=True)
    ]
    await fight.kit.join(*(hop.who for hop in hops))
    await fight.go()
    listed = 0
    try:
        while True:
            listed = max(sum(await asyncio.gather(*(hop.announce() for hop in hops))), listed)
            await asyncio.sleep(ANNOUNCE_S)
    finally:
        asked = sum(hop.asked for hop in hops)
        fight.note(f"{listed} of {len(hops)} were listed and asked {asked} times")
        if not asked:
            fight.note("attracted nobody")
        with suppress(Exception):
            async with asyncio.timeout(5.0):
                await asyncio.gather(*(hop.withdraw() for hop in hops))


def faulty(kind: FaultKind, *, blames: bool = False, reason: str = "no", peer: str = "") -> Behave:
    """A hop that takes every session and reports a fault: its own, or its successor's."""

    async def behave(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        at = attach.index + 1
        accused = attach.route[at].peer if blames and at < len(attach.route) else hop.peer
        await stream.say(Attached(attach.generation, None))
        with suppress(LocalProtocolError):
            await stream.say(Fault(attach.generation, PeerId(peer or accused), kind, "", reason))
        await stream.receipt()

    return behave


def granting(sweeps: int, nodes: int, then: Callable[[HostileHop, Attach, HopStream], Awaitable[None]]) -> Behave:
    """A hop that is ready with these credits, and then does something else."""

    async def behave(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        await stream.say(Attached(attach.generation, None))
        await stream.say(Ready(attach.generation, Credits(attach.open.window_tokens, sweeps, nodes)))
        await then(hop, attach, stream)

    return behave


async def receipting(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
    """Receipt everything, and do nothing."""
    await stream.receipt()


@attack("odd-class", Kind.HOPS)
async def odd_class(fight: Fight) -> None:
    """A machine lists a numeric class that no client knows, and is the quickest."""
    await stand(fight, faulty(FaultKind.BUSY), numeric_class="quantum-posit8")


@attack("says-mismatch", Kind.HOPS)
async def says_mismatch(fight: Fight) -> None:
    """A machine answers every session that it serves another model."""
    await stand(fight, faulty(FaultKind.MODEL_MISMATCH))


@attack("says-full", Kind.HOPS)
async def says_full(fight: Fight) -> None:
    """A machine answers every session that the context is full."""
    await stand(fight, faulty(FaultKind.CONTEXT_FULL))


@attack("says-protocol", Kind.HOPS)
async def says_protocol(fight: Fight) -> None:
    """A machine answers every session that the client breaks the protocol."""
    await stand(fight, faulty(FaultKind.PROTOCOL))


@attack("says-internal", Kind.HOPS)
async def says_internal(fight: Fight) -> None:
    """A machine answers every session with an accident."""
    await stand(fight, faulty(FaultKind.INTERNAL))


@attack("five-busy", Kind.HOPS)
async def five_busy(fight: Fight) -> None:
    """Five machines say that they are idle, and answer every session that they are busy."""
    await stand(fight, faulty(FaultKind.BUSY), spans=(WHOLE,) * 5)


@attack("zero-credits", Kind.HOPS)
async def zero_credits(fight: Fight) -> None:
    """A machine is ready for every session, and grants nothing."""
    await stand(fight, granting(0, 0, receipting))


@attack("no-progress", Kind.HOPS, lasts_s=LONG_S)
async def no_progress(fight: Fight) -> None:
    """A machine is ready for every session, receipts every sweep, answers every ping, and computes nothing."""
    await stand(fight, granting(8, 512, receipting))


@attack("never-ready", Kind.HOPS, lasts_s=LONG_S)
async def never_ready(fight: Fight) -> None:
    """A machine takes every session and is never ready."""

    async def behave(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        await stream.say(Attached(attach.generation, None))
        await stream.receipt()

    await stand(fight, behave)


@attack("never-attached", Kind.HOPS, lasts_s=LONG_S)
async def never_attached(fight: Fight) -> None:
    """A machine takes every stream and says nothing at all."""

    async def behave(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        await asyncio.sleep(3_600)

    await stand(fight, behave)


@attack("blames-successor", Kind.HOPS)
async def blames_successor(fight: Fight) -> None:
    """The first hop of every chain says that the honest machine behind it gave the session up."""
    await stand(fight, faulty(FaultKind.CLOSED, blames=True), spans=(FIRST,))


@attack("blames-busy", Kind.HOPS)
async def blames_busy(fight: Fight) -> None:
    """Three first hops say that the honest machine behind them is unreachable, silent and another model's."""
    kinds = iter((FaultKind.UNREACHABLE, FaultKind.TIMEOUT, FaultKind.MODEL_MISMATCH) * 10_000)

    async def behave(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        await faulty(next(kinds), blames=True)(hop, attach, stream)

    await stand(fight, behave, spans=(FIRST,) * 3)


@attack("long-reasons", Kind.HOPS)
async def long_reasons(fight: Fight) -> None:
    """A machine reports faults whose reasons have thousands of characters, over and over."""

    async def behave(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        await stream.say(Attached(attach.generation, None))
        while True:
            fault = Fault(attach.generation, hop.peer, FaultKind.BUSY, "", "x" * 1_000)
            await stream.context.write(wire.encode_upstream(fault).replace(b"x" * 1_000, b"x" * 1_000))
            await asyncio.sleep(AGAIN_S)

    await stand(fight, behave)


@attack("ack-flood", Kind.HOPS)
async def ack_flood(fight: Fight) -> None:
    """A machine is ready for every session and sends 5,000 receipts a second of what it was never sent."""

    async def flood(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        number = 0
        while True:
            for _ in range(100):
                number += 1
                await stream.say(Ack(number, number, number))
            await asyncio.sleep(AGAIN_S)

    await stand(fight, granting(8, 512, flood))


@attack("upstream-noise", Kind.HOPS)
async def upstream_noise(fight: Fight) -> None:
    """A machine answers every session with random bytes."""

    async def behave(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        while True:
            await stream.context.write(secrets.token_bytes(2_000))
            await asyncio.sleep(AGAIN_S)

    await stand(fight, behave)


@attack("difference-flood", Kind.HOPS)
async def difference_flood(fight: Fight) -> None:
    """A machine reports 20,000 differences between replicas that no session has."""

    async def flood(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        for number in range(20_000):
            reason = f"picked token {number} where its replica picked 1"
            await stream.say(Fault(attach.generation, hop.peer, FaultKind.DIFFERENT, "", reason))
        await stream.receipt()

    await stand(fight, granting(8, 512, flood))


@attack("quits-midway", Kind.HOPS)
async def quits_midway(fight: Fight) -> None:
    """A machine takes every session and ends it a second later, for ever."""

    async def quit_soon(hop: HostileHop, attach: Attach, stream: HopStream) -> None:
        await asyncio.sleep(1.0)

    await stand(fight, granting(8, 512, quit_soon))


@attack("fifty-quick", Kind.HOPS)
async def fifty_quick(fight: Fight) -> None:
    """Fifty machines list themselves as the quickest and take no session."""
    await stand(fight, faulty(FaultKind.BUSY), spans=(WHOLE,) * 50)
