"""Schedules of faults for a chain that repairs itself: what happens when is random, from a seed.

Nothing happens by itself: `World.step` lets one thing happen that could happen now, or one fault. Time is the number
of steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from benchmarks.simulation.fake_chain import LAYERS, GlancingLog, SweepWriter
from benchmarks.simulation.repair_chain import Client, DownMessage, Hop, Route, Sender, Stream, UpMessage, id_of
from swarm.base.ids import PeerId, TreeNodeId
from swarm.base.layers import Span
from swarm.protocol.hop_log import HopLog
from swarm.protocol.messages import Attach, Ready, Reroute, RouteHop, Sweep, SweepFrame
from swarm.protocol.session import Limits

MOST_STEPS = 10_000
FAULT_PROBABILITY = 0.04
NOTICE_PROBABILITY = 0.02


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """What happens in a schedule, and what its hops are. Tests take rules away here.

    Attributes:
        new_tokens: The schedule ends when the text has so many.
        faults: At most so many faults, beside those that follow from them.
        zombies_return: Machines that were left may be used again, with their old state.
        repetitions: Probability that a sweep arrives twice.
        make_log: The log of a new session; by default one that looks into its queue, always or now and then.
        restarts: At most so many further turns.
        has_deadline: The client repairs again when a route is not ready in time (R7).
    """

    new_tokens: int = 5
    faults: int = 4
    zombies_return: bool = True
    repetitions: float = 0.04
    make_hop: type[Hop] = Hop
    make_log: Callable[[Limits, random.Random], HopLog] | None = None
    restarts: int = 1
    has_deadline: bool = True


USUAL = SchedulePlan()


class World:
    """One schedule, from a seed."""

    def __init__(self, seed: int, plan: SchedulePlan = SchedulePlan()) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.plan = plan
        self.seen: Counter[str] = Counter()
        self.writer = SweepWriter(rng, widest=4)
        self.restarts = plan.restarts if rng.random() < 0.4 else 0
        self.faults = rng.randint(1, plan.faults)
        self.looks_far = rng.random() < 0.5
        self.hops: dict[PeerId, Hop] = {}
        self.living: list[Hop] = []
        self.streams: list[Stream] = []
        self.history: dict[int, tuple[list[TreeNodeId], list[TreeNodeId]]] = {}
        self.loses_next = False
        self.now = self.deadline = 0
        self.client = Client(self, self.writer)
        borders = sorted({0, LAYERS, *rng.sample(range(1, LAYERS), rng.randint(0, LAYERS - 1))})
        spans = [Span(*ends) for ends in pairwise(borders)]
        self.go(tuple(RouteHop(self.fresh(span).peer, span) for span in spans))

    # The run

    def run(self) -> None:
        """Run until the text has its length.

        Raises:
            AssertionError: the text is another one, or no end is in sight.
        """
        while len(self.writer.text) < self.plan.new_tokens:
            self.now += 1
            assert self.now < MOST_STEPS, "stuck: no end in sight"
            self.step()
        self.writer.check_text()
        self.seen["schedules"] += 1
        self.seen["generations"] += self.client.generation

    def step(self) -> None:
        """Let one thing happen: a repair that is due, a fault, a restart or an ordinary event."""
        if not self.client.is_ready and self.now >= self.deadline and self.plan.has_deadline:
            self.seen["deadlines"] += 1
            self.repair(self.dead())  # R7
            return
        luck = self.rng.random()
        if luck < FAULT_PROBABILITY and self.faults:
            self.faults -= 1
            self.fault()
        elif luck > 1 - NOTICE_PROBABILITY and self.is_broken():
            self.notice()
        elif (
            luck > 1 - (2 if self.client.is_ready else 5) * NOTICE_PROBABILITY
            and self.restarts
            and self.writer.can_restart
        ):
            self.restart()
        else:
            self.act()

    def act(self) -> None:
        """Let one ordinary event happen: a message arrives, a sweep begins or ends, the client sends."""
        able: list[Callable[[], None]] = []
        for stream in self.streams:
            if stream.down or stream.up:
                able.append(partial(self.deliver, stream))
            elif (stream.is_cut or stream.is_fenced) and not stream.is_noticed and self.rng.random() < 0.3:
                able.append(partial(self.end, stream))
        for hop in self.living:
            if hop.running is not None:
                able.append(hop.finish)
            elif len(hop.log):
                able.append(hop.start)
        if self.writer.can_send:
            able.append(self.send)
        if able:
            self.rng.choice(able)()
        elif not self.client.is_ready and self.plan.has_deadline:
            self.now = max(self.now, self.deadline)
        else:
            assert self.is_broken(), "stuck: nothing travels, nothing may be sent and nothing is broken"
            self.notice()

    def send(self) -> None:
        self.dispatch(self.writer.sweep())

    def restart(self) -> None:
        self.restarts -= 1
        commit, _ = self.writer.restart()
        if commit is not None:
            self.dispatch(commit)
        self.seen["restarts"] += 1
        self.seen["restarts during repair"] += not self.client.is_ready

    def dispatch(self, sweep: Sweep) -> None:
        """Send a sweep, and note the state that it leads to."""
        state = self.writer.walk.state
        self.history[sweep.sequence] = (list(map(id_of, state.committed)), [*state.live])
        self.client.journal.note(sweep)
        self.client.push(SweepFrame(sweep))
        self.seen["sweeps"] += 1
        self.seen["sweeps during repair"] += not self.client.is_ready

    # Streams

    def connect(self, source: Sender, place: RouteHop) -> Stream:
        """Open a stream. What lies behind it may be dead."""
        stream = Stream(source, self.hops[place.peer], place)
        stream.is_cut = not stream.target.is_alive
        self.streams = [old for old in self.streams if old.down or old.up or not old.is_noticed]
        self.streams.append(stream)
        return stream

    def deliver(self, stream: Stream) -> None:
        """Let one message arrive, on the one side or the other."""
        if stream.down and (not stream.up or self.rng.random() < 0.5):
            message = stream.down.popleft()
            if not self.is_lost(message) and stream.target.is_alive:
                if isinstance(message, SweepFrame) and self.rng.random() < self.plan.repetitions:
                    self.rng.choice((stream.down.append, stream.down.appendleft))(message)
                stream.target.receive(stream, message)
            return
        answer = stream.up.popleft()
        source = stream.source
        if not self.is_lost(answer) and not (isinstance(source, Hop) and not source.is_alive):
            source.hear(stream, answer)

    def is_lost(self, message: DownMessage | UpMessage) -> bool:
        """Whether a message that the repair needs gets lost, as planned."""
        if not (self.loses_next and isinstance(message, Attach | Reroute | Ready)):
            return False
        self.loses_next = False
        self.seen[f"lost {type(message).__name__}"] += 1
        return True

    def end(self, stream: Stream) -> None:
        """Tell who opened the stream that it is over."""
        stream.is_noticed = True
        stream.cut(self.rng)

    # Faults

    def fault(self) -> None:
        kind = self.rng.choice(
            (self.kill, self.kill, self.kill, self.mistake, self.mistake, self.cut, self.lose, self.overflow)
        )
        kind()

    def kill(self) -> None:
        """One machine dies, or several; rather those that are in a replay."""
        route = [self.hops[place.peer] for place in self.client.route]
        count = self.rng.choice((1, 1, 1, 2, len(route)))
        victims = {hop.peer: hop for hop in self.rng.choices(route, self.weights(), k=count) if hop.is_alive}
        self.seen["killed together"] += len(victims) > 1
        self.seen["killed all"] += len(victims) == len(route)
        for hop in victims.values():
            self.seen["kills"] += 1
            self.seen[f"killed {self.phase(hop)}"] += 1
            self.seen["killed hop 0"] += hop is route[0]
            self.seen["killed tail"] += hop is route[-1]
            hop.is_alive = False
            self.living.remove(hop)
            for stream in self.streams:
                if hop in (stream.source, stream.target):
                    stream.cut(self.rng)

    def weights(self) -> list[int]:
        """How interesting a fault is at each place of the route: in a replay, with messages on their way or waiting."""
        route = [self.hops[place.peer] for place in self.client.route]
        return [
            1
            + 8 * hop.is_replaying
            + 4 * (hop.link is not None and len(hop.link.down) > 0)
            + 4 * (hop.link is not None and len(hop.link.target.log) > 0)
            for hop in route
        ]

    def phase(self, hop: Hop) -> str:
        """What a machine was doing when it was killed."""
        if hop.is_replaying:
            return "in replay"
        if not self.client.is_ready:
            return "in repair"
        if self.writer.left:
            return "in prefill"
        return "at work" if hop.running is not None or len(hop.log) else "idle"

    def mistake(self) -> None:
        """Machines are taken for dead, and go on."""
        places = set(self.rng.choices(range(len(self.client.route)), self.weights(), k=self.rng.choice((1, 1, 2))))
        self.seen["split brain"] += sum(self.hops[self.client.route[place].peer].is_alive for place in places)
        self.repair(places)

    def cut(self) -> None:
        """A stream of the chain is cut."""
        streams = [stream for stream in self.chain() if not stream.is_cut]
        if streams:
            self.rng.choice(streams).cut(self.rng)
            self.seen["cut streams"] += 1

    def lose(self) -> None:
        """The next message of a repair gets lost. In half of the cases a repair begins at once."""
        self.loses_next = True
        if self.rng.random() < 0.5:
            self.repair(set())

    def overflow(self) -> None:
        """A machine has no memory for its journal any more. Mostly the journal is needed soon."""
        hops = [self.hops[place.peer] for place in self.client.route[:-1]]
        hops = [hop for hop in hops if hop.is_alive and not hop.journal.is_dropped]
        if hops:
            self.rng.choice(hops).journal.drop()
            self.seen["dropped journals"] += 1
            self.faults += self.rng.random() < 0.5

    # Repair

    def chain(self) -> list[Stream]:
        """The streams of the route, as far as they stand."""
        senders = [self.client, *(self.hops[place.peer] for place in self.client.route)]
        return [stream for stream in (*(sender.link for sender in senders), self.client.replies) if stream is not None]

    def dead(self) -> set[int]:
        """Which places of the route are found dead; not all of them at once."""
        lost = {place for place, hop in enumerate(self.client.route) if not self.hops[hop.peer].is_alive}
        return {place for place in lost if self.rng.random() < 0.8}

    def is_broken(self) -> bool:
        """Whether a stream is cut or a machine is dead."""
        return any(stream.is_cut for stream in self.chain()) or any(
            not self.hops[place.peer].is_alive for place in self.client.route
        )

    def notice(self) -> None:
        """The client learns that something is wrong."""
        replies = self.client.replies
        places = self.dead()
        if self.client.is_ready and replies is not None and replies.is_cut and not places:
            self.client.follow_tail()
        if (self.chain() and any(stream.is_cut and stream is not replies for stream in self.chain())) or places:
            self.repair(places)

    def repair(self, places: set[int]) -> None:
        """A new generation, with others at these places of the route."""
        taken = {hop.peer for hop in self.client.route}
        route: list[RouteHop] = []
        start = 0
        for place, hop in enumerate(self.client.route):
            if place not in places:
                self.seen["took over"] += start < hop.span.start
                route.append(RouteHop(hop.peer, Span(start, hop.span.end)))
            elif place + 1 < len(self.client.route) and self.rng.random() < 0.25:
                if self.rng.random() < 0.5:
                    places = places | {place + 1}
                continue  # who comes next takes its layers: the old one there, or a new one for both
            else:
                route += self.instead(start, hop.span, taken)
            start = hop.span.end
        self.go(tuple(route))

    def instead(self, start: int, lost: Span, taken: set[PeerId]) -> list[RouteHop]:
        """One machine or two for the layers of a lost one."""
        self.seen["two became one"] += start < lost.start
        middle = self.rng.randint(start, lost.end) if self.rng.random() < 0.3 else start
        self.seen["one became two"] += start < middle < lost.end
        found = []
        for ends in ((start, middle), (middle, lost.end)):
            if ends[0] < ends[1]:
                found.append(RouteHop(self.spare(Span(*ends), taken), Span(*ends)))
                taken.add(found[-1].peer)
        return found

    def go(self, route: Route) -> None:
        self.deadline = self.now + self.rng.randint(60, 400)
        self.client.take(route)

    def spare(self, span: Span, taken: set[PeerId]) -> PeerId:
        """A fresh machine, or one that was left and has its old state."""
        left = [hop for hop in self.living if hop.peer not in taken]
        if left and self.plan.zombies_return and self.rng.random() < 0.5:
            same = [hop for hop in left if hop.span == span]
            hop = self.rng.choice(same if same and self.rng.random() < 0.8 else left)
            self.seen["came back"] += 1
            self.seen["came back with old state"] += hop.span == span and hop.log.received.sequence > 0
            return hop.peer
        return self.fresh(span).peer

    def fresh(self, span: Span) -> Hop:
        """A machine that nobody has used yet."""
        hop = self.plan.make_hop(self, span)
        self.hops[hop.peer] = hop
        self.living.append(hop)
        return hop

    def make_log(self, limits: Limits) -> HopLog:
        if self.plan.make_log is not None:
            return self.plan.make_log(limits, self.rng)
        return HopLog(limits) if self.looks_far else GlancingLog(limits, self.rng)
