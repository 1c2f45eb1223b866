"""The decode loop: prefill, then draft → sweeps → walk until the text ends. Source: SpecExec (arXiv 2406.02532), §4.

Exact for any draft: what is emitted are the target's own picks. Owns no network, no model and no text rules.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from client.answers import Answer
from client.draft import Drafter
from client.hidden import WANT_ROWS, Observe, hand_over
from client.stats import SweepStats
from client.text import TextStream
from client.walk import Walk
from swarm.budget import Ahead, Budget, Busy, Choice, Spent, Worth
from swarm.errors import Unfinished
from swarm.ids import TreeNodeId
from swarm.messages import Credits, Reply, Sampling, Sweep
from swarm.tree import DraftTree

MOST_TURNS = 64
"""Drafting goes on so often for one more sweep."""
PREFILLS_IN_FLIGHT = 3
"""Parts of a prompt that are unanswered at a time."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One generation: what to continue, how, and what came of it.

    prompt: token ids. chunk: nodes per prefill sweep. text: decides where the output ends. kept_tokens: of the prompt,
    those that the session held already. options: what it was asked for. resumed_tokens: were in `text` from the start.
    observe: who gets the target's hidden rows; None asks for none.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    budget: Budget
    chunk: int
    max_new_tokens: int
    text: TextStream
    drafter: Drafter
    drafting: Executor
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed_tokens: int = 0
    clock: Callable[[], float] = time.perf_counter
    observe: Observe | None = None
    kept_tokens: int = 0
    prefill_sweeps: int = 0
    sweeps: list[SweepStats] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """Most tree nodes of a sweep, its pending token not counted."""
        return self.budget.most if self.max_new_tokens > 1 else 0

    @property
    def sequence(self) -> tuple[int, ...]:
        """Every certain token."""
        return (*self.prompt, *self.text.tokens)

    def unfinished(self) -> Unfinished:
        """What it takes to go on later."""
        return Unfinished(self.prompt, {**self.options, "seed": self.sampling.seed}, tuple(self.text.tokens))

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.text.tokens)


class Trips(Protocol):
    """What the loop needs of a chain."""

    @property
    def credits(self) -> Credits:
        """What may be unanswered."""

    @property
    def first_link_ms(self) -> float:
        """One-way time to hop 0."""

    @property
    def route_key(self) -> Hashable:
        """Names the machines that it goes over now."""

    @property
    def has_answer(self) -> bool:
        """Whether `answer` would return at once."""

    def send(self, sweep: Sweep) -> None:
        """Start a sweep."""

    async def answer(self) -> Answer:
        """The next reply."""

    async def idle(self, most_ms: float) -> None:
        """Until `answer` would return at once, or so much time has passed."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One sweep on its way.

    tree: what was drafted, of which the sweep carries a part. places: of its session nodes in the tree, None for the
    root. route: over which it goes. choice: why it is as large as it is. draft_ms: what drafting took. sent_s: when.
    alone: whether every hop should have done with what was sent before when this one comes. busy: what it keeps busy.
    """

    tree: DraftTree
    places: Mapping[TreeNodeId, int | None]
    nodes: int
    depth: int
    route: Hashable
    choice: Choice
    draft_ms: float
    sent_s: float
    alone: bool
    busy: Busy

    @property
    def is_first(self) -> bool:
        """Whether it carries the root itself, whose pick comes in any case."""
        return None in self.places.values()

    @property
    def promised(self) -> float:
        """Tokens that its nodes should bring."""
        return sum(self.tree.chances[place] for place in self.places.values() if place is not None)


