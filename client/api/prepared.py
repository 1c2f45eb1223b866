"""From a job to a generation, and from its text to the parts of an answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import llguidance.hf
from llguidance import LLTokenizer

from client.api.backend import ChatJob, Job
from client.api.errors import PromptTooLong
from client.decode.state import GenerationState
from client.dialogue.encoding import encode_text
from client.dialogue.parsing import AnswerParser, ContentParser
from client.dialogue.plan import AnswerPlan, AnswerRequest, plan_answer
from client.dialogue.template import ChatTemplate, PromptSwitches
from client.library.jobs import GenerationFactory
from client.options import MAX_NEW_TOKENS, Options, check_text, make_options


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that can be run.

    Attributes:
        state: of the generation.
        parser: of its text.
        stops: strings that the job asked for; others end an answer as its turn's end does.
        ends: tokens that end a turn and are no part of the answer.
    """

    state: GenerationState
    parser: AnswerParser
    stops: tuple[str, ...]
    ends: frozenset[int]


class JobReader:
    """Reads jobs for one model.

    Attributes:
        factory: makes generations of the model.
        template: makes prompts of conversations.
    """

    def __init__(self, factory: GenerationFactory) -> None:
        self.factory = factory
        self.template = ChatTemplate(factory.target.tokenizer)
        self._is_making = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def token_bytes(self, token: int) -> bytes:
        """What a token writes, as UTF-8; none for a control token and for one that the tokenizer does not have."""
        vocabulary = self._made_vocabulary()
        if not 0 <= token < vocabulary.vocab_size or vocabulary.is_special_token(token):
            return b""
        return vocabulary.decode_bytes([token])

    def _made_vocabulary(self) -> LLTokenizer:
        """The bytes of every token; made when they are first wanted, which takes a second or two."""
        with self._is_making:
            if self._vocabulary is None:
                self._vocabulary = llguidance.hf.from_tokenizer(self.factory.target.tokenizer)
            return self._vocabulary

    def count(self, job: Job) -> int:
        """Tokens of the job's prompt.

        Raises:
            ConfigError: the template does not take the messages, or a text is not valid.
        """
        return len(self._plan(job, make_options(job.options)).tokens)

    def prepare(self, job: Job) -> Prepared:
        """Read a job.

        Raises:
            ConfigError: an option or a message is not valid.
            ContextFull: the prompt leaves no room for an answer.
        """
        asked = make_options(job.options).with_defaults(self.factory.defaults, job.defaults)
        plan = self._plan(job, asked)
        options = replace(
            asked,
            stop=(*asked.stop, *plan.stop),
            max_new_tokens=self._limit(len(plan.tokens), job.options.get("max_new_tokens")),
            grammar=plan.grammar,
            show=plan.show,
        )
        state = self.factory.make(plan.tokens, options)
        if asked.log_probs is not None:
            self._made_vocabulary()
        return Prepared(state, plan.parser, asked.stop, asked.ends(self.factory.target.eos_ids))

    def _limit(self, prompt_tokens: int, asked: int | None) -> int:
        """Tokens that may be generated: as many as are asked for, or the rest of the context.

        Raises:
            ContextFull: the prompt leaves no room for any.
        """
        limit = self.factory.target.max_positions
        room = MAX_NEW_TOKENS if limit is None else limit - prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"This model's maximum context length is {limit} tokens. However, your prompt has {prompt_tokens} "
                "tokens. Please shorten it.",
                prompt_tokens,
                limit or 0,
            )
        return room if asked is None else min(asked, room)

    def _plan(self, job: Job, asked: Options) -> AnswerPlan:
        if isinstance(job, ChatJob):
            switches = PromptSwitches(job.reasoning, job.continues)
            request = AnswerRequest(job.messages, job.tools, job.tool_choice, switches, asked.grammar)
            return plan_answer(self.template, request)
        if isinstance(job.prompt, str):
            tokens = tuple(encode_text(self.factory.target.tokenizer, check_text(job.prompt, "prompt")))
        else:
            tokens = tuple(job.prompt)
        return AnswerPlan(tokens, ContentParser(), (), (), asked.grammar)
