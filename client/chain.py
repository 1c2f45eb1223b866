"""An open session over a chain of hops: sweeps go in at hop 0, replies come straight from the tail.

Replies are read by a task of its own, so that the tail never waits for this client (F1). Owns no tokens and no rules.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from swarm import wire
from swarm.dial import Dialer
from swarm.errors import HopClosed, HopError, HopTimeout, SessionExpired, SwarmError, Unreachable
from swarm.faults import error_of
from swarm.frames import Joiner
from swarm.ids import SessionId
from swarm.link import Link, Stream, open_link
from swarm.messages import (
    Attach,
    Close,
    Credits,
    Fault,
    Open,
    Ping,
    Pong,
    RepliesRequest,
    Reply,
    RouteHop,
    Sweep,
    SweepFrame,
    Upstream,
)
from swarm.routing import Route
from swarm.tasks import TaskScope

REPLY_TIMEOUT_S = 120.0
INBOX_ITEMS = 256
FAULT_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply and how long its sweep was away, in milliseconds."""

    reply: Reply
    total_ms: float


class Chain:
    """A running session; made by `open_chain`."""

    def __init__(self, route: Sequence[RouteHop]) -> None:
        self.route = tuple(route)
        self.credits = Credits(0, 0, 0)
        self._link: Link | None = None
        self._inbox: asyncio.Queue[Answer | SwarmError] = asyncio.Queue(INBOX_ITEMS)
        self._sent_at: dict[int, float] = {}

    @property
    def first_link_ms(self) -> float:
        """One-way time to hop 0: half the measured round trip."""
        return self._link.rtt_ms / 2 if self._link is not None else 0.0

    def attached(self, link: Link, credits: Credits) -> None:
        """Every hop is ready."""
        self._link, self.credits = link, credits

    def send(self, sweep: Sweep) -> None:
        """Start a sweep; never waits.

        Raises:
            HopClosed: hop 0 does not read any more.
        """
        assert self._link is not None, "open_chain attaches before it hands the chain out"
        self._sent_at[sweep.sequence] = time.perf_counter()
        self._link.send(SweepFrame(sweep))

    async def answer(self, timeout_s: float = REPLY_TIMEOUT_S) -> Answer:
        """The next reply.

        Raises:
            SwarmError: what broke the chain.
        """
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._inbox.get()
        except TimeoutError:
            tail = self.route[-1]
            raise HopTimeout(tail.peer, str(tail.span), f"no reply from the chain within {timeout_s:.0f} s") from None
        if isinstance(item, SwarmError):
            raise item
        return item

    def take(self, message: Reply) -> None:
        """A reply arrived; repetitions are dropped (the first pick of a node wins)."""
        sent = self._sent_at.pop(message.sequence, None)
        if sent is not None and not self._inbox.full():
            self._inbox.put_nowait(Answer(message, (time.perf_counter() - sent) * 1e3))

    def give_up(self, error: SwarmError) -> None:
        """The chain is broken; whoever waits for an answer learns why. What comes after many errors is not news."""
        if not self._inbox.full():
            self._inbox.put_nowait(error)

    def listen(self, message: Upstream | HopError) -> None:
        """What hop 0's stream says."""
        match message:
            case Fault():
                span = next((str(hop.span) for hop in self.route if hop.peer == message.peer), "?")
                self.give_up(error_of(message, span))
            case HopError():
                self.give_up(message)
            case _:
                pass


@asynccontextmanager
async def open_chain(dialer: Dialer, route: Route, want: Open) -> AsyncIterator[Chain]:
    """Attach every hop of the route and open the reply stream; leaving closes the session everywhere.

    Raises:
        SwarmError: a hop refused, or did not answer in time.
    """
    session = SessionId(secrets.token_bytes(16))
    attach = Attach(session, 0, route.hops, 0, want)
    chain = Chain(route.hops)
    async with open_link(dialer.channel(route.addresses[0]), attach, chain.listen) as link:
        try:
            chain.attached(link, await link.ready())
            async with TaskScope() as scope:
                opened = asyncio.Event()
                scope.spawn(_read_replies(dialer.channel(route.addresses[-1]), session, chain, opened))
                await _wait_opened(opened, route.hops[-1])
                yield chain
        finally:
            link.send(Close("done"))  # also when the generation is left or breaks: KV elsewhere is not ours to keep


async def _wait_opened(opened: asyncio.Event, tail: RouteHop, timeout_s: float = 10.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await opened.wait()
    except TimeoutError:
        raise HopTimeout(tail.peer, str(tail.span), f"no reply stream within {timeout_s:.0f} s") from None


async def _read_replies(channel: grpc.aio.Channel, session: SessionId, chain: Chain, opened: asyncio.Event) -> None:
    tail = chain.route[-1]
    joiner = Joiner()
    call: Stream = channel.stream_stream(wire.REPLIES)()
    error: SwarmError = HopClosed(tail.peer, str(tail.span), "ended the reply stream")
    try:
        await call.write(wire.encode_replies_up(RepliesRequest(session)))
        while isinstance(part := await call.read(), bytes):
            opened.set()
            match joiner.feed(part):
                case Reply() as reply:
                    chain.take(reply)
                case Ping(nonce=nonce):
                    await call.write(wire.encode_replies_up(Pong(nonce)))
                case _:
                    pass
        await asyncio.sleep(FAULT_GRACE_S)  # the fault that says why comes up the chain, one hop later
    except grpc.aio.AioRpcError as failure:
        error = Unreachable(tail.peer, str(tail.span), f"the reply stream broke ({failure.details()})")
        if failure.code() is grpc.StatusCode.NOT_FOUND:
            error = SessionExpired(f"node {tail.peer} no longer holds this session")
    except SwarmError as failure:
        error = failure
    finally:
        call.cancel()
        opened.set()
    chain.give_up(error)