@dataclass(slots=True)
class Pipe:
    """Sweeps that were sent for one generation and are not learned from yet.

    flights: unanswered, by sequence. lessons: each with the nodes that the text went through. free_s: when the first
    hop should have done with all of them. clear_s: from when on a sweep should meet none of them at any hop.
    """

    flights: dict[int, Flight] = field(default_factory=dict)
    lessons: list[tuple[Flight, Reply, tuple[TreeNodeId, ...]]] = field(default_factory=list)
    free_s: float = 0.0
    clear_s: float = 0.0

    def sent(self, sequence: int, flight: Flight) -> None:
        """A sweep is on its way, which keeps hops busy."""
        self.flights[sequence] = flight
        starts_s = max(self.free_s, flight.sent_s)
        self.free_s = starts_s + flight.busy.slot_ms / 1e3
        self.clear_s = max(self.clear_s, starts_s + flight.busy.through_ms / 1e3)

    def answered(self, sequence: int, now_s: float) -> Flight | None:
        """A sweep is back: hops have done with it, whatever was predicted. What it was, None if it was the prompt's.

        Else where sweeps were once believed to take longer than they do, each would leave a remainder, none would seem
        to be alone, and nobody would learn better.
        """
        flight, left = self.flights.pop(sequence, None), [other.busy for other in self.flights.values()]
        self.free_s = min(self.free_s, now_s + sum(busy.slot_ms for busy in left) / 1e3)
        self.clear_s = min(self.clear_s, now_s + sum(busy.through_ms for busy in left) / 1e3)
        return flight

    def is_clear(self, now_s: float, others: int) -> bool:
        """Whether a sweep that leaves now should meet nothing of ours, of which `others` are the prompt's parts."""
        return now_s >= self.clear_s and others == 0

    def ahead(self, now_s: float) -> Ahead:
        """What is on its way."""
        first = next(iter(self.flights.values()), None)
        due_ms = math.inf if first is None or first.choice.predicted_ms is None else first.choice.predicted_ms
        reply_ms = due_ms - (now_s - first.sent_s) * 1e3 if first is not None else due_ms
        return Ahead(len(self.flights), max(self.free_s - now_s, 0.0) * 1e3, reply_ms)


async def decode(job: Job, chain: Trips, walk: Walk) -> AsyncIterator[str]:
    """Generate; yields text as it becomes certain, possibly "" while a character or a stop string is incomplete.

    While sweeps are on their way, the tree grows on below nodes whose picks are not known yet, where that pays: a walk
    that stays inside it needs no further trip. Sweeps that it leaves behind die on the hops (PROTOCOL P7).

    The session may be new, or hold any sequence, and even sweeps of a generation that was left: what it has in common
    with the prompt does not travel again.

    Raises:
        SwarmError: what broke the chain; `job.text` holds what was made before.
    """
    if job.text.stopped:
        return
    await _prefill(job, chain, walk)
    pipe = Pipe()
    walk.want = WANT_ROWS if job.observe is not None else None
    while not job.text.stopped:
        if walk.pending is not None:
            await _learn(job, pipe)  # the reply that a guess was wrong tells most of what follows
            await _speculate(job, chain, walk, pipe)
        while await _deepen(job, chain, walk, pipe):
            pass
        await _learn(job, pipe)  # while the sweeps are on their way
        answer = await chain.answer()
        emitted = walk.accept(answer.reply)
        piece = job.text.push(emitted)
        if job.observe is not None and answer.reply.rows is not None:
            hand_over(answer.reply, walk, job.sequence, job.observe)
        flight = pipe.answered(answer.reply.sequence, job.clock())
        if flight is not None:  # and no prefill
            _account(job, chain, flight, answer, len(emitted))
            pipe.lessons.append((flight, answer.reply, walk.passed))
        yield piece
    await _learn(job, pipe)


async def _prefill(job: Job, chain: Trips, walk: Walk) -> None:
    """Send all of the prompt but its last token, which the first tree hangs from, as far ahead as the credits allow.

    The draft then reads the prompt while the chain does.
    """
    ahead = max(0, min(chain.credits.sweeps - 1, PREFILLS_IN_FLIGHT) - 1)
    await _await_replies(chain, walk, ahead)
    prompt = job.sequence
    commit, job.kept_tokens = walk.restart(prompt, job.sampling)
    if commit is not None:
        chain.send(commit)
    for start in range(job.kept_tokens, len(prompt) - 1, job.chunk):
        await _await_replies(chain, walk, ahead)
        chain.send(walk.prefill(prompt[start : min(start + job.chunk, len(prompt) - 1)], last=False))
        job.prefill_sweeps += 1
    await _await_replies(chain, walk, chain.credits.sweeps - 1)


async def _await_replies(chain: Trips, walk: Walk, most: int) -> None:
    """Until at most so many sweeps are unanswered."""
    while walk.in_flight > most:
        walk.accept((await chain.answer()).reply)


