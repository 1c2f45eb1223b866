"""Replies of one session's tail: picks, and hidden rows of the accepted path where the client asks for them.

After a snapshot it answers again what is unanswered (R6), from the parts of the replay. Owns no stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from node.session.sweep_run import Picking, SweepRun
from swarm.base.ids import TreeNodeId
from swarm.compute.grammars import CompiledGrammar, GrammarPlace
from swarm.compute.path_rules import PathRules
from swarm.compute.sampling import PickLogProbs
from swarm.link.link import ROUND_TRIPS_KEPT
from swarm.protocol.hop_log import HopLog
from swarm.protocol.limits import MAX_REPLY_ROWS, PROMPT_ROWS_BYTES
from swarm.protocol.messages import HopTime, Ping, Reply, Rows, Sampling, Sweep, Want
from swarm.protocol.pick_rules import Grammar, PickRules
from swarm.protocol.session import Parent, SessionState

# The path that the tail's own walk accepts: its hidden rows travel back when a client wants them (P10).
#
# from the tip follow the tail's picks while a child holds the picked token
# where the tip's pick is not known (a prompt's token, or a pick that an earlier tail made and the client holds),
# what certainly comes next is the first node of the last sweep, if that hangs from the tip


class AcceptedPath:
    """Keeps the picks after live nodes and the tip, no others."""

    def __init__(self) -> None:
        self._picks: dict[Parent, int] = {}

    def note(self, picks: Mapping[TreeNodeId, int], state: SessionState, *, is_cut: bool) -> None:
        """Take the picks of a sweep that was run.

        Args:
            picks: token by tree node.
            state: of the session, the sweep included.
            is_cut: the sweep truncated first, so earlier picks are void.
        """
        known: dict[Parent, int] = {} if is_cut else dict(self._picks)
        known.update(picks.items())
        tip = _tip(state)
        self._picks = {node: token for node, token in known.items() if node == tip or node in state.live}

    def walk(self, state: SessionState, last: Sweep) -> list[TreeNodeId]:
        """Live nodes on the path, from below the tip down; `last` is the newest sweep, which `state` includes."""
        path: list[TreeNodeId] = []
        at: Parent = None
        tip = _tip(state)
        first = state.live.get(last.first_id)
        if tip not in self._picks and first is not None and first.parent is None:
            self._picks[tip] = first.token
        pick = self._picks.get(tip)
        while pick is not None and (child := state.child(at, pick)) is not None:
            path.append(child)
            at, pick = child, self._picks.get(child)
        return path


def _tip(state: SessionState) -> Parent:
    return state.committed[-1].id if state.committed else None


def requested_rows(sweep: Sweep, path: Iterable[TreeNodeId]) -> tuple[TreeNodeId, ...]:
    """The nodes whose hidden rows answer a sweep: its own on the path whose picks are asked for, the deepest ones."""
    if sweep.want is None or not sweep.want.hidden_rows:
        return ()
    return tuple(node for node in path if sweep.picks_from <= node < sweep.end_id)[-MAX_REPLY_ROWS:]


# How many hidden rows of a prompt one session's tail sends (P10).
#
# Replies are kept until the client says that it holds them. So their rows are bounded, or a client that never says so
# would fill the tail's memory.


class PromptRowsBudget:
    """Bytes of rows by reply, of those that the client did not acknowledge."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}

    def grant(self, sequence: int, nodes: Sequence[TreeNodeId], row_bytes: int, acked: int) -> list[TreeNodeId]:
        """The newest of some forced tokens whose rows may go with a reply.

        Args:
            row_bytes: of one row.
            acked: the client holds every reply up to this sequence.
        """
        self._sent = {answered: size for answered, size in self._sent.items() if answered > acked}
        count = min(len(nodes), max(0, PROMPT_ROWS_BYTES - sum(self._sent.values())) // row_bytes)
        if count:
            self._sent[sequence] = count * row_bytes
        return list(nodes[len(nodes) - count :])


# Replies of one session at the tail: kept until the client holds them, sent on the newest reply stream (R6).

MAX_ROUND_TRIP_MS = 120_000.0


class ReplyBuffer:
    """Bounded by the session's credits: the client never has more than W sweeps unanswered (F1).

    Attributes:
        link_ms: half the shortest of the latest round trips to the client on the reply stream.
    """

    def __init__(self) -> None:
        self.link_ms = 0.0
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._kept: dict[int, Reply] = {}
        self._reader = 0
        self._sent = 0
        self._ping: Ping | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, reply: Reply, acked: int) -> None:
        """Keep a reply and forget those that the client holds."""
        self._kept = {sequence: kept for sequence, kept in self._kept.items() if sequence > acked}
        self._kept[reply.sequence] = reply
        self._changed.set()

    def measured(self, round_trip_ms: float) -> None:
        """A ping was answered; the time that the client reports is bounded."""
        self._round_trips.append(min(round_trip_ms, MAX_ROUND_TRIP_MS))
        self.link_ms = min(self._round_trips) / 2

    def ping(self, ping: Ping) -> None:
        """Send a ping when the stream is next free; only the newest one waits."""
        self._ping = ping
        self._changed.set()

    def resend(self, sequence: int) -> None:
        """Send a kept reply once more, because its sweep came again (P9)."""
        if sequence in self._kept:
            self._sent = min(self._sent, sequence - 1)
            self._changed.set()

    def close(self) -> None:
        """End the reply stream."""
        self._closed = True
        self._changed.set()

    async def stream(self, acked: int) -> AsyncIterator[Reply | Ping]:
        """Everything kept beyond `acked`, then what comes, and pings; a newer stream ends this one."""
        self._reader += 1
        reader, self._sent = self._reader, acked
        self._changed.set()
        while reader == self._reader and not self._closed:
            waiting = [sequence for sequence in self._kept if sequence > self._sent]
            if self._ping is not None:
                ping, self._ping = self._ping, None
                yield ping
            elif waiting:
                self._sent = min(waiting)
                yield self._kept[self._sent]
            else:
                self._changed.clear()
                await self._changed.wait()


