"""The replies of one chain as answers to its sweeps, from whichever of its tails is first. Owns no routes.

May the picks of a reply follow one another under the session's grammar? A wrong one is its tail's fault alone.

The client follows the grammar itself, in a worker, while a sweep is away: what a tail ignores, or forges, is no text.
Penalties and biases move logits, which only the tail knows, so no pick contradicts them.

Is a reply one that an honest tail could have sent to this sweep? Pure; a wrong one is its tail's fault alone.

The stream on which one tail sends its replies. Read by a task of its own, so no tail waits for a client (F1).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import grpc
import grpc.aio

from swarm.base.errors import (
    HopClosed,
    HopError,
    HopMisbehaved,
    HopTimeout,
    LocalProtocolError,
    PicksRefuted,
    RemoteProtocolError,
    ReplicasDiffer,
    SwarmError,
    Unreachable,
)
from swarm.base.ids import TreeNodeId
from swarm.base.tasks import TaskScope
from swarm.compute.grammars import GrammarPlace
from swarm.compute.path_rules import NodeMasks
from swarm.link.dial import Connection, plain_reason
from swarm.link.link import ROUND_TRIPS, SILENCE_S, Stream, introduce, pause, unpacked
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import FrameAssembler, FrameLimits
from swarm.protocol.messages import Ping, Pong, RepliesRequest, RepliesUp, Reply, RouteHop, Sweep, Tell
from swarm.protocol.session import SessionState


class PickCheck:
    """What the tail may pick after the nodes of sweeps that are away."""

    def __init__(self, valid_tokens: int, give_up: Callable[[SwarmError], None]) -> None:
        """Follow nothing yet.

        Args:
            valid_tokens: ids from here on are padding of the embedding, which no tail picks.
            give_up: called where a grammar takes too much here: then no pick can be checked, and none is taken.
        """
        self._valid_tokens, self._give_up = valid_tokens, give_up
        self._place: GrammarPlace | None = None
        self._masks: dict[int, asyncio.Task[None]] = {}
        self._found: dict[int, NodeMasks] = {}

    def follow(self, place: GrammarPlace | None) -> None:
        """Sweeps that leave from now on follow this grammar; None: any token may be picked."""
        self._place = place

    def expect(self, sweep: Sweep, state: SessionState, scope: TaskScope) -> None:
        """A sweep leaves now.

        Args:
            sweep: as it was made.
            state: of the session, with it.
            scope: owns the work.
        """
        if self._place is None:
            return
        nodes = [node for node in sweep.nodes if node >= sweep.picks_from]
        if nodes:
            masks = self._place.masks(nodes, state)
            self._masks[sweep.sequence] = scope.spawn(self._find(sweep.sequence, masks))

    async def _find(self, sequence: int, masks: Awaitable[NodeMasks]) -> None:
        try:
            self._found[sequence] = await masks
        except RemoteProtocolError as error:  # as at any honest tail; one that ignores the grammar would go on
            self._give_up(error)

    def awaited(self, sequence: int) -> asyncio.Task[None] | None:
        """What must be done before a reply to this sweep is checked; None: nothing."""
        task = self._masks.get(sequence)
        return None if task is None or task.done() else task

    def check(self, reply: Reply) -> None:
        """Raise unless the tokenizer knows every pick, and the grammar takes it.

        Raises:
            RemoteProtocolError: no honest tail picked that.
        """
        for node, token in reply.picks:
            if token >= self._valid_tokens:
                raise RemoteProtocolError(
                    "picks", f"token {token} after node {node}, which the tokenizer does not have"
                )
        masks = self._found.get(reply.sequence)
        if masks is None:
            return
        for node, token in reply.picks:
            if not masks.allows(node, token):
                raise RemoteProtocolError("picks", f"token {token} after node {node}, which the grammar does not take")

    def masks(self, sequence: int) -> NodeMasks | None:
        """What the grammar takes after the nodes of a sweep that has no answer yet."""
        return self._found.get(sequence)

    def answered(self, sequence: int) -> None:
        """A sweep has its answer."""
        self._masks.pop(sequence, None)
        self._found.pop(sequence, None)


MAX_ROWS = 64
"""Hidden rows of a reply beside those of a prompt (P10)."""


def check_reply(reply: Reply, sweep: Sweep, state: SessionState) -> None:
    """Raise unless a reply answers its sweep.

    Args:
        reply: what came.
        sweep: what was asked.
        state: of the session now: nodes that died since may lack a pick (P7).

    Raises:
        RemoteProtocolError: a pick is for a node that the sweep did not ask for, lies outside the vocabulary, comes
            twice, or is missing for a node that lives; or rows were not asked for, or are of nodes that nobody sent; or
            log-probabilities are not those that were asked for.
    """
    asked = range(sweep.picks_from, sweep.end_id)
    for node, token in reply.picks:
        if node not in asked:
            raise RemoteProtocolError("picks", f"one after node {node}, for which nobody asked")
        if not 0 <= token < state.limits.vocab_size:
            raise RemoteProtocolError("picks", f"token {token} is outside the vocabulary")
    if any(first >= second for (first, _), (second, _) in pairwise(reply.picks)):
        raise RemoteProtocolError("picks", "are not in the order of their nodes")
    picked = {node for node, _ in reply.picks}
    for node in map(TreeNodeId, asked):
        if node not in picked and state.is_alive(node):
            raise RemoteProtocolError("picks", f"none for node {node}, which cannot be dead")
    _check_log_probs(reply, sweep, state.limits.vocab_size)
    if reply.rows is None:
        return
    _check_rows(reply, sweep, state)


def _check_rows(reply: Reply, sweep: Sweep, state: SessionState) -> None:
    prompt = [node for node in reply.row_ids if node in sweep.prompt_nodes]
    others = [node for node in reply.row_ids if node not in sweep.prompt_nodes]
    if sweep.want is None or (not sweep.want.hidden_rows and (others or not prompt)):
        raise RemoteProtocolError("rows", "were not asked for")
    if any(first >= second for first, second in pairwise(prompt)):
        raise RemoteProtocolError("rows", "are not in the order of their nodes")
    if len(others) > MAX_ROWS or any(node >= state.next_id for node in others):
        raise RemoteProtocolError("rows", "are of nodes that were never sent")


def _check_log_probs(reply: Reply, sweep: Sweep, vocab_size: int) -> None:
    asked = sweep.want is not None and sweep.want.log_probs
    if asked != (reply.log_probs is not None):
        raise RemoteProtocolError("log_probs", "are missing" if asked else "were not asked for")
    top = sweep.want.top_log_probs if sweep.want is not None and asked else 0
    found = reply.top_log_probs or ((),) * len(reply.picks)
    if any(len(best) != min(top, vocab_size) for best in found):
        raise RemoteProtocolError("top_log_probs", f"are not the {top} that were asked for")
    if any(token >= vocab_size for best in found for token, _ in best):
        raise RemoteProtocolError("top_log_probs", "has a token outside the vocabulary")


OPEN_S = 8.0
"""How long a tail may take to be dialled and to begin, its session's attach included."""
FAULT_GRACE_S = 0.5
"""When the tail ends the stream itself, its reason comes up the chain a little later."""
PINGS_S = 0.5
"""Between the tail's pings."""
CHECK_S = 0.1
"""Between looks at the clock."""
MAX_RTT_S = 4.0
"""A tail's claim of a longer round trip is taken as this one: it would only be waited for in silence for longer."""