def _account(job: Job, chain: Trips, flight: Flight, answer: Answer, emitted: int) -> None:
    """Note what a sweep took and brought."""
    times = answer.reply.times
    logger.debug("sweep %d: %d nodes, %d tokens", answer.reply.sequence, flight.nodes, emitted)
    job.sweeps.append(
        SweepStats(
            nodes=flight.nodes,
            emitted=emitted,
            draft_ms=flight.draft_ms,
            total_ms=answer.total_ms,
            first_link_ms=chain.first_link_ms,
            hops=times,
            depth=flight.depth,
            predicted_ms=flight.choice.predicted_ms,
            reason=flight.choice.reason,
            is_part=not flight.is_first,
            rounds=flight.tree.rounds,
        )
    )
    if flight.route == chain.route_key:  # what a repair took says nothing of a route
        links_ms = [chain.first_link_ms, *(hop.link_ms for hop in times)]
        waited_ms, computed_ms = sum(hop.queue_ms for hop in times), sum(hop.compute_ms + hop.other_ms for hop in times)
        job.budget.spent(
            flight.route,
            Spent(
                flight.nodes,
                answer.total_ms,
                waited_ms,
                computed_ms,
                hops=len(times),
                promised=flight.promised,
                brought=max(emitted - flight.is_first, 0),
                alone=flight.alone,
                network_ms=sum(links_ms) if all(links_ms) else 0.0,
            ),
        )


async def _speculate(job: Job, chain: Trips, walk: Walk, pipe: Pipe) -> None:
    """Grow a tree below the pending token and send both: all of the tree, or its best part ahead of the rest."""
    route = chain.route_key
    tree, choice, draft_ms = await _draft(job, route, walk.room - 1)
    others = walk.in_flight - len(pipe.flights)
    sent = tree.first(choice.nodes if choice.chunk is None else choice.chunk)
    sweep = walk.extend(sent)
    chain.send(sweep)
    places: dict[TreeNodeId, int | None] = {sweep.first_id: None}
    places |= {TreeNodeId(sweep.first_id + 1 + place): place for place in range(len(sent))}
    now_s = job.clock()
    alone, ahead = pipe.is_clear(now_s, others), pipe.ahead(now_s)
    if choice.predicted_ms is not None:
        choice = replace(choice, predicted_ms=choice.predicted_ms + ahead.busy_ms)
    busy = job.budget.busy(route, len(sweep.tokens))
    pipe.sent(sweep.sequence, Flight(sent, places, len(sent), sent.depth, route, choice, draft_ms, now_s, alone, busy))


async def _deepen(job: Job, chain: Trips, walk: Walk, pipe: Pipe) -> bool:
    """Send further nodes of the best tree below the certain node, whose pick is on its way; whether it was worth it."""
    certain, route, temperature = walk.certain, chain.route_key, job.sampling.temperature
    room, depth = walk.room, job.tokens_left - 1
    if walk.pending is not None or certain is None or chain.has_answer or min(room, depth) < 1 or job.text.stopped:
        return False
    if job.sampling.multistep:  # children that are added later were not drawn before their parent's pick
        return False
    most = job.budget.more(route, temperature, room, ahead := pipe.ahead(job.clock()))
    if most == 0:
        return False
    on_way = len(walk.state.below(certain)) if certain in walk.state.live else len(walk.state.live)
    least, started = job.budget.least(route, temperature), job.clock()
    wanted = room if ahead.busy_ms else 0  # else what costs nothing is all that may be there to send
    for _ in range(MOST_TURNS):  # while the first hop is busy, or until there is enough for a sweep
        go_on = partial(_goes_on, job, chain, pipe, wanted)
        tree = await _grow(job, on_way + most, depth, Worth(least, go_on=go_on))
        if chain.has_answer:  # what it says comes first
            return False
        known, new = _unsent(walk, certain, tree, min(most, room), least)
        ahead = pipe.ahead(job.clock())
        choice = job.budget.further(route, [tree.chances[place] for place in new], ahead)
        if choice.nodes and not ahead.busy_ms:
            break
        has_done = tree.is_settled or job.budget.more(route, temperature, room, ahead) == 0
        if has_done and not choice.nodes:
            return False
        if has_done:  # what is to go may change until it can
            await chain.idle(ahead.busy_ms)
            if chain.has_answer:
                return False
        wanted = room
    else:
        return False
    new = new[: choice.nodes]
    now_s = job.clock()
    draft_ms, alone = (now_s - started) * 1e3, pipe.is_clear(now_s, walk.in_flight - len(pipe.flights))
    sweep = walk.grow([tree.tokens[place] for place in new], [known[tree.parents[place]] for place in new])
    chain.send(sweep)
    places: dict[TreeNodeId, int | None] = {known[place]: place for place in new}
    busy = job.budget.busy(route, len(new))
    pipe.sent(sweep.sequence, Flight(tree, places, len(new), tree.depth, route, choice, draft_ms, now_s, alone, busy))
    return True