CompileGrammar = Callable[[Grammar], Awaitable[CompiledGrammar]]
"""Compiles a grammar in a worker; raises what `Tail.follow_grammars` does."""


class Tail:
    """Makes the replies of one session, whose state its log holds."""

    def __init__(self, log: HopLog, compile_grammar: CompileGrammar | None) -> None:
        """Begin without a grammar.

        Args:
            compile_grammar: compiles one; None on a hop that picks nothing.
        """
        self._log = log
        self._compile = compile_grammar
        self._awaited: Grammar | None = None
        self._unmasked: SweepRun | None = None
        self._is_awaited = asyncio.Event()
        self._compiled: tuple[Grammar, CompiledGrammar] | None = None
        self._place: GrammarPlace | None = None
        self._accepted = AcceptedPath()
        self._replayed: list[SweepRun] = []
        self._rules: PathRules | None = None
        self._prompt_rows = PromptRowsBudget()

    def picking(self) -> Picking:
        """How to pick after the nodes of the sweep that was handed out last."""
        state = self._log.executed
        sampling = state.sampling
        if sampling.rules is None:
            self._rules = self._place = None
        elif self._rules is None or self._rules.rules != sampling.rules:
            self._rules, self._place = PathRules(sampling.rules), self._place_in(sampling.rules)
        return Picking(sampling, self._rules, state)

    @property
    def is_ready(self) -> bool:
        """Whether nothing is awaited from a grammar's worker."""
        return self._awaited is None and self._unmasked is None

    def expect(self, sampling: Sampling | None) -> None:
        """Picks will follow this: its grammar is compiled before any sweep is run."""
        grammar = None if sampling is None or sampling.rules is None else sampling.rules.grammar
        if grammar is None or self._compile is None or (self._compiled is not None and self._compiled[0] == grammar):
            return
        self._awaited = grammar
        self._is_awaited.set()

    def expect_masks(self, run: SweepRun) -> None:
        """A sweep comes next: what its picks may be is asked for before it is run, so that the engine never waits."""
        if self._place is not None and run.asked_nodes:
            self._unmasked = run
            self._is_awaited.set()

    async def follow_grammars(self, on_ready: Callable[[], None]) -> None:
        """Have compiled and masked what is expected, one after the other, until cancelled.

        Args:
            on_ready: called when sweeps can run.

        Raises:
            RemoteProtocolError: a grammar is none, or takes too much time or memory.
            Busy: too many others are followed here.
        """
        while True:
            await self._is_awaited.wait()
            self._is_awaited.clear()
            if (grammar := self._awaited) is not None and self._compile is not None:
                found = await self._compile(grammar)
                if self._awaited == grammar:
                    self._compiled, self._awaited = (grammar, found), None
            if (run := self._unmasked) is not None and (place := self._place) is not None:
                run.masks = await place.masks(run.asked_nodes, self._log.executed)
                if self._unmasked is run:
                    self._unmasked = None
            if self.is_ready:
                on_ready()

    def _place_in(self, rules: PickRules) -> GrammarPlace | None:
        """The beginning of the rules' grammar; None for one that a later one has replaced: nobody needs those picks."""
        if self._compiled is None or self._compiled[0] != rules.grammar:
            return None
        return GrammarPlace(self._compiled[1], rules)

    def reply(self, run: SweepRun, times: Sequence[HopTime]) -> Reply:
        """The answer to the sweep that was run last."""
        sweep, state = run.work.frame.sweep, self._log.executed
        self._accepted.note(dict(run.picks), state, is_cut=run.work.applied.truncated_to is not None)
        reply = Reply(sweep.sequence, sweep.generation, tuple(run.picks), tuple(times))
        if sweep.want is None:
            return reply
        reply = _with_log_probs(reply, sweep.want, run.log_probs)
        path = self._accepted.walk(state, sweep) if sweep.want.hidden_rows else ()
        return self._with_rows(reply, sweep, path, run.final)

    def replayed(self, run: SweepRun) -> None:
        """A part of a snapshot was run."""
        self._replayed.append(run)

    def forget(self) -> None:
        """A snapshot replaces everything."""
        self._accepted = AcceptedPath()
        self._unmasked = None
        self._replayed.clear()
        self._prompt_rows = PromptRowsBudget()

    def replies(self, generation: int) -> list[Reply]:
        """The answers to all unanswered sweeps, after the last part of a snapshot."""
        log, state = self._log, self._log.executed
        picks: dict[TreeNodeId, int] = {}
        final: dict[TreeNodeId, Rows] = {}
        log_probs: dict[TreeNodeId, PickLogProbs] = {}
        for run in self._replayed:
            picks |= run.picks
            final |= run.final
            log_probs |= run.log_probs
        self._replayed.clear()
        replies = log.replies(picks, generation)
        self._accepted.note(dict(pick for reply in replies for pick in reply.picks), state, is_cut=True)
        path = [token.id for token in state.committed]
        if log.unanswered:
            path += self._accepted.walk(state, log.unanswered[-1])
        return [
            self._with_rows(_with_log_probs(reply, header.want, log_probs), header, path, final)
            for header, reply in zip(log.unanswered, replies, strict=True)
        ]

    def _with_rows(
        self, reply: Reply, sweep: Sweep, path: Sequence[TreeNodeId], final: Mapping[TreeNodeId, Rows]
    ) -> Reply:
        """The reply with rows [R, hidden_size] as they were computed, whatever the codec between hops."""
        prompt = [node for node in map(TreeNodeId, sweep.prompt_nodes) if node in final]
        if prompt:
            row_bytes = final[prompt[-1]].size_bytes
            prompt = self._prompt_rows.grant(sweep.sequence, prompt, row_bytes, self._log.received.acked)
        held = (*prompt, *(node for node in requested_rows(sweep, path) if node in final))
        if not held:
            return reply
        rows = [final[node] for node in held]
        joined = replace(rows[0], count=len(rows), data=b"".join(row.data for row in rows))
        return replace(reply, row_ids=held, rows=joined)


def _with_log_probs(reply: Reply, want: Want | None, found: Mapping[TreeNodeId, PickLogProbs]) -> Reply:
    """The reply with what the target thinks of each pick, where that was asked for."""
    if want is None or not want.log_probs:
        return reply
    values = [found[node] for node, _ in reply.picks]
    top = tuple(best[: want.top_log_probs] for _, best in values) if want.top_log_probs else None
    return replace(reply, log_probs=tuple(value for value, _ in values), top_log_probs=top)