class ReplyStream:
    """The replies of one session from one tail, from `run` until it is cancelled or broken.

    Attributes:
        tail: the machine, and its layers.
        is_broken: nothing comes any more.
        stuck: the connection, if nothing came on it any more.
        opened: set when the tail's first message came.
        heard_s: when a part of a reply last came, by `time.monotonic`; 0 before.
    """

    def __init__(
        self,
        tail: RouteHop,
        key: SessionKey,
        listener: Callable[[ReplyStream, Reply | SwarmError], None],
        rows_bytes: int = 0,
        tells: Iterable[Tell] = (),
    ) -> None:
        """Ask for nothing yet.

        Args:
            tail: whose replies they are.
            key: of the session.
            listener: called with this stream and every reply, and once with the error that ended it.
            rows_bytes: of the hidden rows that one reply may bring.
            tells: what the tail has to know first (P17).
        """
        self.tail = tail
        self.is_broken = False
        self.stuck: grpc.aio.Channel | None = None
        self.opened = asyncio.Event()
        self.heard_s = 0.0
        self._key = key
        self._listener = listener
        self._rows_bytes = rows_bytes
        self._rtt_s = 0.5
        self._patient_until = 0.0
        self._unsent: deque[RepliesUp] = deque(tells)
        self._is_unsent = asyncio.Event()
        self._is_unsent.set()

    def say(self, message: RepliesUp) -> None:
        """Send a message to the tail; never waits. As many wait as sweeps may be unanswered, and one per ping."""
        if not self.is_broken:
            self._unsent.append(message)
            self._is_unsent.set()

    async def run(self, dial: Callable[[], Connection], request: RepliesRequest) -> None:
        """Ask for the replies and give each to the listener, and at the end the error that ended them.

        Args:
            dial: gives the connection to the tail; raises SwarmError where it cannot be dialled.
            request: whose replies.
        """
        span = str(self.tail.span)
        try:
            connection = dial()
        except SwarmError as reason:
            self._end(Unreachable(self.tail.peer, span, str(reason)))
            return
        first = wire.encode_replies_up(request)
        metadata = introduce(self._key, connection.endpoint, wire.REPLIES, first)
        call: Stream = connection.channel.stream_stream(wire.REPLIES)(metadata=metadata)
        error: SwarmError
        try:
            await self._read(call, first)
            await asyncio.sleep(FAULT_GRACE_S)
            error = HopClosed(self.tail.peer, span, "ended the reply stream")
        except TimeoutError:
            error = HopTimeout(self.tail.peer, span, "is silent: nothing came on the reply stream")
            self.stuck = connection.channel
        except grpc.aio.AioRpcError as failure:
            why = plain_reason(failure, is_member=connection.is_member)
            error = Unreachable(self.tail.peer, span, f"the reply stream broke ({why})")
            if failure.code() is grpc.StatusCode.NOT_FOUND:
                error = HopClosed(self.tail.peer, span, "no longer holds this session")
        except RemoteProtocolError as failure:
            error = HopMisbehaved(self.tail.peer, span, f"sent what breaks the protocol ({failure})")
        except (HopError, LocalProtocolError) as failure:  # the latter: what the tail is to be told cannot be said
            error = failure
        finally:
            call.cancel()
        self._end(error)

    def _end(self, error: SwarmError) -> None:
        self.is_broken = True
        self._listener(self, error)

    async def _read(self, call: Stream, request: bytes) -> None:
        assembler = FrameAssembler(FrameLimits(rows_bytes=self._rows_bytes))
        async with TaskScope() as scope:
            self._patient_until = time.monotonic() + OPEN_S
            scope.spawn(self._watch())
            await call.write(request)
            scope.spawn(self._send(call))
            while isinstance(part := await call.read(), bytes):
                self._patient_until = time.monotonic() + PINGS_S + SILENCE_S + ROUND_TRIPS * self._rtt_s
                self.opened.set()
                assembler.take(part)
                message = assembler.finish()
                message = None if message is None else await unpacked(message)
                if not isinstance(message, Ping):
                    self.heard_s = time.monotonic()
                match message:
                    case Reply() as reply:
                        if reply.times:
                            self._rtt_s = min(2e-3 * reply.times[-1].link_ms, MAX_RTT_S)
                        self._listener(self, reply)
                    case Ping(nonce=nonce):
                        self.say(Pong(nonce))
                    case _:
                        pass

    async def _send(self, call: Stream) -> None:
        """Write what is said, one message after the other, until the stream breaks, which its reader notices."""
        with suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
            while await self._is_unsent.wait():
                self._is_unsent.clear()
                while self._unsent:
                    await call.write(wire.encode_replies_up(self._unsent.popleft()))

    async def _watch(self) -> None:
        """Raise TimeoutError when nothing came for too long; time in which this program did not run is excused."""
        while (left_s := self._patient_until - time.monotonic()) > 0:
            late_s = await pause(min(left_s, CHECK_S))  # replies move the limit meanwhile
            self._patient_until += late_s
        raise TimeoutError


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
        tail: whose reply it is; None of a chain without machines.
        masks: what the grammar takes after the nodes whose picks were asked for; None without one.
    """

    reply: Reply
    total_ms: float
    tail: RouteHop | None = None
    masks: NodeMasks | None = None


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
        picks: PickCheck | None = None,
    ) -> None:
        """Hear nobody yet.

        Args:
            key: of the session whose replies they are.
            on_trouble: called when a stream breaks, when a reply answers no sweep, when a tail takes a pick back, and
                when tails do not pick the same.
            check: of every reply to a sweep that is unanswered.
            on_answer: called with how long a sweep was away, and the sweep.
            picks: knows what the grammar takes; a reply is checked once it does.
        """
        self.count = 0
        self.rows_bytes = 0
        self.newest_s = 0.0
        self._check, self._on_answer, self._picks = check, on_answer, picks
        self._refuted: PicksRefuted | None = None
        self._last_sent = 0
        self._key = key
        self._on_trouble = on_trouble
        self._streams: list[tuple[ReplyStream, asyncio.Task[None]]] = []
        self._inbox: asyncio.Queue[Answer | SwarmError | None] = asyncio.Queue(INBOX_ITEMS)
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

    def refute(self, error: PicksRefuted) -> None:
        """Hear this tail no more, until it is chosen again; `next` raises why before it gives what came already."""
        for stream, _ in self._streams:
            stream.is_broken |= stream.tail.peer == error.peer
        self._refuted = error
        if self._inbox.empty():  # somebody may wait for it
            self._put(None)

    def forget_refuted(self) -> None:
        """Whoever waits for answers knows of the tails that were refuted so far."""
        self._refuted = None

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
            if self._refuted is not None:
                refuted, self._refuted = self._refuted, None
                raise refuted
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
            if item is not None:
                return item

    def tell(self, tell: Tell) -> None:
        """Say to every tail what a sweep holds (P17)."""
        for stream, _ in self._streams:
            stream.say(tell)

    def follow(
        self, scope: TaskScope, tails: Sequence[TailDial], request: RepliesRequest, tells: Callable[[], Iterable[Tell]]
    ) -> ReplyStream:
        """Hear these tails and no others; a stream that runs is kept. Returns the first one's.

        Args:
            scope: owns the streams.
            tails: the tail of the route, and its replica if it has one.
            request: for the replies of the first of them.
            tells: what a tail has to know that is heard anew.
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
                stream = ReplyStream(hop, self._key, self._hear, self.rows_bytes, tells())
                asked = replace(request, may_wait=request.generation > 0 or index > 0)
                known[hop] = stream, scope.spawn(stream.run(dial, asked))
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
        picks = self._picks
        if awaited is not None and picks and (unready := picks.awaited(message.sequence)) is not None:
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
        masks = picks.masks(message.sequence) if picks else None
        if self._put(Answer(message, total_ms, stream.tail, masks)):
            del self._awaited[message.sequence]
            self.count += 1
            self.newest_s = time.monotonic()
            self._on_answer(total_ms, awaited.sweep)
            self._keep(stream.tail, message)

    def _put(self, item: Answer | SwarmError | None) -> bool:
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
