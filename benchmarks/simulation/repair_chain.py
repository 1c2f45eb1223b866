"""Client and hops of a chain that repairs itself, on the pure code (PROTOCOL R1–R8), and the streams between them.

A stream delivers in order. Of what is in flight when it is cut, a random part still arrives, however late. Whoever does
not know yet that it was left or cut off goes on sending.

    Sender    has a successor: a new route (R2), what the successor lacks (R4, R5), sweeps. The client and every hop.
    Hop       a machine with one session's log, KV and journal; with other layers it begins anew.
    Client    the predecessor of hop 0, the reader of the tail's replies, the only one that makes generations (R1).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.simulation.fake_chain import LAYERS, FakeSpan, SweepWriter, pick, rows_of
from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.protocol.hop_log import HopLog, SweepWork
from swarm.protocol.journal import Journal
from swarm.protocol.messages import (
    Attach,
    Attached,
    Codec,
    Credits,
    Open,
    Ready,
    RepliesRequest,
    Reply,
    Reroute,
    RouteHop,
    Snapshot,
    SweepFrame,
)
from swarm.protocol.session import CommittedToken, Limits

SESSION = SessionId(bytes(16))
OPEN = Open("", 0, 0, 0, Codec.FP32)
Route = tuple[RouteHop, ...]
DownMessage = Attach | Reroute | SweepFrame | Snapshot | RepliesRequest
UpMessage = Attached | Ready | Reply


class Environment(Protocol):
    """What surrounds the machines: the network, the dice, the counters.

    Attributes:
        seen: How often each kind of event occurred.
        hops: Every machine there ever was, by its peer id.
        history: Committed and live nodes after each sweep, by its sequence number: what a restored hop must have.
    """

    rng: random.Random
    seen: Counter[str]
    writer: SweepWriter
    hops: dict[PeerId, Hop]
    history: dict[int, tuple[list[TreeNodeId], list[TreeNodeId]]]

    def connect(self, source: Sender, place: RouteHop) -> Stream:
        """Open a stream to a machine."""

    def make_log(self, limits: Limits) -> HopLog:
        """A new session's log."""


@dataclass(slots=True, eq=False)
class Stream:
    """One connection: to a successor, or to the tail for replies.

    Attributes:
        target: The machine that it leads to.
        place: That machine and its span, as the route names them.
        down: Messages on their way to the target.
        up: Answers on their way to the source.
        is_fenced: The target does not read it any more.
        is_cut: Nothing that is sent from now on arrives.
        is_noticed: The source knows that it is of no use.
    """

    source: Sender
    target: Hop
    place: RouteHop
    down: deque[DownMessage] = field(default_factory=deque)
    up: deque[UpMessage] = field(default_factory=deque)
    is_attached: bool = False
    is_fenced: bool = False
    is_cut: bool = False
    is_noticed: bool = False

    def send(self, message: DownMessage) -> None:
        """Put a message on its way to the target."""
        if not self.is_cut:
            self.down.append(message)

    def answer(self, message: UpMessage) -> None:
        """Put a message on its way to the source."""
        if not self.is_cut:
            self.up.append(message)

    def cut(self, rng: random.Random) -> None:
        """Lose what is in flight, from some point on, in both directions."""
        self.is_cut = True
        for queue in (self.down, self.up):
            for _ in range(rng.randint(0, len(queue))):
                queue.pop()


class Sender:
    """What the client and every hop have in common: a journal and a successor.

    Attributes:
        index: Its place in the route; the client's is -1.
        owes: Whether the successor lacks what follows `reached`.
        reached: The last sequence number that the successor has received, or that is on its way to it.
    """

    index = -1

    def __init__(self, world: Environment) -> None:
        self.world = world
        self.generation = -1
        self.route: Route = ()
        self.journal: Journal
        self.link: Stream | None = None
        self.owes = False
        self.reached: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the journal is behind the state of the rules just now."""
        return False

    def follow(self) -> None:
        """Go on with `route` (R2)."""
        place, link = self.route[self.index + 1], self.link
        if link is not None and link.place == place and link.is_attached and not link.is_noticed:
            link.send(Reroute(self.generation, self.route, OPEN))
            self.world.seen["rerouted in band"] += 1
            return
        self.link = self.world.connect(self, place)
        self.owes = False
        self.link.send(Attach(SESSION, self.generation, self.route, self.index + 1, OPEN))

    def hear(self, stream: Stream, message: UpMessage) -> None:
        if stream is not self.link:
            return
        match message:
            case Attached(received=received):
                stream.is_attached, self.owes, self.reached = True, True, received
                self.sync()
            case Ready(generation=generation) if generation == self.generation:
                self.on_ready()
            case _:
                pass

    def on_ready(self) -> None:
        """The whole chain behind has the new route."""
        raise NotImplementedError

    def ask(self) -> None:
        """Have the journal filled again, because it was dropped."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send the successor what it lacks, as soon as this is possible."""
        if self.link is None or not self.owes or self.is_busy:
            return
        sequence = self.journal.state.sequence
        lacks = sequence > (self.reached or 0)
        if lacks and self.journal.is_dropped:
            self.ask()
            return
        self.owes = False
        if not lacks:
            return
        for message in self.journal.replay(self.reached):
            self.link.send(message)
            self.world.seen["snapshots" if isinstance(message, Snapshot) else "catch-ups"] += 1
        self.reached = sequence

    def push(self, frame: SweepFrame) -> None:
        """Send a sweep, unless a replay will hold it."""
        if self.link is not None and self.link.is_attached and not self.owes:
            self.link.send(frame)
            self.reached = max(self.reached or 0, frame.sweep.sequence)


