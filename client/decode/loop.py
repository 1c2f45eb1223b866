"""The decode loop: prefill, then draft → sweeps → walk until the text ends. Source: SpecExec (arXiv 2406.02532), §4.

Exact for any draft: what is emitted are the target's own picks. Owns no network, no model and no text rules.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from client.chain.answers import Answer
from client.control.policy import FixedPolicy, SpeculationPlan, SpeculationPolicy
from client.decode.draft_worker import DraftRequest, IsAwaited, PendingDraft, grow, is_drafting, learn
from client.decode.hidden_rows import WANT_ROWS, Observe, hand_over
from client.decode.pipeline import InFlightSweep, SendWindow
from client.decode.text_stream import TextStream
from client.decode.walk import Walk
from client.drafting.drafter import Drafter, NoDrafter, TreeDrafter
from client.drafting.search.stopping import StopRule
from client.drafting.search.tree import DraftTree
from client.stats import SweepStats
from swarm.errors import Unfinished
from swarm.ids import TreeNodeId
from swarm.protocol.messages import Credits, Sampling, Sweep

MOST_TURNS = 64
"""Drafting goes on so often for one more sweep."""
PREFILLS_IN_FLIGHT = 3
"""Parts of a prompt that are unanswered at a time."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GenerationState:
    """One generation: what to continue, how, and what came of it.

    prompt: token ids. chunk: nodes per prefill sweep. text: decides where the output ends. kept_tokens: of the prompt,
    those that the session held already. options: what it was asked for. resumed_tokens: were in `text` from the start.
    observe: who gets the target's hidden rows; None asks for none. lend: lends a drafter while it runs.
    late: drafting that was not waited for.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    budget: SpeculationPolicy
    chunk: int
    max_new_tokens: int
    text: TextStream
    drafter: Drafter
    drafting: Executor
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed_tokens: int = 0
    clock: Callable[[], float] = time.perf_counter
    observe: Observe | None = None
    lend: Callable[[], AbstractContextManager[Drafter]] | None = None
    kept_tokens: int = 0
    prefill_sweeps: int = 0
    sweeps: list[SweepStats] = field(default_factory=list)
    late: PendingDraft | None = None

    @property
    def nodes(self) -> int:
        """Most tree nodes of a sweep, its pending token not counted."""
        return self.budget.most if self.max_new_tokens > 1 else 0

    @property
    def sequence(self) -> tuple[int, ...]:
        """Every certain token."""
        return (*self.prompt, *self.text.tokens)

    @contextmanager
    def drafted_for(self) -> Iterator[None]:
        """While it runs it has a drafter that nobody else has, where one can be lent; where none is left, no trees."""
        with nullcontext(self.drafter) if self.lend is None else self.lend() as drafter:
            if isinstance(drafter, NoDrafter):
                self.budget = FixedPolicy(0)
            if isinstance(drafter, TreeDrafter) and drafter.wants_rows:
                self.observe = drafter.observe
            self.drafter = drafter
            yield

    def unfinished(self) -> Unfinished:
        """What it takes to go on later."""
        return Unfinished(self.prompt, {**self.options, "seed": self.sampling.seed}, tuple(self.text.tokens))

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.text.tokens)


class SweepTransport(Protocol):
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


async def decode(job: GenerationState, chain: SweepTransport, walk: Walk) -> AsyncIterator[str]:
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
    pipe = SendWindow()
    await _prefill(job, chain, walk, pipe)
    walk.want = WANT_ROWS if job.observe is not None else None
    while not job.text.stopped:
        if walk.pending is not None:
            await learn(job, pipe)  # the reply that a guess was wrong tells most of what follows
            await _speculate(job, chain, walk, pipe)
        while await _deepen(job, chain, walk, pipe):
            pass
        await learn(job, pipe)  # while the sweeps are on their way
        answer = await chain.answer()
        emitted = walk.accept(answer.reply)
        piece = job.text.push(emitted)
        if job.observe is not None and answer.reply.rows is not None and not is_drafting(job):
            hand_over(answer.reply, walk, job.sequence, job.observe)
        flight = _account(job, chain, pipe, answer, len(emitted))
        if flight is not None:  # and no prefill
            pipe.lessons.append((flight, answer.reply, walk.passed))
        yield piece
    await learn(job, pipe)


async def _prefill(job: GenerationState, chain: SweepTransport, walk: Walk, pipe: SendWindow) -> None:
    """Send all of the prompt but its last token, which the first tree hangs from, as far ahead as the credits allow.

    The draft then reads the prompt while the chain does.
    """
    ahead = max(0, min(chain.credits.sweeps - 1, PREFILLS_IN_FLIGHT) - 1)
    await _await_replies(job, chain, walk, pipe, ahead)
    prompt = job.sequence
    commit, job.kept_tokens = walk.restart(prompt, job.sampling)
    if commit is not None:
        chain.send(commit)
    start = job.kept_tokens
    while start < len(prompt) - 1:
        await _await_replies(job, chain, walk, pipe, ahead)
        end = min(start + min(job.chunk, walk.room), len(prompt) - 1)
        others, sweep = walk.in_flight - len(pipe.flights), walk.prefill(prompt[start:end], last=False)
        chain.send(sweep)
        now_s = job.clock()
        pipe.sent_prompt(sweep.sequence, end - start, chain.route_key, now_s, pipe.met(now_s, others))
        start, job.prefill_sweeps = end, job.prefill_sweeps + 1
    await _await_replies(job, chain, walk, pipe, chain.credits.sweeps - 1)


async def _await_replies(job: GenerationState, chain: SweepTransport, walk: Walk, pipe: SendWindow, most: int) -> None:
    """Until at most so many sweeps are unanswered, and there is room for another."""
    while walk.in_flight > most or (walk.in_flight and not walk.room):
        await _await_prompt(job, chain, walk, pipe)


async def _await_prompt(job: GenerationState, chain: SweepTransport, walk: Walk, pipe: SendWindow) -> None:
    """The next reply, to a prompt's part or to what a generation before left on its way."""
    answer = await chain.answer()
    walk.accept(answer.reply)
    _account(job, chain, pipe, answer, 0)


