"""The decode loop: draft a token tree, verify it in one sweep, accept what the target picked; until the text ends.

Exact for any draft: what is emitted are the target's own picks. Owns no network, no model and no text rules.
Source: SpecExec (arXiv 2406.02532), section 4; sweeps in flight are Canopy's own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from client.chain.answers import Answer
from client.control.policy import PipelineState, SpeculationPlan
from client.decode.draft_worker import DraftRequest, DraftWorker
from client.decode.hidden_rows import WANT_ROWS, hand_over
from client.decode.pipeline import InFlightSweep, SendWindow
from client.decode.state import GenerationState
from client.decode.walk import Walk
from client.drafting.search.stopping import StopRule
from client.drafting.search.tree import DraftTree
from swarm.ids import TreeNodeId
from swarm.protocol.messages import Credits, Sweep

MAX_TURNS = 64
"""Drafting goes on so often for one more sweep."""
PREFILLS_IN_FLIGHT = 3
"""Parts of a prompt that are unanswered at a time."""

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Extension:
    """Nodes of a tree that another sweep is to carry, below the certain node.

    Attributes:
        tree: hangs from the certain node.
        known: session nodes by their place in the tree, None for the certain node; new ones with their next ids.
        plan: how many of the new ones are to go, best first, and why.
    """

    tree: DraftTree
    known: Mapping[int | None, TreeNodeId]
    plan: SpeculationPlan


class Generation:
    """One generation over one session: `run` it once.

    The session may be new, or hold any sequence, and even sweeps of a generation that was left: what it has in common
    with the prompt does not travel again.
    """

    def __init__(self, state: GenerationState, chain: SweepTransport, walk: Walk) -> None:
        self.state = state
        self._chain = chain
        self._walk = walk
        self._window = SendWindow()
        self._worker = DraftWorker(state)

    async def run(self) -> AsyncIterator[str]:
        """Generate; yields text as it becomes certain, possibly "" while a character or a stop string is incomplete.

        Raises:
            SwarmError: what broke the chain; `state.text` holds what was made before.
        """
        if self.state.text.stopped:
            return
        await self._prefill()
        while not self.state.text.stopped:
            await self._draft()
            answer = await self._chain.answer()  # verify: the target's pick after every node of a sweep
            yield self._accept(answer)
        await self._worker.learn(self._window)

    async def _draft(self) -> None:
        """Send a tree below the pending token, and while it travels further nodes below it, where that pays.

        A walk that stays inside them needs no further trip. Sweeps that it leaves behind die on the hops (P7).
        """
        if self._walk.pending is not None:
            await self._worker.learn(self._window)  # the reply that a guess was wrong tells most of what follows
            await self._send_tree()
        while await self._extend_tree():
            pass
        await self._worker.learn(self._window)  # while the sweeps are on their way

    def _accept(self, answer: Answer) -> str:
        """Walk from the certain node along the picks: the tokens on the way, and one more, are the text's next ones."""
        state, reply = self.state, answer.reply
        emitted = self._walk.accept(reply)
        piece = state.text.push(emitted)
        if state.observe is not None and reply.rows is not None and not self._worker.is_busy:
            hand_over(reply, self._walk, state.sequence, state.observe)
        sweep = self._account(answer, len(emitted))
        if sweep is not None and not sweep.is_prompt:
            self._window.lessons.append((sweep, reply, self._walk.passed))
        return piece

    # The prompt

    async def _prefill(self) -> None:
        """Send all of the prompt but its last token, which the first tree hangs from, as far ahead as credits allow.

        The draft then reads the prompt while the chain does.
        """
        state, chain, walk, window = self.state, self._chain, self._walk, self._window
        ahead = max(0, min(chain.credits.sweeps - 1, PREFILLS_IN_FLIGHT) - 1)
        await self._await_replies(ahead)
        prompt = state.sequence
        commit, state.kept_tokens = walk.restart(prompt, state.sampling)
        if commit is not None:
            chain.send(commit)
        start = state.kept_tokens
        while start < len(prompt) - 1:
            await self._await_replies(ahead)
            end = min(start + min(state.chunk, walk.room), len(prompt) - 1)
            others, sweep = self._others_in_flight, walk.prefill(prompt[start:end], last=False)
            chain.send(sweep)
            now_s = state.clock()
            window.sent_prompt(sweep.sequence, end - start, chain.route_key, now_s, window.met(now_s, others))
            start, state.prefill_sweeps = end, state.prefill_sweeps + 1
        await self._await_replies(chain.credits.sweeps - 1)
        walk.want = WANT_ROWS if state.observe is not None else None

    async def _await_replies(self, most: int) -> None:
        """Until at most so many sweeps are unanswered, and there is room for another."""
        while self._walk.in_flight > most or (self._walk.in_flight and not self._walk.room):
            await self._await_prompt()

    async def _await_prompt(self) -> None:
        """The next reply, to a part of the prompt or to what an earlier generation left on its way."""
        answer = await self._chain.answer()
        self._walk.accept(answer.reply)
        self._account(answer, 0)

    async def _has_read(self) -> bool:
        """Whether the chain is done with the prompt, so that the pending token waits for its tree alone."""
        while self._walk.in_flight > self._window.trees_in_flight and self._chain.has_answer:
            await self._await_prompt()
        return self._walk.in_flight == self._window.trees_in_flight

    # A tree below the pending token

    async def _send_tree(self) -> None:
        """Grow a tree below the pending token and send both: all of the tree, or its best part ahead of the rest."""
        walk, window, route = self._walk, self._window, self._chain.route_key
        tree, plan, draft_ms = await self._grow_tree(walk.room - 1)
        others = self._others_in_flight
        sent = tree.first(plan.nodes if plan.chunk is None else plan.chunk)
        sweep = walk.extend(sent)
        self._chain.send(sweep)
        places: dict[TreeNodeId, int | None] = {sweep.first_id: None}
        places |= {TreeNodeId(sweep.first_id + 1 + place): place for place in range(len(sent))}
        now_s = self.state.clock()
        met, ahead = window.met(now_s, others), window.state(now_s)
        if plan.predicted_ms is not None:
            plan = replace(plan, predicted_ms=plan.predicted_ms + ahead.busy_ms)
        occupancy = self.state.policy.occupancy(route, len(sweep.tokens))
        window.sent(
            sweep.sequence,
            InFlightSweep(sent, places, len(sent), sent.depth, route, plan, draft_ms, now_s, *met, occupancy),
        )

    async def _grow_tree(self, room: int) -> tuple[DraftTree, SpeculationPlan, float]:
        """Grow a tree on the drafting thread, within the credits: deep enough to be used, never beyond the last token.

        Where that takes much longer than it should, there is none: the pending token goes alone.

        Returns:
            The tree, how much of it to send and why, and what drafting took in milliseconds.
        """
        state, route, temperature = self.state, self._chain.route_key, self.state.sampling.temperature
        policy, depth = state.policy, state.tokens_left - 1
        if min(room, policy.most, depth) <= 0:
            reason = "the last token" if depth <= 0 else "no room for a tree"
            return DraftTree(), SpeculationPlan(0, None, reason), 0.0
        plan = policy.plan(route, temperature, room)
        if plan.nodes == 0:
            return DraftTree(), plan, 0.0
        plain = policy.trim(route, temperature, (), plan)
        if self._worker.is_busy:
            return DraftTree(), replace(plain, reason="the draft is not done with what it was asked before"), 0.0
        stop_rule, started_s = policy.stop_rule(route, temperature, plan), state.clock()
        if state.sampling.multistep:  # all children of a node leave with it
            stop_rule = replace(stop_rule, per_sweep=math.inf)
        request = DraftRequest(plan.nodes, depth, stop_rule, policy.patience_ms(route, plan.nodes), plan)
        result = await self._worker.grow(request, self._has_read)
        if result is None:
            return DraftTree(), replace(plain, reason="the draft takes too long"), (state.clock() - started_s) * 1e3
        state.policy.observe_draft(temperature, result.tree, plan, result.took_ms)
        trimmed = state.policy.trim(route, temperature, result.tree.acceptance_probs, plan)
        return result.tree, replace(trimmed, chunk=None) if state.sampling.multistep else trimmed, result.took_ms

    # Further nodes below what is on its way

    async def _extend_tree(self) -> bool:
        """Send further nodes below the certain node, whose pick is on its way; whether that was worth it."""
        state, chain, walk, window = self.state, self._chain, self._walk, self._window
        certain, route = walk.certain, chain.route_key
        has_room = min(walk.room, state.tokens_left - 1) >= 1
        if walk.pending is not None or certain is None or chain.has_answer or not has_room or state.text.stopped:
            return False
        if (
            state.sampling.multistep or self._worker.is_busy
        ):  # children that are added later were not drawn before a pick
            return False
        ahead = window.state(state.clock())
        most = state.policy.max_nodes(route, state.sampling.temperature, walk.room, ahead)
        if most == 0:
            return False
        started_s = state.clock()
        found = await self._find_extension(certain, most)
        if found is None:
            return False
        tree, known = found.tree, found.known
        new = [place for place, there in known.items() if place is not None and there >= walk.state.next_id]
        new = new[: found.plan.nodes]
        now_s = state.clock()
        draft_ms, met = (now_s - started_s) * 1e3, window.met(now_s, self._others_in_flight)
        sweep = walk.grow([tree.tokens[place] for place in new], [known[tree.parents[place]] for place in new])
        chain.send(sweep)
        places: dict[TreeNodeId, int | None] = {known[place]: place for place in new}
        occupancy = state.policy.occupancy(route, len(new))
        window.sent(
            sweep.sequence,
            InFlightSweep(tree, places, len(new), tree.depth, route, found.plan, draft_ms, now_s, *met, occupancy),
        )
        return True

    async def _find_extension(self, certain: TreeNodeId, most: int) -> Extension | None:
        """What another sweep is to carry, of at most `most` nodes; None where that pays not, or a reply is there."""
        state, chain, walk, window = self.state, self._chain, self._walk, self._window
        route, temperature, policy = chain.route_key, state.sampling.temperature, state.policy
        room, ahead = walk.room, window.state(state.clock())
        on_way = len(walk.state.below(certain)) if certain in walk.state.live else len(walk.state.live)
        min_probability = policy.min_probability(route, temperature)
        wanted = room if ahead.busy_ms else 0  # else what costs nothing is all that may be there to send

        async def has_answer() -> bool:
            return chain.has_answer

        for _ in range(MAX_TURNS):  # while hops are busy, or until there is enough for a sweep
            stop_rule = StopRule(min_probability, go_on=partial(self._has_time, wanted))
            patience_ms = state.policy.patience_ms(route, most)
            request = DraftRequest(on_way + most, state.tokens_left - 1, stop_rule, patience_ms)
            result = await self._worker.grow(request, has_answer)
            if result is None or chain.has_answer:  # what it says comes first
                return None
            tree = result.tree
            known, new = _unsent(walk, certain, tree, min(most, room), min_probability)
            ahead = window.state(state.clock())
            plan = state.policy.extend(route, [tree.acceptance_probs[place] for place in new], ahead)
            if plan.nodes and not ahead.busy_ms:
                return Extension(tree, known, plan)
            is_done = tree.is_settled or state.policy.max_nodes(route, temperature, room, ahead) == 0
            if is_done and not plan.nodes:
                return None
            if is_done:  # what is to go may change until it can
                await chain.idle(ahead.busy_ms)
                if chain.has_answer:
                    return None
            wanted = room
        return None

    def _has_time(self, room: int, rounds: int) -> bool:
        """Whether there is time for another round of drafting, after so many; the loop waits while drafting asks.

        room: for the nodes of a round that is wanted in any case, 0 where none is.
        """
        policy, ahead = self.state.policy, self._window.state(self.state.clock())
        return (self._is_wanted(room, rounds, ahead) or policy.has_time(ahead)) and not self._chain.has_answer

    def _is_wanted(self, room: int, rounds: int, ahead: PipelineState) -> bool:
        temperature = self.state.sampling.temperature
        return rounds == 0 and self.state.policy.max_nodes(self._chain.route_key, temperature, room, ahead) > 0

    # What came back

    @property
    def _others_in_flight(self) -> int:
        """Sweeps of an earlier generation that are unanswered."""
        return self._walk.in_flight - len(self._window.sweeps)

    def _account(self, answer: Answer, emitted: int) -> InFlightSweep | None:
        """Note what a sweep took and brought; returns what it was, None if it was an earlier generation's."""
        state, reply = self.state, answer.reply
        sweep = self._window.answered(reply.sequence, state.clock())
        if sweep is None:
            return None
        measured = sweep.measured(answer, self._chain.first_link_ms, emitted)
        if sweep.route == self._chain.route_key:  # what a repair took says nothing of a route
            state.policy.observe_sweep(sweep.route, measured)
        if not sweep.is_prompt:
            logger.debug("sweep %d: %d nodes, %d tokens", reply.sequence, sweep.nodes, emitted)
            state.sweeps.append(measured)
        return sweep


def _unsent(
    walk: Walk, certain: TreeNodeId, tree: DraftTree, most: int, min_probability: float
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
        elif len(new) < most and tree.acceptance_probs[place] > min_probability:
            known[place] = TreeNodeId(walk.state.next_id + len(new))
            new.append(place)
    return known, new
