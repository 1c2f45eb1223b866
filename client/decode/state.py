"""One generation's state: what to continue, how, and what came of it. Owns no network and no task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from client.control.policy import FixedPolicy, SpeculationPolicy
from client.decode.forced_text import ForcedText
from client.decode.hidden_rows import Observe
from client.decode.sweep_trace import SweepTracer
from client.decode.text_stream import GrowingText
from client.drafting.drafter import Drafter, NoDrafter, TreeDrafter
from client.stats import SweepMeasurement, TokenLogProbs
from swarm.errors import Unfinished
from swarm.inference.grammars import CompiledGrammar
from swarm.protocol.messages import Sampling, Want


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

    def unfinished(self) -> Unfinished:
        """What `resume` needs."""
        return Unfinished(self.prompt, {**self.options, "seed": self.sampling.seed}, tuple(self.text.tokens))