def _account(
    job: GenerationState, chain: SweepTransport, pipe: SendWindow, answer: Answer, emitted: int
) -> InFlightSweep | None:
    """Note what a sweep took and brought; returns what it was, None for one that brings no token."""
    flight = pipe.answered(answer.reply.sequence, job.clock())
    if flight is None:
        return None
    if flight.route == chain.route_key:  # what a repair took says nothing of a route
        job.budget.spent(flight.route, flight.spent(answer, chain.first_link_ms, emitted))
    if flight.is_prompt:
        return None
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
    return flight


async def _speculate(job: GenerationState, chain: SweepTransport, walk: Walk, pipe: SendWindow) -> None:
    """Grow a tree below the pending token and send both: all of the tree, or its best part ahead of the rest."""
    route = chain.route_key
    tree, choice, draft_ms = await _draft(job, route, walk.room - 1, partial(_has_read, job, chain, walk, pipe))
    others = walk.in_flight - len(pipe.flights)
    sent = tree.first(choice.nodes if choice.chunk is None else choice.chunk)
    sweep = walk.extend(sent)
    chain.send(sweep)
    places: dict[TreeNodeId, int | None] = {sweep.first_id: None}
    places |= {TreeNodeId(sweep.first_id + 1 + place): place for place in range(len(sent))}
    now_s = job.clock()
    met, ahead = pipe.met(now_s, others), pipe.ahead(now_s)
    if choice.predicted_ms is not None:
        choice = replace(choice, predicted_ms=choice.predicted_ms + ahead.busy_ms)
    busy = job.budget.busy(route, len(sweep.tokens))
    pipe.sent(
        sweep.sequence, InFlightSweep(sent, places, len(sent), sent.depth, route, choice, draft_ms, now_s, *met, busy)
    )


async def _has_read(job: GenerationState, chain: SweepTransport, walk: Walk, pipe: SendWindow) -> bool:
    """Whether the chain is done with the prompt, so that the pending token waits for its tree alone."""
    while walk.in_flight > pipe.sweeps and chain.has_answer:
        await _await_prompt(job, chain, walk, pipe)
    return walk.in_flight == pipe.sweeps


async def _deepen(job: GenerationState, chain: SweepTransport, walk: Walk, pipe: SendWindow) -> bool:
    """Send further nodes of the best tree below the certain node, whose pick is on its way; whether it was worth it."""
    certain, route, temperature = walk.certain, chain.route_key, job.sampling.temperature
    room, depth = walk.room, job.tokens_left - 1
    if walk.pending is not None or certain is None or chain.has_answer or min(room, depth) < 1 or job.text.stopped:
        return False
    if job.sampling.multistep or is_drafting(job):  # children that are added later were not drawn before a pick
        return False
    most = job.budget.more(route, temperature, room, pipe.ahead(job.clock()))
    if most == 0:
        return False
    started_s = job.clock()
    found = await _find(job, chain, walk, pipe, most)
    if found is None:
        return False
    tree, known, choice = found
    new = [place for place, there in known.items() if place is not None and there >= walk.state.next_id]
    new = new[: choice.nodes]
    now_s = job.clock()
    draft_ms, met = (now_s - started_s) * 1e3, pipe.met(now_s, walk.in_flight - len(pipe.flights))
    sweep = walk.grow([tree.tokens[place] for place in new], [known[tree.parents[place]] for place in new])
    chain.send(sweep)
    places: dict[TreeNodeId, int | None] = {known[place]: place for place in new}
    busy = job.budget.busy(route, len(new))
    pipe.sent(
        sweep.sequence, InFlightSweep(tree, places, len(new), tree.depth, route, choice, draft_ms, now_s, *met, busy)
    )
    return True


