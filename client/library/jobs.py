"""From a prompt and options to the state of a generation; prompts and options that are not valid are refused here."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from operator import index

from client.base.options import GenerateOptions, Options, check_text
from client.base.target import Target
from client.decode.goodput import Goodput
from client.decode.pipeline import SweepTracer
from client.decode.policy import FixedPolicy, SpeculationPolicy
from client.decode.state import GenerationState
from client.decode.text_stream import TextStream
from client.dialogue.encoding import encode_text
from client.draft.drafter import Drafters, NoDrafter, TreeDrafter
from swarm.base.errors import ConfigError, ContextFull
from swarm.compute.grammars import GrammarCompiler, LeaseExceeded
from swarm.compute.sampling import check as check_sampling

PREFILL_CHUNK = 512
"""Tokens of a prefill sweep, at most."""
MAX_NODES = 512
"""Nodes of a tree whose size is chosen by goodput, at most."""


@dataclass(frozen=True, slots=True)
class GenerationFactory:
    """Makes generations, and holds what all those of a client share.

    Attributes:
        target: the model.
        drafters: lent to generations.
        drafting: the thread that drafts.
        nodes: tree nodes per sweep (K), unless a generation's options say; None lets `goodput` choose before each.
        reproducible: refuse options with which the text would depend on more than model, prompt and seed.
        goodput: the controller.
        defaults: what options are where a generation does not say: as the checkpoint has them.
    """

    target: Target
    drafters: Drafters
    drafting: Executor
    nodes: int | None
    reproducible: bool = False
    goodput: Goodput = field(default_factory=lambda: Goodput(MAX_NODES))
    defaults: GenerateOptions = field(default_factory=GenerateOptions)
    _grammars: list[GrammarCompiler] = field(default_factory=list)

    def forget(self) -> None:
        """Let drafters drop their state of texts, before they grow another tree."""
        for drafter in self.drafters.all:
            if isinstance(drafter, TreeDrafter):
                self.drafting.submit(drafter.forget)

    async def check_grammar(self, state: GenerationState) -> None:
        """Compile a generation's grammar as the tail will, before anything travels; a known one takes no time.

        Raises:
            ConfigError: it is none, or too large.
        """
        grammar = None if state.sampling.rules is None else state.sampling.rules.grammar
        if grammar is None:
            return
        if not self._grammars:
            self._grammars.append(GrammarCompiler.of_tokenizer(self.target.tokenizer))
        try:
            state.grammar = await self._grammars[0].compile(grammar)
        except (LeaseExceeded, MemoryError) as error:
            raise ConfigError(f"grammar: {error}") from error

    def close(self) -> None:
        """Let go of what all generations share."""
        for grammars in self._grammars:
            grammars.close()

    def make(self, prompt: str | Sequence[int], options: Options, so_far: Sequence[int] = ()) -> GenerationState:
        """Make a generation.

        Args:
            prompt: text, or token ids.
            options: of the generation.
            so_far: tokens that it generated before it was interrupted.

        Raises:
            ConfigError: an option or the prompt is not valid.
            ContextFull: prompt and new tokens exceed the model's context.
        """
        target = self.target
        options = options.with_defaults(self.defaults)
        options.check()
        if self.reproducible and options.multistep and options.temperature:
            raise ConfigError("multistep: the text depends on the trees too, and a reproducible one was asked for")
        ids = _ids(target, prompt)
        if not ids:
            raise ConfigError("prompt: is empty, and this tokenizer adds no token of its own; give at least one token")
        if not all(0 <= token < target.vocab_size for token in (*ids, *so_far)):
            raise ConfigError(f"prompt: token ids must be below {target.vocab_size}")
        if len(so_far) > options.max_new_tokens:
            raise ConfigError(f"resume: {len(so_far)} tokens are there already, of {options.max_new_tokens} to make")
        limit = target.max_positions
        if limit is not None and len(ids) + options.max_new_tokens > limit:
            raise ContextFull(
                f"prompt of {len(ids)} tokens and {options.max_new_tokens} new ones exceed the model's context of "
                f"{limit}; shorten one of them"
            )
        ends = options.ends(target.eos_ids)
        sampling = options.sampling(len(ids), [token for token in ends if 0 <= token < target.vocab_size])
        check_sampling(sampling, target.vocab_size)
        nodes = self.nodes if options.nodes is None else options.nodes
        policy: SpeculationPolicy = self.goodput if nodes is None else FixedPolicy(nodes)
        if isinstance(self.drafters.first, NoDrafter):
            policy = FixedPolicy(0)
        text = TextStream(
            target.tokenizer,
            ids,
            stop=options.stop,
            eos_ids=ends,
            max_new_tokens=options.max_new_tokens,
        )
        text.show(options.show)
        text.push(so_far)
        return GenerationState(
            prompt=ids,
            sampling=sampling,
            policy=policy,
            chunk=PREFILL_CHUNK,
            max_new_tokens=options.max_new_tokens,
            text=text,
            drafter=self.drafters.first,
            drafting=self.drafting,
            options=asdict(options),
            lend=self.drafters.lend,
            resumed_tokens=len(text.tokens),
            tracer=SweepTracer(target.tokenizer.backend_tokenizer) if options.trace else None,
            top_log_probs=options.log_probs,
        )


def _ids(target: Target, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Token ids of a prompt; a text that a template has made already begins once.

    Raises:
        ConfigError: it is neither text nor token ids.
    """
    if isinstance(prompt, str):
        return tuple(encode_text(target.tokenizer, check_text(prompt, "prompt")))
    try:
        return tuple(map(index, prompt))
    except TypeError:
        raise ConfigError("prompt: give text, or token ids, which are whole numbers") from None
