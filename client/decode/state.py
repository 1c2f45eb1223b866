"""One generation's state: what to continue, how, and what came of it. Owns no network and no task.

`ForcedText` is what the grammar forces after the certain text: keys, quotes and braces of JSON, the frame of a tool
call. The grammar's worker is asked while the loop has other work, and awaited for a moment only: no sweep waits for a
slow worker. As with any draft the target decides, which may write the same text in other tokens than its tokenizer
would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from client.base.stats import SweepMeasurement, TokenLogProbs
from client.decode.pick_watch import PickWatch
from client.decode.pipeline import SweepTracer
from client.decode.policy import FixedPolicy, SpeculationPolicy
from client.decode.text_stream import GrowingText
from client.decode.walk import Observe
from client.draft.drafter import Drafter, NoDrafter, TreeDrafter
from swarm.base.errors import SwarmError, Unfinished
from swarm.compute.grammars import CompiledGrammar, ForcedTokens
from swarm.protocol.messages import Sampling, Want

PATIENCE_S = 0.005
"""How long a sweep waits for the answer, which takes less than a millisecond as a rule."""
MAX_LATE = 3
"""Answers in a row that may come late; then no sweep of the text waits for one any more."""
MAX_LEFT = 3
"""Answers in a row that the text may leave, since its target writes other tokens; then nothing more is asked."""

Tokens = tuple[int, ...]
Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]
"""Starts work that somebody else owns."""


class ForcedText:
    """What a grammar forces next in one text."""

    def __init__(self, place: ForcedTokens, spawn: Spawn) -> None:
        """Ask nothing yet.

        Args:
            place: follows the text.
            spawn: starts a question.
        """
        self._place: ForcedTokens | None = place
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None
        self._found: tuple[Tokens, Tokens] = (), ()
        self._late = self._left = 0

    def ask(self, sequence: Tokens) -> None:
        """Ask what must follow, unless another question is open."""
        before, forced = self._found
        came = sequence[len(before) :]
        if forced and came:
            shared = min(len(came), len(forced))
            self._left = 0 if came[:shared] == forced[:shared] else self._left + 1
        if self._left == MAX_LEFT:
            self._place = None
        if self._place is not None and (self._task is None or self._task.done()):
            self._task = self._spawn(self._ask(self._place, sequence))

    async def awaited(self, sequence: Tokens) -> Tokens:
        """The same as `known`, after a moment's wait where an answer is not there yet."""
        if self._task is not None and self._late < MAX_LATE:
            done, _ = await asyncio.wait((self._task,), timeout=PATIENCE_S)
            self._late = 0 if done else self._late + 1
        return self.known(sequence)

    def known(self, sequence: Tokens) -> Tokens:
        """What must follow, if that was asked and the answer is there."""
        return self._found[1] if self._found[0] == sequence else ()

    async def _ask(self, place: ForcedTokens, sequence: Tokens) -> None:
        try:
            self._found = sequence, await place.after(sequence)
        except (SwarmError, MemoryError, OSError):  # a guess less; the tail will tell what matters
            self._place = None


@dataclass(slots=True)
class GenerationState:
    """One generation.

    Attributes:
        prompt: token ids.
        sampling: how the tail picks.
        policy: chooses how many nodes a sweep carries.
        chunk: nodes of a sweep that carries a part of the prompt, at most.
        max_new_tokens: tokens after which a session ends; less than the text's own limit where its window is smaller.
        text: decides where the output ends; holds the tokens so far.
        drafter: grows trees; replaced while one is lent, or for good where it runs out of memory.
        drafting: the thread that drafts.
        options: the caller's, to resume an interrupted generation.
        resumed_tokens: tokens that were in `text` from the start.
        clock: in seconds.
        observe: takes the target's hidden rows; None asks for none.
        prompt_rows: of how many of the prompt's last tokens too.
        lend: lends a drafter while the generation runs.
        kept_tokens: of the prompt, those that the session held already.
        prefill_sweeps: sweeps that carried a part of the prompt.
        sweeps: one record per answered decode sweep.
        tracer: makes what people see of each sweep; None where nobody asked.
        top_log_probs: how many of the likeliest tokens are told with each token's log-probability; None: neither is.
        log_probs: one per token of `text` that this run brought, where they are told.
        grammar: of the rules of picks, compiled, so that picks can be checked.
        forced: what it forces next; None without a grammar.
        is_held: nothing is shown before the end, so that what a refuted machine picked was never seen.
        watch: of its picks; made anew with each session that it runs in.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    policy: SpeculationPolicy
    chunk: int
    max_new_tokens: int
    text: GrowingText
    drafter: Drafter
    drafting: Executor
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed_tokens: int = 0
    clock: Callable[[], float] = time.perf_counter
    observe: Observe | None = None
    prompt_rows: int = 0
    lend: Callable[[], AbstractContextManager[Drafter]] | None = None
    kept_tokens: int = 0
    prefill_sweeps: int = 0
    sweeps: list[SweepMeasurement] = field(default_factory=list)
    tracer: SweepTracer | None = None
    top_log_probs: int | None = None
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    grammar: CompiledGrammar | None = None
    forced: ForcedText | None = None
    is_held: bool = False
    watch: PickWatch | None = None

    @property
    def want(self) -> Want | None:
        """What sweeps ask for beside picks."""
        if self.observe is None and self.top_log_probs is None:
            return None
        return Want(self.top_log_probs is not None, self.observe is not None, self.top_log_probs or 0)

    @property
    def nodes(self) -> int:
        """Tree nodes of a sweep at most, its pending token not counted."""
        return self.policy.max_tree_nodes if self.max_new_tokens > 1 else 0

    @property
    def is_proved(self) -> bool:
        """Whether its text is to be proved."""
        return bool(self.options.get("proof", "none") != "none")

    @property
    def sequence(self) -> tuple[int, ...]:
        """Every certain token."""
        return (*self.prompt, *self.text.tokens)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.text.tokens)

    @contextmanager
    def with_drafter(self) -> Iterator[None]:
        """Hold a drafter that no other generation uses, while this one runs; where none is left, draft no trees."""
        with nullcontext(self.drafter) if self.lend is None else self.lend() as drafter:
            if isinstance(drafter, NoDrafter):
                self.policy = FixedPolicy(0)
            if isinstance(drafter, TreeDrafter) and drafter.wants_rows:
                self.observe, self.prompt_rows = drafter.observe, drafter.prompt_rows if self.nodes else 0
            self.drafter = drafter
            yield

    def go_back(self, tokens: int) -> None:
        """Keep the first tokens of the text, no others."""
        self.text = self.text.first(tokens)
        del self.log_probs[max(tokens - self.resumed_tokens, 0) :]

    def unfinished(self) -> Unfinished:
        """What `resume` needs."""
        return Unfinished(self.prompt, {**self.options, "seed": self.sampling.seed}, tuple(self.text.tokens))