def _goes_on(job: Job, chain: Trips, pipe: Pipe, room: int, rounds: int) -> bool:
    """Whether there is time for another round of drafting, after so many; the loop waits while drafting asks.

    room: for the nodes of a round that is wanted in any case, 0 where none is.
    """
    budget, ahead = job.budget, pipe.ahead(job.clock())
    is_wanted = rounds == 0 and budget.more(chain.route_key, job.sampling.temperature, room, ahead) > 0
    return (is_wanted or budget.has_time(ahead)) and not chain.has_answer


def _unsent(
    walk: Walk, certain: TreeNodeId, tree: DraftTree, most: int, least: float
) -> tuple[dict[int | None, TreeNodeId], list[int]]:
    """The session's nodes of a tree below the certain one, and which of its nodes go next, with the next ids."""
    known: dict[int | None, TreeNodeId] = {None: certain}
    new: list[int] = []
    for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in known:
            continue
        there = walk.child(known[parent], token) if known[parent] < walk.state.next_id else None
        if there is not None:
            known[place] = there
        elif len(new) < most and tree.chances[place] > least:
            known[place] = TreeNodeId(walk.state.next_id + len(new))
            new.append(place)
    return known, new


async def _learn(job: Job, pipe: Pipe) -> None:
    """Hand the picks after trees' nodes and roots to the drafter that grew them, on its own thread."""
    lessons, pipe.lessons = pipe.lessons, []
    for flight, reply, passed in lessons:
        picks: dict[int | None, int] = {}
        others: dict[int | None, int] = {}
        for node, token in reply.picks:
            if node in flight.places:
                (picks if node in passed else others)[flight.places[node]] = token
        if flight.tree and (picks or others):
            learn = job.drafter.learn
            await asyncio.get_running_loop().run_in_executor(job.drafting, learn, flight.tree, picks, others)


async def _draft(job: Job, route: Hashable, room: int) -> tuple[DraftTree, Choice, float]:
    """Grow a tree on the drafting thread, within the credits: deep enough to be used, never beyond the last token.

    Returns:
        The tree, how much of it to send and why, and what drafting took in milliseconds.
    """
    budget, temperature, depth = job.budget, job.sampling.temperature, job.tokens_left - 1
    if min(room, budget.most, depth) <= 0:
        return DraftTree(), Choice(0, None, "the last token" if depth <= 0 else "no room for a tree"), 0.0
    choice = budget.plan(route, temperature, room)
    if choice.nodes == 0:
        return DraftTree(), choice, 0.0
    worth, started = budget.worth(route, temperature, choice), job.clock()
    if job.sampling.multistep:  # all children of a node leave with it
        worth = replace(worth, alone=math.inf)
    tree = await _grow(job, choice.nodes, depth, worth)
    draft_ms = (job.clock() - started) * 1e3
    budget.drafted(temperature, tree, choice, draft_ms)
    chosen = budget.cut(route, temperature, tree.chances, choice)
    return tree, replace(chosen, chunk=None) if job.sampling.multistep else chosen, draft_ms


async def _grow(job: Job, nodes: int, depth: int, worth: Worth) -> DraftTree:
    grow = job.drafter.grow
    return await asyncio.get_running_loop().run_in_executor(
        job.drafting, grow, job.sequence, nodes, depth, job.sampling, worth
    )