async def _find(
    job: GenerationState, chain: SweepTransport, walk: Walk, pipe: SendWindow, most: int
) -> tuple[DraftTree, Mapping[int | None, TreeNodeId], SpeculationPlan] | None:
    """What another sweep is to carry, of at most so many nodes; None where that is not worth it, or a reply is there.

    Returns:
        A tree below the certain node, the session's nodes of it with those that are new, best first, and how many of
        these are to go.
    """
    certain, route, temperature = walk.certain, chain.route_key, job.sampling.temperature
    assert certain is not None, "there is one where no token is pending"
    room, ahead = walk.room, pipe.ahead(job.clock())
    on_way = len(walk.state.below(certain)) if certain in walk.state.live else len(walk.state.live)
    least = job.budget.least(route, temperature)
    wanted = room if ahead.busy_ms else 0  # else what costs nothing is all that may be there to send

    async def has_answer() -> bool:
        return chain.has_answer

    for _ in range(MOST_TURNS):  # while hops are busy, or until there is enough for a sweep
        worth = StopRule(least, go_on=partial(_goes_on, job, chain, pipe, wanted))
        wish = DraftRequest(on_way + most, job.tokens_left - 1, worth, job.budget.patience_ms(route, most))
        grown = await grow(job, wish, has_answer)
        if grown is None or chain.has_answer:  # what it says comes first
            return None
        tree = grown.tree
        known, new = _unsent(walk, certain, tree, min(most, room), least)
        ahead = pipe.ahead(job.clock())
        choice = job.budget.further(route, [tree.chances[place] for place in new], ahead)
        if choice.nodes and not ahead.busy_ms:
            return tree, known, choice
        has_done = tree.is_settled or job.budget.more(route, temperature, room, ahead) == 0
        if has_done and not choice.nodes:
            return None
        if has_done:  # what is to go may change until it can
            await chain.idle(ahead.busy_ms)
            if chain.has_answer:
                return None
        wanted = room
    return None


def _goes_on(job: GenerationState, chain: SweepTransport, pipe: SendWindow, room: int, rounds: int) -> bool:
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


async def _draft(
    job: GenerationState, route: Hashable, room: int, is_awaited: IsAwaited
) -> tuple[DraftTree, SpeculationPlan, float]:
    """Grow a tree on the drafting thread, within the credits: deep enough to be used, never beyond the last token.

    Where that takes much longer than it should, there is none: the pending token goes alone.

    Returns:
        The tree, how much of it to send and why, and what drafting took in milliseconds.
    """
    budget, temperature, depth = job.budget, job.sampling.temperature, job.tokens_left - 1
    if min(room, budget.most, depth) <= 0:
        return DraftTree(), SpeculationPlan(0, None, "the last token" if depth <= 0 else "no room for a tree"), 0.0
    choice = budget.plan(route, temperature, room)
    if choice.nodes == 0:
        return DraftTree(), choice, 0.0
    alone = budget.cut(route, temperature, (), choice)
    if is_drafting(job):
        return DraftTree(), replace(alone, reason="the draft is not done with what it was asked before"), 0.0
    worth, started = budget.worth(route, temperature, choice), job.clock()
    if job.sampling.multistep:  # all children of a node leave with it
        worth = replace(worth, alone=math.inf)
    wish = DraftRequest(choice.nodes, depth, worth, budget.patience_ms(route, choice.nodes), choice)
    grown = await grow(job, wish, is_awaited)
    if grown is None:
        return DraftTree(), replace(alone, reason="the draft takes too long"), (job.clock() - started) * 1e3
    job.budget.drafted(temperature, grown.tree, choice, grown.took_ms)
    chosen = job.budget.cut(route, temperature, grown.tree.chances, choice)
    return grown.tree, replace(chosen, chunk=None) if job.sampling.multistep else chosen, grown.took_ms