class Hop(Sender):
    """One machine and what it holds of the session."""

    def __init__(self, world: Environment, span: Span) -> None:
        super().__init__(world)
        self.peer = PeerId(f"peer {len(world.hops)}")
        self.is_alive = True
        self.upstream: Stream | None = None
        self.begin(span)

    def begin(self, span: Span) -> None:
        """Begin a session of which nothing is known yet."""
        limits = self.world.writer.limits
        self.span = span
        self.log = self.world.make_log(limits)
        self.machine = FakeSpan(limits, span)
        self.journal = Journal(self.log.executed)
        self.running: SweepWork | None = None
        self.picks: dict[TreeNodeId, int] = {}
        self.replies: dict[int, Reply] = {}
        self.sink: Stream | None = None
        self.link = None
        self.owes = False
        self.reached = None
        self.has_asked = False

    @property
    def is_tail(self) -> bool:
        """Whether it has the last layer."""
        return self.span.end == LAYERS

    @property
    def is_replaying(self) -> bool:
        """Whether it runs, or will run, sweeps of a replay."""
        return self.log.is_replaying or (self.running is not None and self.running.is_replay)

    @property
    def is_busy(self) -> bool:
        """Whether a sweep runs, or the log is in a replay."""
        return self.running is not None or self.log.is_replaying

    # What comes from upstream

    def hears(self, stream: Stream) -> bool:
        """Whether the session's sweeps come from this stream (R3)."""
        return stream is self.upstream

    def received(self) -> int | None:
        """The answer to Attach (R4). A hop that can replay nothing wants a replay itself (R8)."""
        return None if self.journal.is_dropped else self.log.received.sequence or None

    def receive(self, stream: Stream, message: DownMessage) -> None:
        match message:
            case Attach():
                self.attach(stream, message)
            case RepliesRequest():
                self.sink = stream
                for reply in self.replies.values():
                    if reply.sequence > message.acked:
                        stream.answer(reply)
            case _ if not self.hears(stream):
                self.world.seen["fenced off"] += 1
            case SweepFrame():
                if not self.log.receive(message):
                    self.world.seen["repetitions"] += 1
                    self.repeat(message.sweep.sequence)
            case Snapshot():
                self.restore(message)
            case Reroute():
                self.reroute(message)

    def attach(self, stream: Stream, attach: Attach) -> None:
        """Take a new predecessor, unless its generation is old (R3)."""
        if attach.generation <= self.generation:
            stream.is_fenced = True
            self.world.seen["stale Attach"] += 1
            return
        if self.upstream is not None:
            self.upstream.is_fenced = True
            self.world.seen["new upstream"] += 1
        span = attach.route[attach.index].span
        if span != self.span:
            self.world.seen["other layers"] += 1
            for old in (self.link, self.sink):
                if old is not None:
                    old.cut(self.world.rng)
            self.begin(span)
        self.upstream, self.has_asked = stream, False
        stream.answer(Attached(attach.generation, self.received()))
        self.go_on(attach.generation, attach.route, attach.index)

    def reroute(self, reroute: Reroute) -> None:
        """Take a new route from the predecessor that is there already."""
        here = RouteHop(self.peer, self.span)
        if reroute.generation > self.generation and here in reroute.route:
            self.go_on(reroute.generation, reroute.route, reroute.route.index(here))

    def go_on(self, generation: int, route: Route, index: int) -> None:
        """Pass a new route on; the tail answers that it is ready."""
        self.generation, self.route, self.index = generation, route, index
        if not self.is_tail:
            self.follow()
            return
        self.on_ready()
        for sequence in self.replies:
            self.repeat(sequence)  # R6

    def restore(self, snapshot: Snapshot) -> None:
        """Take a snapshot as the state, and check it against what was sent."""
        self.log.restore(snapshot)
        state = self.log.executed
        assert (list(map(id_of, state.committed)), [*state.live]) == self.world.history[state.sequence], (
            "another history"
        )
        self.journal.restored(self.log.executed, snapshot.headers)
        self.running, self.picks, self.replies, self.has_asked = None, {}, {}, False
        self.owes = self.link is not None and self.link.is_attached
        self.world.seen["restored"] += 1
        self.world.seen["restored with KV behind"] += self.reached is not None

    # Work

    def start(self) -> None:
        self.running = self.log.next_work()

    def finish(self) -> None:
        """End the sweep that runs: answer it, or pass its rows on."""
        work, self.running = self.running, None
        assert work is not None
        sweep, nodes, values = work.frame.sweep, work.nodes, self.machine.execute(work)
        if not self.is_replaying:
            assert self.machine.slots.committed == len(self.log.executed.committed), "KV of another length"
        if self.is_tail:
            wanted = {node: pick(value) for node, value in zip(nodes, values, strict=True) if node >= sweep.picks_from}
            self.answer(work, wanted)
            return
        rows = rows_of(values)
        if not work.is_replay:
            self.journal.note(sweep)
        self.journal.keep(work.applied, nodes, rows)
        if self.owes:
            self.sync()
        elif not work.is_replay:
            kept = tuple(offset in work.run for offset in range(len(sweep.tokens)))
            self.push(SweepFrame(sweep, kept, rows))

    def answer(self, work: SweepWork, wanted: dict[TreeNodeId, int]) -> None:
        """Answer a sweep, or a part of a replay, with the tail's picks (R6)."""
        if not work.is_replay:
            self.reply(Reply(work.frame.sweep.sequence, self.generation, tuple(wanted.items())))
            return
        self.picks |= wanted
        if not self.log.is_replaying:
            for reply in self.log.replies(self.picks, self.generation):
                self.world.seen["computed again"] += 1
                self.reply(reply)

    def reply(self, reply: Reply) -> None:
        """Keep a reply until it is acknowledged, and send it."""
        acked = self.log.received.acked
        self.replies = {sequence: kept for sequence, kept in self.replies.items() if sequence > acked}
        self.replies[reply.sequence] = reply
        self.repeat(reply.sequence)

    def repeat(self, sequence: int) -> None:
        """Send a kept reply, if somebody reads replies."""
        if self.sink is not None and sequence in self.replies:
            self.sink.answer(self.replies[sequence])

    # What goes upstream

    def on_ready(self) -> None:
        if self.upstream is not None:
            self.upstream.answer(Ready(self.generation, Credits(0, 0, 0)))

    def ask(self) -> None:
        """Ask for a replay, which it needs before it can give one (R8)."""
        if self.upstream is not None and not self.has_asked:
            self.has_asked = True
            self.upstream.answer(Attached(self.generation, None))
            self.world.seen["asked for a replay"] += 1


