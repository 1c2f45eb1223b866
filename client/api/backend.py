"""The seam between dialects and the swarm: what a request asks for, and what comes back.

A dialect (OpenAI, Anthropic, Ollama, the chat page) reads its JSON into a `ChatJob` or a `TextJob`, runs it on the
`Backend`, and writes each `Delta` in its own form. Dialects own no sampling, no template and no queue.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from client.base.options import GenerateOptions
from client.base.stats import Result, TokenLogProbs
from client.dialogue.messages import AnswerDelta, Message, Tool, ToolChoice


def usual_options() -> GenerateOptions:
    """What OpenAI's and Anthropic's services take where neither a request nor a checkpoint says."""
    return GenerateOptions(temperature=1.0)


@dataclass(frozen=True, slots=True)
class ChatJob:
    """An answer to a conversation.

    Attributes:
        messages: so far, the system's first if there is one.
        options: how to generate; dialects set nothing that they were not asked for. `max_new_tokens` is a limit: no
            more than the rest of the context is generated.
        tool_choice: whether they may or must be.
        reasoning: whether to think first, where the template knows a switch; None leaves it to the model.
        continues: whether the last message is the assistant's own beginning, which the answer goes on with.
        defaults: options that hold where neither those nor the checkpoint say.
        left_out: what the request has and this server has not, as `client.api.request_fields` words it.
        is_whole: nothing is shown before the end.
    """

    messages: Sequence[Message]
    options: GenerateOptions = field(default_factory=GenerateOptions)
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    reasoning: bool | None = None
    continues: bool = False
    defaults: GenerateOptions = field(default_factory=usual_options)
    left_out: tuple[str, ...] = ()
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class TextJob:
    """The continuation of a text, without a template; fields as in `ChatJob`."""

    prompt: str | Sequence[int]
    options: GenerateOptions = field(default_factory=GenerateOptions)
    defaults: GenerateOptions = field(default_factory=usual_options)
    is_whole: bool = False


Job = ChatJob | TextJob


@dataclass(frozen=True, slots=True)
class ApiCaller:
    """Who asks: the queue is fair between keys.

    Attributes:
        key: digest of the API key, or the address where there are no keys.
    """

    key: str


@dataclass(frozen=True, slots=True)
class Begun:
    """The first thing that a run hands out, before any token: the prompt was taken, and is being read."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain by one sweep.

    Attributes:
        parts: of the answer; empty when tokens brought no whole character.
        log_probs: one per token, where the job asked for them.
        sweeps: what the chat page draws of the sweeps behind it (`canopy` extension), one JSON object each; empty
            unless the job's option `trace` is set.
    """

    parts: tuple[AnswerDelta, ...]
    tokens: tuple[int, ...] = ()
    log_probs: tuple[TokenLogProbs, ...] = ()
    sweeps: tuple[dict[str, object], ...] = ()


AnswerEnd = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last thing that a run hands out.

    Attributes:
        stop_string: which of the asked strings ended it; empty for an end of turn.
        result: of the library: whole text, tokens, statistics.
    """

    reason: AnswerEnd
    stop_string: str
    result: Result


AnswerEvent = Begun | Delta | Finished


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model of the swarm.

    Attributes:
        created: when it was first seen, in seconds of the epoch.
        context_length: tokens of prompt and answer together.
        is_complete: whether every layer is served now.
        missing: ranges of layers that nobody serves, as `5-8`.
        serve_line: what a volunteer types to serve them; empty when nothing is missing.
        has_template: whether it brings a chat template.
        tool_family: the tool-call format that its template uses; empty when it knows none.
        sampling: options that hold where a request says nothing, as the checkpoint has them.
        is_open: whether its small files were read; before, its context (0), template and sampling are not known.
    """

    id: str
    created: int
    context_length: int
    fingerprint: str
    is_complete: bool
    missing: tuple[str, ...]
    serve_line: str
    has_template: bool
    tool_family: str
    sampling: GenerateOptions = field(default_factory=GenerateOptions)
    is_open: bool = True


NO_CARD: Final = ModelCard("", 0, 0, "", False, (), "", False, "", is_open=False)
"""Where nothing is known of a model yet."""


class Backend(Protocol):
    """One model of one swarm."""

    async def card(self) -> ModelCard:
        """The model and its state now."""

    def known_card(self) -> ModelCard:
        """The model and its state as last read: what a request needs of it changes seldom, and it need not wait."""

    def count(self, job: Job) -> int:
        """Tokens of the job's prompt.

        Raises:
            ConfigError: the template does not take the messages.
        """

    def token_bytes(self, token: int) -> bytes:
        """What a token writes, as UTF-8; a part of a character is only some of its bytes, a control token none."""

    def run(self, job: Job, caller: ApiCaller) -> AsyncGenerator[AnswerEvent, None]:
        """One answer: `Begun`, then any number of `Delta`, then `Finished`. Closing it early frees every hop.

        Raises:
            ConfigError: an option or a message is not valid (HTTP 400).
            ContextFull: the prompt alone exceeds the context (400, `context_length_exceeded`).
            Busy: no room now; its `retry_after_s` says when to ask again (429).
            RouteError: layers are missing (503).
            GenerationInterrupted: the chain broke midway.
        """


class Models(Protocol):
    """The models that a server answers for."""

    async def cards(self) -> Sequence[ModelCard]:
        """Each of them once, as it is now; none is opened for it. A model that was named at the start comes first."""

    async def backend(self, name: str) -> Backend | None:
        """The model of this name, opened where it was not; None where there is none.

        Args:
            name: of `cards`; empty means the model that was named first at the start.

        Raises:
            ApiError: no name was given, and none at the start (400).
            QueueFull: as many models as may be open are in use.
        """
