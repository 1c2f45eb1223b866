"""The decode loop: draft a token tree, verify it in one sweep, accept what the target picked; until the text ends.

Exact for any draft: only the target's own picks are emitted. Owns no network, no model and no text rules.
Source: SpecExec (arXiv 2406.02532), section 4; several sweeps in flight are Canopy's own.

`DraftWorker` is the drafting thread as one generation sees it: one request at a time, each awaited for a limited time.
A forward pass of a draft cannot be interrupted. So a request that takes too long goes on by itself, and the text goes
on without a draft meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from client.chain.answers import Answer
from client.decode.pick_watch import PickWatch
from client.decode.pipeline import AnsweredSweep, InFlightSweep, SendWindow
from client.decode.policy import FixedPolicy, PipelineState, SpeculationPlan
from client.decode.prompt_parts import PromptParts
from client.decode.state import GenerationState
from client.decode.walk import Walk, hand_over_rows
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.joined import Searching
from client.draft.search.source import Passes
from client.draft.search.tree import DraftTree, StopRule
from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import Credits, Reply, Sweep, Want
from swarm.routing.route import Route

MAX_LESSONS = 64
"""Replies that are kept while the drafter has no time to learn from them."""

MAX_LATE_ROWS = 64
"""Replies whose hidden rows are kept meanwhile."""

IsAwaited = Callable[[], Awaitable[bool]]
"""Whether the loop has nothing left to do but to wait for the draft."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What to draft.

    Attributes:
        nodes: at most.
        depth: levels, at most.
        stop_rule: when another round of drafting does not pay.
        patience_ms: how long the loop waits before it first asks whether to give up; infinite to wait to the end.
        plan: why a tree of that size; None for a tree that goes on below what is in flight.
        forced: tokens that must come next; they are nodes of the tree, and the draft goes on below them.
    """

    nodes: int
    depth: int
    stop_rule: StopRule
    patience_ms: float
    plan: SpeculationPlan | None = None
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftResult:
    """What was drafted.

    Attributes:
        drafted: the drafter's own tree.
        took_ms: how long it took.
        forced: the tokens that it hangs below.
    """

    drafted: DraftTree
    took_ms: float
    forced: tuple[int, ...] = ()

    @property
    def tree(self) -> DraftTree:
        """All of it."""
        return self.drafted.below(self.forced)


@dataclass(frozen=True, slots=True)
class PendingDraft:
    """Drafting or learning that took too long to wait for.

    Attributes:
        future: of the work on the drafting thread.
        plan: that of the request; None for learning, and for a tree that goes on below what is in flight.
    """

    future: asyncio.Future[DraftResult] | asyncio.Future[None]
    plan: SpeculationPlan | None = None


class DraftWorker:
    """Runs the drafter of one generation on the drafting thread, one request at a time."""

    def __init__(self, state: GenerationState) -> None:
        self._state = state
        self._pending: PendingDraft | None = None
        self._is_working = False
        self._late_rows: deque[tuple[Sequence[int], torch.Tensor]] = deque(maxlen=MAX_LATE_ROWS)

    @property
    def is_busy(self) -> bool:
        """Whether the thread still works on a request that was given up; one that has ended is accounted for."""
        if self._pending is None:
            return False
        if not self._pending.future.done():
            return True
        pending, self._pending = self._pending, None
        with self._giving_up_without_memory():
            result = pending.future.result()
            if result is not None and pending.plan is not None:
                temperature = self._state.sampling.temperature
                self._state.policy.observe_draft(temperature, result.drafted, pending.plan, result.took_ms)
        return False

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Hand the hidden rows [n, width] of the last n tokens to the drafter, or keep them while its thread works."""
        self._late_rows.append((sequence, rows))
        if not self._is_working and not self.is_busy:
            self._hand_over()

    def _hand_over(self) -> None:
        while self._late_rows:
            sequence, rows = self._late_rows.popleft()
            if self._state.observe is not None:
                self._state.observe(sequence, rows)

    async def grow(self, request: DraftRequest, is_awaited: IsAwaited) -> DraftResult | None:
        """Grow a tree on the drafting thread. Legal while the worker is not busy.

        Args:
            request: what to draft.
            is_awaited: asked every `patience_ms`; True gives the request up.

        Returns:
            None where the request was given up: the worker is busy until the thread is done.
        """
        state = self._state
        drafter, clock, started_s = state.drafter, state.clock, state.clock()
        forced = request.forced[: min(request.nodes, request.depth)]
        sequence, nodes, depth = (*state.sequence, *forced), request.nodes - len(forced), request.depth - len(forced)

        def result(tree: DraftTree) -> DraftResult:
            return DraftResult(tree, (clock() - started_s) * 1e3, forced)

        def growing() -> Passes[DraftResult]:
            assert isinstance(drafter, TreeDrafter)
            return result((yield from drafter.growing(sequence, nodes, depth, state.sampling, request.stop_rule)))

        def grown() -> DraftResult:
            return result(drafter.grow(sequence, nodes, depth, state.sampling, request.stop_rule))

        self._hand_over()
        joins = isinstance(drafter, TreeDrafter) and type(drafter).grow is TreeDrafter.grow
        work = Searching(drafter, growing) if joins else grown
        future = asyncio.get_running_loop().run_in_executor(state.drafting, work)
        if not await self._is_in_time(future, request.patience_ms, is_awaited):
            self._pending = PendingDraft(future, request.plan)
            return None
        with self._giving_up_without_memory():
            return future.result()
        return DraftResult(DraftTree(), 0.0)

    async def learn(self, window: SendWindow) -> None:
        """Let the drafter learn from the answered sweeps, on its thread; they wait while the worker is busy."""
        if self.is_busy:
            window.lessons = [lesson for lesson in window.lessons if lesson[0].tree][-MAX_LESSONS:]
            return
        state = self._state
        while window.lessons:
            sweep, reply, passed = window.lessons.pop(0)
            picks: dict[int | None, int] = {}
            others: dict[int | None, int] = {}
            for node, token in reply.picks:
                if node in sweep.places:
                    (picks if node in passed else others)[sweep.places[node]] = token
            if sweep.tree and (picks or others):
                loop, drafter = asyncio.get_running_loop(), state.drafter
                future = loop.run_in_executor(state.drafting, drafter.learn, sweep.tree, picks, others)
                if not await self._is_in_time(future, state.policy.patience_ms(sweep.route, 0)):
                    self._pending = PendingDraft(future)
                    return
                with self._giving_up_without_memory():
                    future.result()

    @contextmanager
    def _giving_up_without_memory(self) -> Iterator[None]:
        """Decode plainly from now on where the draft runs out of memory."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("the draft ran out of memory, the text goes on without it: %s", reason)
            self._state.drafter, self._state.policy = NoDrafter(), FixedPolicy(0)

    async def _is_in_time(
        self,
        future: asyncio.Future[DraftResult] | asyncio.Future[None],
        patience_ms: float,
        is_awaited: IsAwaited | None = None,
    ) -> bool:
        """Wait for the drafting thread; False where `is_awaited` (None: at once) says so after `patience_ms`."""
        patience_s = None if patience_ms == math.inf else patience_ms / 1e3
        self._is_working = True
        try:
            while not (await asyncio.wait((future,), timeout=patience_s))[0]:
                if is_awaited is None or await is_awaited():
                    return False
            return True
        finally:
            self._is_working = False


HOLD_STEP_MS = 10.0
"""How often to look whether text that is held may be shown, while nothing else happens."""
MAX_EXTENSION_DRAFTS = 64
"""Times that the drafter is asked for one further sweep."""


class SweepTransport(Protocol):
    """What the loop needs of a chain."""

    @property
    def credits(self) -> Credits:
        """How many sweeps and nodes may be unanswered."""

    @property
    def hops(self) -> int:
        """Machines that a sweep passes."""

    @property
    def first_link_ms(self) -> float:
        """One way to hop 0, in milliseconds."""

    @property
    def route_key(self) -> Hashable:
        """Names the machines of the chain as it is now; it changes with a repair."""

    @property
    def route(self) -> Route:
        """The machines of the chain as it is now; asked only where picks are watched."""

    @property
    def has_answer(self) -> bool:
        """Whether `answer` would return at once."""

    def send(self, sweep: Sweep) -> None:
        """Start a sweep."""

    async def answer(self) -> Answer:
        """The next reply."""

    async def idle(self, max_ms: float, /) -> None:
        """Wait until `answer` would return at once, at most so long."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A tree below the certain node, of which a further sweep carries the nodes that no sweep carried yet.

    Attributes:
        tree: its root is the certain node.
        node_ids: from places in the tree, None for its root, to nodes of the session.
        new: places of the nodes that no sweep carried yet, best first; their ids are the session's next ones.
        plan: how many of the new ones to send, and why.
    """

    tree: DraftTree
    node_ids: Mapping[int | None, TreeNodeId]
    new: Sequence[int]
    plan: SpeculationPlan


class Generation:
    """One generation over one session: `run` it once.

    The session may be new, or hold any sequence, and even unanswered sweeps of a generation that was left early. What
    its sequence has in common with the prompt does not travel again.
    """

    def __init__(self, state: GenerationState, chain: SweepTransport, walk: Walk) -> None:
        self.state = state
        self._chain = chain
        self._walk = walk
        self._window = SendWindow()
        self._parts = PromptParts(state.chunk, chain.hops)
        self._worker = DraftWorker(state)

    async def run(self) -> AsyncIterator[str]:
        """Generate; yields text as it becomes certain, "" while a character or a stop string is incomplete.

        It also ends, with the text unfinished, at the state's `max_new_tokens`: another session may go on with it.

        Raises:
            SwarmError: what broke the chain; `state.text` holds the tokens so far.
        """
        if self.state.text.stopped:
            return
        self._ask_what_is_forced()
        await self._prefill()
        while not self.state.text.stopped and self.state.tokens_left > 0:
            await self._draft()
            if await self._is_released():
                yield ""
            answer = await self._chain.answer()  # verify: the target's pick after every node of a sweep
            yield self._accept(answer)
        await self._worker.learn(self._window)

    async def _is_released(self) -> bool:
        """Whether text that was held may be shown, before the next answer is there."""
        watch = self.state.watch
        if watch is None or self.state.is_held or not watch.holds:
            return False
        while watch.holds and not self._chain.has_answer:
            await self._chain.idle(HOLD_STEP_MS)
        return not watch.holds

    async def _draft(self) -> None:
        """Send a tree below the pending token; while it is in flight, send further nodes below it where that pays.

        A walk that stays inside these nodes needs no further round trip. Sweeps that it leaves die on the hops (P7).
        """
        if self._walk.pending is not None:
            self._ask_what_is_forced()
            await self._worker.learn(self._window)  # before drafting: the last reply says most about what follows
            await self._send_tree()
        while await self._extend_tree():
            pass
        await self._worker.learn(self._window)  # while the sweeps are in flight

    def _accept(self, answer: Answer) -> str:
        """Walk from the certain node along the picks, the text's next tokens. Returns the text that they add."""
        state, reply = self.state, answer.reply
        emitted, before = self._walk.accept(reply), len(state.text.tokens)
        pieces = [state.text.push([token]) for token in emitted]
        state.log_probs += self._walk.log_probs[: len(state.text.tokens) - before]
        self._take_rows(reply)
        if state.watch is not None:
            took = len(state.text.tokens) - before
            state.watch.note(answer, self._walk, state.sequence, took, self._chain.route.numeric_class)
        sweep = self._account(answer, len(emitted))
        if sweep is not None and not sweep.is_prompt:
            if state.watch is not None and state.grammar is None:
                state.watch.compare(self._chain.route, sweep, dict(reply.picks), self._walk.passed)
            self._window.lessons.append((sweep, reply, self._walk.passed))
            if state.tracer is not None:
                counted = list(zip(state.text.tokens[before:], pieces, strict=False))
                measured, prompt_tokens = state.sweeps[-1], len(state.prompt)
                state.tracer.note(AnsweredSweep(sweep, reply, measured, counted, state.sequence, prompt_tokens))
        return "".join(pieces)

    # The prompt

    async def _prefill(self) -> None:
        """Send all of the prompt but its last token, below which the first tree hangs, as far ahead as credits allow.

        Returns before the last replies, so that the draft reads the prompt while the chain does.
        """
        state, chain, walk, window = self.state, self._chain, self._walk, self._window
        max_unanswered = max(0, min(chain.credits.sweeps - 1, self._parts.unanswered) - 1)
        await self._await_replies(max_unanswered)
        prompt = state.sequence
        commit, state.kept_tokens = walk.restart(prompt, state.sampling)
        if commit is not None:
            chain.send(commit)
        start = state.kept_tokens
        while start < len(prompt) - 1:
            await self._await_replies(max_unanswered)
            end = min(start + min(self._parts.tokens, walk.room), len(prompt) - 1)
            rows = min(max(0, end - (len(prompt) - 1 - state.prompt_rows)), end - start)
            foreign, sweep = self._foreign_in_flight, walk.prefill(prompt[start:end], last=False, rows=rows)
            chain.send(sweep)
            now_s = state.clock()
            contention = window.contention(now_s, foreign)
            window.add_prompt(sweep.sequence, end - start, chain.route_key, now_s, contention)
            start, state.prefill_sweeps = end, state.prefill_sweeps + 1
        await self._await_replies(chain.credits.sweeps - 1)
        walk.want = state.want

    async def _await_replies(self, max_unanswered: int) -> None:
        """Take replies until at most so many sweeps are unanswered, and there is room for another."""
        while self._walk.in_flight > max_unanswered or (self._walk.in_flight and not self._walk.room):
            await self._take_prompt_reply()

    async def _take_prompt_reply(self) -> None:
        """Take the next reply, to a part of the prompt or to a sweep of an earlier generation."""
        answer = await self._chain.answer()
        self._walk.accept(answer.reply)
        if answer.reply.sequence in self._window.sweeps:  # the text before may have been another one
            self._take_rows(answer.reply)
        sweep = self._account(answer, 0)
        if sweep is not None and sweep.is_prompt:
            self._parts.answered(sweep.nodes, answer.total_ms)

    async def _is_prompt_done(self) -> bool:
        """Whether the chain is done with the prompt, so that the pending token waits for its tree alone."""
        while self._walk.in_flight > self._window.trees_in_flight and self._chain.has_answer:
            await self._take_prompt_reply()
        return self._walk.in_flight == self._window.trees_in_flight

    # A tree below the pending token

    async def _send_tree(self) -> None:
        """Grow a tree below the pending token and send both: the whole tree, or its best nodes ahead of the rest."""
        walk, window, route = self._walk, self._window, self._chain.route_key
        tree, plan, draft_ms = await self._grow_tree(walk.room - 1)
        foreign = self._foreign_in_flight
        sent = tree.first(plan.nodes if plan.chunk is None else plan.chunk)
        asks = self._ask_for_rows()
        sweep = walk.extend(sent)
        if asks is not None:
            asks.asked(sweep.sequence, sweep.first_id)
        self._chain.send(sweep)
        places: dict[TreeNodeId, int | None] = {sweep.first_id: None}
        places |= {TreeNodeId(sweep.first_id + 1 + place): place for place in range(len(sent))}
        now_s = self.state.clock()
        contention, pipeline = window.contention(now_s, foreign), window.pipeline_state(now_s)
        if plan.predicted_ms is not None:
            plan = replace(plan, predicted_ms=plan.predicted_ms + pipeline.busy_ms)
        occupancy, start = self.state.policy.occupancy(route, len(sweep.tokens)), len(self.state.text.tokens)
        window.add(
            sweep.sequence,
            InFlightSweep(
                sent, places, len(sent), sent.depth, route, plan, draft_ms, now_s, *contention, occupancy, start
            ),
        )

    def _ask_what_is_forced(self) -> None:
        """Ask what the grammar forces after the certain text, while there is other work."""
        if self.state.forced is not None:
            self.state.forced.ask(self.state.sequence)

    async def _grow_tree(self, room: int) -> tuple[DraftTree, SpeculationPlan, float]:
        """Grow a tree on the drafting thread, within the credits and no deeper than the tokens that are left.

        It begins with what the grammar forces. Where drafting takes much longer than it should, that goes alone.

        Returns:
            The tree, how much of it to send and why, and what drafting took in milliseconds.
        """
        state, route, temperature = self.state, self._chain.route_key, self.state.sampling.temperature
        policy, depth = state.policy, state.tokens_left - 1
        max_nodes = min(room, policy.max_tree_nodes)
        if min(max_nodes, depth) <= 0:
            reason = "the last token" if depth <= 0 else "no room for a tree"
            return DraftTree(), SpeculationPlan(0, None, reason), 0.0
        forced = () if state.forced is None else await state.forced.awaited(state.sequence)
        forced = forced[: min(max_nodes, depth)]
        certain, plan = DraftTree().below(forced), policy.plan(route, temperature, room)
        if plan.nodes == 0 and not forced:
            return certain, plan, 0.0
        plain = policy.trim(route, temperature, certain.acceptance_probs, plan)
        if plan.nodes == 0:
            return certain, plain, 0.0
        if self._worker.is_busy:
            return certain, replace(plain, reason="the draft is still busy with an earlier request"), 0.0
        stop_rule, started_s = policy.stop_rule(route, temperature, plan), state.clock()
        if state.sampling.multistep:  # all children that were drawn below a node have to travel with it
            stop_rule = replace(stop_rule, per_sweep=math.inf)
        nodes, patience_ms = min(plan.nodes + len(forced), max_nodes), policy.patience_ms(route, plan.nodes)
        request = DraftRequest(nodes, depth, stop_rule, patience_ms, plan, forced)
        result = await self._worker.grow(request, self._is_prompt_done)
        if result is None:
            return certain, replace(plain, reason="the draft takes too long"), (state.clock() - started_s) * 1e3
        state.policy.observe_draft(temperature, result.drafted, plan, result.took_ms)
        trimmed = state.policy.trim(route, temperature, result.tree.acceptance_probs, plan)
        return result.tree, replace(trimmed, chunk=None) if state.sampling.multistep else trimmed, result.took_ms

    # Further nodes below what is in flight

    async def _extend_tree(self) -> bool:
        """Send further nodes below the certain node, whose pick is in flight. Returns whether any were worth it."""
        state, chain, walk, window = self.state, self._chain, self._walk, self._window
        certain, route = walk.certain, chain.route_key
        has_room = min(walk.room, state.tokens_left - 1) >= 1
        if walk.pending is not None or certain is None or chain.has_answer or not has_room or state.text.stopped:
            return False
        if state.sampling.multistep or self._worker.is_busy:  # multi-step: children may not be added after a pick
            return False
        pipeline = window.pipeline_state(state.clock())
        max_nodes = state.policy.max_nodes(route, state.sampling.temperature, walk.room, pipeline)
        if max_nodes == 0:
            return False
        started_s = state.clock()
        found = await self._find_extension(certain, max_nodes)
        if found is None:
            return False
        tree, ids, new = found.tree, found.node_ids, found.new[: found.plan.nodes]
        now_s = state.clock()
        draft_ms, contention = (now_s - started_s) * 1e3, window.contention(now_s, self._foreign_in_flight)
        asks = self._ask_for_rows()
        sweep = walk.grow([tree.tokens[place] for place in new], [ids[tree.parents[place]] for place in new])
        if asks is not None:
            asks.asked(sweep.sequence, None)
        chain.send(sweep)
        places: dict[TreeNodeId, int | None] = {ids[place]: place for place in new}
        occupancy = state.policy.occupancy(route, len(new))
        plan, depth, start = found.plan, tree.depth, len(state.text.tokens)
        window.add(
            sweep.sequence,
            InFlightSweep(tree, places, len(new), depth, route, plan, draft_ms, now_s, *contention, occupancy, start),
        )
        return True

    async def _find_extension(self, certain: TreeNodeId, max_nodes: int) -> Extension | None:
        """Grow the tree below the certain node until a sweep pays; None where none does, or a reply is there."""
        state, chain, walk, window = self.state, self._chain, self._walk, self._window
        route, temperature, policy = chain.route_key, state.sampling.temperature, state.policy
        room, pipeline = walk.room, window.pipeline_state(state.clock())
        sent = len(walk.state.below(certain)) if certain in walk.state.live else len(walk.state.live)
        min_probability = policy.min_probability(route, temperature)
        # While hops are free, the first request takes only what needs no further pass of a model.
        room_to_draft = room if pipeline.busy_ms else 0

        async def has_answer() -> bool:
            return chain.has_answer

        for _ in range(MAX_EXTENSION_DRAFTS):  # while hops are busy, or until there is enough for a sweep
            stop_rule = StopRule(min_probability, go_on=partial(self._has_time, room_to_draft))
            patience_ms = policy.patience_ms(route, max_nodes)
            forced = () if state.forced is None else state.forced.known(state.sequence)
            request = DraftRequest(sent + max_nodes, state.tokens_left - 1, stop_rule, patience_ms, forced=forced)
            result = await self._worker.grow(request, has_answer)
            if result is None or chain.has_answer:  # a reply comes first
                return None
            tree = result.tree
            ids, new = _match_tree(walk, certain, tree, min(max_nodes, room), min_probability)
            pipeline = window.pipeline_state(state.clock())
            plan = policy.extend(route, [tree.acceptance_probs[place] for place in new], pipeline)
            if plan.nodes and not pipeline.busy_ms:
                return Extension(tree, ids, new, plan)
            is_done = tree.is_settled or policy.max_nodes(route, temperature, room, pipeline) == 0
            if is_done and not plan.nodes:
                return None
            if is_done:  # the plan may change until hops are free
                await chain.idle(pipeline.busy_ms)
                if chain.has_answer:
                    return None
            room_to_draft = room
        return None

    def _has_time(self, room_to_draft: int, rounds: int) -> bool:
        """Whether there is time for another round of drafting. Called on the drafting thread, while the loop waits.

        Args:
            room_to_draft: nodes that a first round may add even where time is short; 0 for no such round.
            rounds: how many there were since drafting began.
        """
        policy, pipeline = self.state.policy, self._window.pipeline_state(self.state.clock())
        is_first_due = rounds == 0 and self._may_extend(room_to_draft, pipeline)
        return (is_first_due or policy.has_time(pipeline)) and not self._chain.has_answer

    def _may_extend(self, room: int, pipeline: PipelineState) -> bool:
        temperature = self.state.sampling.temperature
        return self.state.policy.max_nodes(self._chain.route_key, temperature, room, pipeline) > 0

    def _ask_for_rows(self) -> PickWatch | None:
        """Set what the next sweep wants; returns who checks its picks, where it asks for rows because of that."""
        want, watch, chain = self.state.want, self.state.watch, self._chain
        asks = watch is not None and watch.asks(chain.route)
        self._walk.want = replace(want or Want(), hidden_rows=True) if asks else want
        return watch if asks else None

    # Replies

    def _take_rows(self, reply: Reply) -> None:
        """Hand over what rows a reply brought, once its picks are accepted."""
        if self.state.observe is not None and reply.rows is not None:
            hand_over_rows(reply, self._walk, self.state.sequence, self._worker.observe)

    @property
    def _foreign_in_flight(self) -> int:
        """Sweeps of an earlier generation that are unanswered."""
        return self._walk.in_flight - len(self._window.sweeps)

    def _account(self, answer: Answer, emitted: int) -> InFlightSweep | None:
        """Note what a sweep took and brought. Returns the sweep, None if an earlier generation sent it."""
        state, reply = self.state, answer.reply
        sweep = self._window.take(reply.sequence, state.clock())
        if sweep is None:
            return None
        measured = sweep.measured(answer, self._chain.first_link_ms, emitted)
        is_plain = not sweep.is_prompt or reply.rows is None  # rows on the last link are no part of the latency model
        if is_plain and sweep.route == self._chain.route_key:  # a sweep that met a repair says nothing of a route
            state.policy.observe_sweep(sweep.route, measured)
        if not sweep.is_prompt:
            logger.debug("sweep %d: %d nodes, %d tokens", reply.sequence, sweep.nodes, emitted)
            state.sweeps.append(measured)
        return sweep


def _match_tree(
    walk: Walk, certain: TreeNodeId, tree: DraftTree, max_new: int, min_probability: float
) -> tuple[dict[int | None, TreeNodeId], list[int]]:
    """Match a tree below the certain node with the session's nodes.

    Returns:
        Session nodes by place in the tree, and the places of nodes that no sweep carried yet, at most `max_new`, which
        get the session's next ids.
    """
    ids: dict[int | None, TreeNodeId] = {None: certain}
    new: list[int] = []
    for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in ids:
            continue
        child = walk.child(ids[parent], token) if ids[parent] < walk.state.next_id else None
        if child is not None:
            ids[place] = child
        elif len(new) < max_new and tree.acceptance_probs[place] > min_probability:
            ids[place] = TreeNodeId(walk.state.next_id + len(new))
            new.append(place)
    return ids, new