def id_of(token: CommittedToken) -> TreeNodeId:
    return token.id


class Client(Sender):
    """The client: the predecessor of hop 0, and the reader of the tail's replies."""

    def __init__(self, world: Environment, writer: SweepWriter) -> None:
        super().__init__(world)
        self.walk = writer.walk
        self.journal = Journal(self.walk.state)
        self.is_ready = False
        self.replies: Stream | None = None

    def take(self, route: Route) -> None:
        """Go on with a new route (R1)."""
        self.generation += 1
        self.walk.generation = self.generation
        self.route, self.is_ready = route, False
        self.follow()

    def on_ready(self) -> None:
        """The route stands; read its replies."""
        self.is_ready = True
        self.follow_tail()

    def follow_tail(self) -> None:
        """Read the replies of this route's tail (R6)."""
        tail, old = self.route[-1], self.replies
        if old is None or old.place != tail or old.is_cut:
            if old is not None:
                old.cut(self.world.rng)
            self.replies = self.world.connect(self, tail)
            self.replies.send(RepliesRequest(SESSION, self.generation, self.walk.state.acked))
            self.world.seen["reply streams"] += 1

    def hear(self, stream: Stream, message: UpMessage) -> None:
        """Take a reply, or what the successor says."""
        if not isinstance(message, Reply):
            super().hear(stream, message)
        elif stream is self.replies:
            self.world.seen["replies again"] += message.sequence <= self.walk.state.acked
            self.world.writer.accept(message)
