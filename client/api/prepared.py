"""From a job to a generation, and from its text to the parts of an answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import llguidance.hf
from llguidance import LLTokenizer

from client.api.backend import ChatJob, Job
from client.decode.state import GenerationState
from client.dialogue.messages import AnswerDelta, ContentDelta
from client.library.conversation import Conversation
from client.library.jobs import GenerationFactory
from client.options import MAX_NEW_TOKENS, GenerateOptions, make_options
from swarm.errors import ConfigError, ContextFull


class PartsOfAnswer(Protocol):
    """Turns an answer's text into its parts."""

    def push(self, text: str) -> list[AnswerDelta]:
        """Take the next characters; returns what they made certain."""

    def finish(self) -> list[AnswerDelta]:
        """The text has ended; returns what was held back."""


class ChatTemplate:
    family = ""

    def __init__(self, tokenizer):
        self.has_template = bool(tokenizer.chat_template)


class PlainText:
    """An answer that is content alone."""

    def push(self, text: str) -> list[AnswerDelta]:
        """The text as it is."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[AnswerDelta]:
        """Nothing is held back."""
        return []


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
    parser: PartsOfAnswer
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
        return len(self._tokens(job))

    def prepare(self, job: Job) -> Prepared:
        """Read a job.

        Raises:
            ConfigError: an option or a message is not valid.
            ContextFull: the prompt, or the prompt with what was asked for, exceeds the context.
        """
        given = dict(job.options)
        asked = make_options(GenerateOptions(**given))  # type: ignore[typeddict-item]
        if isinstance(job, ChatJob):
            self._check_offers(job)
        tokens = self._tokens(job)
        given["stop"] = (*asked.stop, *self._more_stops(job))
        given["max_new_tokens"] = self._limit(len(tokens), job.options.get("max_new_tokens"))
        options = make_options(GenerateOptions(**given))  # type: ignore[typeddict-item]
        if asked.log_probs is not None:
            self._made_vocabulary()
        return Prepared(self.factory.make(tokens, options), PlainText(), asked.stop, self.factory.target.eos_ids)

    def _limit(self, prompt_tokens: int, asked: int | None) -> int:
        limit = self.factory.target.max_positions
        if limit is None:
            return MAX_NEW_TOKENS if asked is None else asked
        if prompt_tokens >= limit:
            raise ContextFull(
                f"This model's maximum context length is {limit} tokens. However, your prompt has {prompt_tokens} "
                "tokens. Please shorten it."
            )
        if asked is not None and prompt_tokens + asked > limit:
            raise ContextFull(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, {asked} in the completion). Please "
                "shorten one of them."
            )
        return limit - prompt_tokens if asked is None else asked

    def _check_offers(self, job: ChatJob) -> None:
        if job.tools and job.tool_choice.mode != "none":
            raise ConfigError("tools: this model's template knows none")
        if job.continues:
            raise ConfigError("this model's template cannot go on with an assistant's message")

    def _tokens(self, job: Job) -> tuple[int, ...]:
        if isinstance(job, ChatJob):
            return self._conversation(job).prompt()
        if isinstance(job.prompt, str):
            return tuple(self.factory.target.tokenizer(job.prompt)["input_ids"])
        return tuple(job.prompt)

    def _more_stops(self, job: Job) -> tuple[str, ...]:
        return self._conversation(job).stop if isinstance(job, ChatJob) else ()

    def _conversation(self, job: ChatJob) -> Conversation:
        conversation = Conversation(self.factory.target.tokenizer)
        conversation.messages = list(job.messages)
        return conversation
