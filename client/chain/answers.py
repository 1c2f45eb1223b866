"""The replies of one chain as answers to its sweeps, from whichever of its tails is first. Owns no routes."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio

from client.chain.reply_stream import ReplyStream
from swarm.errors import HopTimeout, ReplicasDiffer, SwarmError
from swarm.ids import TreeNodeId
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import RepliesRequest, Reply, RouteHop
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import Connection

INBOX_ITEMS = 256
MAX_COMPARED = 64
"""Replies whose picks are kept until another tail's reply to the same sweep comes."""

TailDial = tuple[RouteHop, Callable[[], Connection]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply to a sweep.

    Attributes:
        reply: what the tail sent.
        total_ms: how long the sweep was away.
    """

    reply: Reply
    total_ms: float


class Answers:
    """What comes back.

    Attributes:
        count: answers that came so far.
    """

    def __init__(self, key: SessionKey, on_trouble: Callable[[SwarmError], None]) -> None:
        """Hear nobody yet.

        Args:
            key: of the session whose replies they are.
            on_trouble: called when a stream breaks, and when tails do not pick the same.
        """
        self.count = 0
        self._key = key
        self._on_trouble = on_trouble
        self._streams: list[tuple[ReplyStream, asyncio.Task[None]]] = []
        self._inbox: asyncio.Queue[Answer | SwarmError] = asyncio.Queue(INBOX_ITEMS)
        self._is_next = asyncio.Event()
        self._sent_at: dict[int, float] = {}
        self._first_picks: OrderedDict[int, dict[TreeNodeId, int]] = OrderedDict()

    @property
    def are_due(self) -> bool:
        """Whether a sweep is unanswered."""
        return bool(self._sent_at)

    @property
    def has_next(self) -> bool:
        """Whether `next` would return at once."""
        return not self._inbox.empty()

    def stuck(self, tail: RouteHop) -> grpc.aio.Channel | None:
        """The connection to a tail on which nothing came any more."""
        return next((stream.stuck for stream, _ in self._streams if stream.tail == tail), None)

    def expect(self, sequence: int) -> None:
        """A sweep leaves now."""
        self._sent_at[sequence] = time.perf_counter()

    def give_up(self, error: SwarmError) -> None:
        """The chain is broken for good: `next` raises why, after the answers that came before."""
        self._put(error)

    async def idle(self, max_s: float) -> None:
        """Until there is a next answer, or so much time has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max_s):
                await self._is_next.wait()

    async def next(self, timeout_s: float, may_wait: Callable[[], bool]) -> Answer:
        """The next answer.

        Args:
            timeout_s: how long one may take.
            may_wait: asked then whether there is a reason to wait on.

        Raises:
            SwarmError: what broke the chain for good.
        """
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    item = await self._inbox.get()
            except TimeoutError:
                if may_wait():
                    continue
                tail = self._streams[0][0].tail
                reason = f"no reply from the chain within {timeout_s:.0f} s"
                raise HopTimeout(tail.peer, str(tail.span), reason) from None
            if self._inbox.empty():
                self._is_next.clear()
            if isinstance(item, SwarmError):
                raise item
            return item

    def follow(self, scope: TaskScope, tails: Sequence[TailDial], generation: int, acked: int) -> ReplyStream:
        """Hear these tails and no others; a stream that runs is kept. Returns the first one's.

        Args:
            scope: owns the streams.
            tails: the tail of the route, and its replica if it has one.
            generation: of the route.
            acked: the last sequence whose reply is not needed again.
        """
        hops = {hop for hop, _ in tails}
        for stream, task in self._streams:
            if stream.tail not in hops or stream.is_broken:
                task.cancel()
        self._streams = [one for one in self._streams if one[0].tail in hops and not one[0].is_broken]
        known = {stream.tail: (stream, task) for stream, task in self._streams}
        self._streams = []
        for index, (hop, dial) in enumerate(tails):
            if hop not in known:
                stream = ReplyStream(hop, self._key, self._hear)
                request = RepliesRequest(self._key.session, generation, acked, may_wait=generation > 0 or index > 0)
                known[hop] = stream, scope.spawn(stream.run(dial, request))
            self._streams.append(known[hop])
        return self._streams[0][0]

    def close(self) -> None:
        """Hear nobody any more."""
        for _, task in self._streams:
            task.cancel()

    def _hear(self, stream: ReplyStream, message: Reply | SwarmError) -> None:
        if all(stream is not known for known, _ in self._streams):
            return
        if not isinstance(message, Reply):
            self._on_trouble(message)
            return
        sent = self._sent_at.pop(message.sequence, None)
        if sent is None:  # repetitions are dropped: the first pick of a node wins
            self._compare(stream, message)
        elif self._put(Answer(message, (time.perf_counter() - sent) * 1e3)):
            self.count += 1
            self._keep(message)

    def _put(self, item: Answer | SwarmError) -> bool:
        if self._inbox.full():
            return False
        self._inbox.put_nowait(item)
        self._is_next.set()
        return True

    def _keep(self, reply: Reply) -> None:
        if len(self._streams) > 1:
            self._first_picks[reply.sequence] = dict(reply.picks)
            while len(self._first_picks) > MAX_COMPARED:
                self._first_picks.popitem(last=False)

    def _compare(self, stream: ReplyStream, reply: Reply) -> None:
        first = self._first_picks.pop(reply.sequence, {})
        for node, token in reply.picks:
            if first.get(node, token) != token:
                reason = f"picked token {token} where its replica picked {first[node]}"
                self._on_trouble(ReplicasDiffer(stream.tail.peer, str(stream.tail.span), reason))
                return
