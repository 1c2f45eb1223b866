"""Replies of one session's tail: picks, and hidden rows of the accepted path where the client asks for them.

After a snapshot it answers again what is unanswered (R6), from the parts of the replay. Owns no stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import torch

from node.engine.sweep_run import Picking, SweepRun
from node.session.accepted_path import AcceptedPath, requested_rows
from node.session.prompt_rows import PromptRowsBudget
from swarm.ids import TreeNodeId
from swarm.inference.grammars import CompiledGrammar, GrammarPlace
from swarm.inference.path_rules import PathRules
from swarm.inference.row_codec import encode_rows, lossless_codec
from swarm.inference.sampling import PickLogProbs
from swarm.protocol.hop_log import HopLog
from swarm.protocol.messages import HopTime, Reply, Sampling, Sweep, Want
from swarm.protocol.pick_rules import Grammar, PickRules

CompileGrammar = Callable[[Grammar], Awaitable[CompiledGrammar]]
"""Compiles a grammar in a worker; raises what `Tail.follow_grammars` does."""


class Tail:
    """Makes the replies of one session, whose state its log holds."""

    def __init__(self, log: HopLog, compile_grammar: CompileGrammar | None) -> None:
        """Begin without a grammar.

        Args:
            log: holds the session's state.
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
        self._accepted.forget()
        self._unmasked = None
        self._replayed.clear()
        self._prompt_rows = PromptRowsBudget()

    def replies(self, generation: int) -> list[Reply]:
        """The answers to all unanswered sweeps, after the last part of a snapshot."""
        log, state = self._log, self._log.executed
        picks: dict[TreeNodeId, int] = {}
        final: dict[TreeNodeId, torch.Tensor] = {}
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
        self, reply: Reply, sweep: Sweep, path: Sequence[TreeNodeId], final: Mapping[TreeNodeId, torch.Tensor]
    ) -> Reply:
        """The reply with rows [R, hidden_size] as they were computed, whatever the codec between hops."""
        prompt = [node for node in map(TreeNodeId, sweep.prompt_nodes) if node in final]
        if prompt:
            row = final[prompt[-1]]
            row_bytes = lossless_codec(row.dtype).row_bytes(len(row))
            prompt = self._prompt_rows.grant(sweep.sequence, prompt, row_bytes, self._log.received.acked)
        held = (*prompt, *(node for node in requested_rows(sweep, path) if node in final))
        if not held:
            return reply
        rows = torch.stack([final[node] for node in held])
        return replace(reply, row_ids=held, rows=encode_rows(rows, lossless_codec(rows.dtype)))


def _with_log_probs(reply: Reply, want: Want | None, found: Mapping[TreeNodeId, PickLogProbs]) -> Reply:
    """The reply with what the target thinks of each pick, where that was asked for."""
    if want is None or not want.log_probs:
        return reply
    values = [found[node] for node, _ in reply.picks]
    top = tuple(best[: want.top_log_probs] for _, best in values) if want.top_log_probs else None
    return replace(reply, log_probs=tuple(value for value, _ in values), top_log_probs=top)
