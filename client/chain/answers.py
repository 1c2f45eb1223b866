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
from swarm.errors import HopMisbehaved, HopTimeout, RemoteProtocolError, ReplicasDiffer, SwarmError
from swarm.ids import TreeNodeId
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import RepliesRequest, Reply, RouteHop, Sweep
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import Connection

INBOX_ITEMS = 256
MAX_COMPARED = 64
"""Replies whose picks are kept, to be compared with whatever answers the same sweep again."""

Check = Callable[[Reply, Sweep], None]
"""Says whether a reply answers a sweep.

Raises:
    RemoteProtocolError: no honest tail sends it.
"""

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


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A sweep without a reply.

    Attributes:
        sweep: as it was sent.
        sent_s: when, by `time.perf_counter`.
        left_s: the same by `time.monotonic`.
    """

    sweep: Sweep
    sent_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class _FirstReply:
    """What answered a sweep first.

    Attributes:
        tail: whose reply it was.
        generation: that it names.
        picks: its tokens, by node.
    """

    tail: RouteHop
    generation: int
    picks: dict[TreeNodeId, int]


class Answers:
    """What comes back.

    Attributes:
        count: answers that came so far.
        rows_bytes: of the hidden rows that one reply may bring.
        newest_s: when the newest one came, by `time.monotonic`; 0 before.
    """

    def __init__(
        self,
        key: SessionKey,
        on_trouble: Callable[[SwarmError], None],
        check: Check = lambda reply, sweep: None,
        on_answer: Callable[[float, Sweep], None] = lambda total_ms, sweep: None,
        before_check: Callable[[int], asyncio.Task[None] | None] = lambda sequence: None,
    ) -> None:
        """Hear nobody yet.

        Args:
            key: of the session whose replies they are.
            on_trouble: called when a stream breaks, when a reply answers no sweep, when a tail takes a pick back, and
                when tails do not pick the same.
            check: of every reply to a sweep that is unanswered.
            on_answer: called with how long a sweep was away, and the sweep.
            before_check: what must be done before a reply to this sweep can be checked.
        """
        self.count = 0
        self.rows_bytes = 0
        self.newest_s = 0.0
        self._check, self._on_answer, self._before_check = check, on_answer, before_check
        self._last_sent = 0
        self._key = key
        self._on_trouble = on_trouble
        self._streams: list[tuple[ReplyStream, asyncio.Task[None]]] = []
        self._inbox: asyncio.Queue[Answer | SwarmError] = asyncio.Queue(INBOX_ITEMS)
        self._is_next = asyncio.Event()
        self._awaited: dict[int, _Awaited] = {}
        self._first: OrderedDict[int, _FirstReply] = OrderedDict()

    @property
    def are_due(self) -> bool:
        """Whether a sweep is unanswered."""
        return bool(self._awaited)

    @property
    def oldest(self) -> tuple[Sweep, float] | None:
        """The oldest sweep without a reply, and when it left, by `time.monotonic`."""
        first = self._awaited[min(self._awaited)] if self._awaited else None
        return None if first is None else (first.sweep, first.left_s)

    @property
    def heard_s(self) -> float:
        """When a part of a reply last came, by `time.monotonic`; 0 before."""
        return max((stream.heard_s for stream, _ in self._streams), default=0.0)

    @property
    def has_next(self) -> bool:
        """Whether `next` would return at once."""
        return not self._inbox.empty()

    def stuck(self, tail: RouteHop) -> grpc.aio.Channel | None:
        """The connection to a tail on which nothing came any more."""
        return next((stream.stuck for stream, _ in self._streams if stream.tail == tail), None)

    def expect(self, sweep: Sweep) -> None:
        """A sweep leaves now."""
        self._last_sent = max(self._last_sent, sweep.sequence)
        self._awaited[sweep.sequence] = _Awaited(sweep, time.perf_counter(), time.monotonic())

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
                stream = ReplyStream(hop, self._key, self._hear, self.rows_bytes)
                request = RepliesRequest(self._key.session, generation, acked, may_wait=generation > 0 or index > 0)
                known[hop] = stream, scope.spawn(stream.run(dial, request))
            self._streams.append(known[hop])
        return self._streams[0][0]

    def close(self) -> None:
        """Hear nobody any more."""
        for _, task in self._streams:
            task.cancel()

    def _hear(self, stream: ReplyStream, message: Reply | SwarmError) -> None:
        if all(stream is not known for known, _ in self._streams) or (stream.is_broken and isinstance(message, Reply)):
            return
        if not isinstance(message, Reply):
            self._on_trouble(message)
            return
        awaited = self._awaited.get(message.sequence)
        if awaited is not None and (unready := self._before_check(message.sequence)) is not None:
            unready.add_done_callback(lambda _: self._hear(stream, message))
            return
        try:
            if not 0 < message.sequence <= self._last_sent:
                raise RemoteProtocolError("sequence", f"reply to sweep {message.sequence}, which was never sent")
            if awaited is not None:
                self._check(message, awaited.sweep)
            else:  # repetitions are dropped: the first pick of a node wins
                self._compare(stream.tail, message)
        except RemoteProtocolError as error:
            stream.is_broken = True  # whoever is asked next, and be it the same machine, sends it again
            self._on_trouble(HopMisbehaved(stream.tail.peer, str(stream.tail.span), str(error)))
            return
        if awaited is None:
            return
        total_ms = (time.perf_counter() - awaited.sent_s) * 1e3
        if self._put(Answer(message, total_ms)):
            del self._awaited[message.sequence]
            self.count += 1
            self.newest_s = time.monotonic()
            self._on_answer(total_ms, awaited.sweep)
            self._keep(stream.tail, message)

    def _put(self, item: Answer | SwarmError) -> bool:
        if self._inbox.full():
            return False
        self._inbox.put_nowait(item)
        self._is_next.set()
        return True

    def _keep(self, tail: RouteHop, reply: Reply) -> None:
        self._first[reply.sequence] = _FirstReply(tail, reply.generation, dict(reply.picks))
        while len(self._first) > MAX_COMPARED:
            self._first.popitem(last=False)

    def _compare(self, tail: RouteHop, reply: Reply) -> None:
        """Compare a reply to a sweep that was answered with what answered it first.

        A tail that was given the session anew, in a later generation, may come to other picks by rounding.

        Raises:
            RemoteProtocolError: the tail takes back what it said.
        """
        first = self._first.get(reply.sequence)
        if first is None:
            return
        for node, token in reply.picks:
            known = first.picks.get(node, token)
            if known == token:
                continue
            if tail != first.tail:
                reason = f"picked token {token} where its replica picked {known}"
                if len(self._streams) > 1:
                    self._on_trouble(ReplicasDiffer(tail.peer, str(tail.span), reason))
            elif reply.generation == first.generation:
                raise RemoteProtocolError(
                    "picks", f"token {token} after node {node}, for which it picked {known} before"
                )
            return
