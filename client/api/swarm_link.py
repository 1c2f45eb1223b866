"""The way to the model: finds the swarm, goes on trying, and knows which layers are served. Owns no request.

It prepares the prompts for that model: tokens, grammar and parser of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from typing import Final

import llguidance.hf
from llguidance import LLTokenizer

from client.api.backend import ChatJob, Job, ModelCard
from client.api.errors import ROUTE_RETRY_S, PromptTooLong
from client.api.sessions import SessionLimits, SessionPool
from client.base.options import MAX_NEW_TOKENS, Options, check_text, make_options
from client.decode.state import GenerationState
from client.dialogue.encoding import encode_text
from client.dialogue.parsing import AnswerParser, ContentParser
from client.dialogue.plan import AnswerPlan, AnswerRequest, plan_answer
from client.dialogue.template import ChatTemplate, PromptSwitches
from client.library.aio import AsyncSwarm
from client.library.jobs import GenerationFactory
from swarm.base.errors import RegistryError, RouteError, SwarmError
from swarm.base.layers import Span
from swarm.base.logs import CountedLog
from swarm.base.plain_text import plain_line
from swarm.base.tasks import TaskScope
from swarm.directory.coverage import Coverage, fill_lines, serve_line
from swarm.directory.node_record import NodeState


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that can be run.

    Attributes:
        stops: strings that the job asked for; others end an answer as its turn's end does.
        ends: tokens that end a turn and are no part of the answer.
    """

    state: GenerationState
    parser: AnswerParser
    stops: tuple[str, ...]
    ends: frozenset[int]


class JobReader:
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


logger = logging.getLogger(__name__)

RECENT_S: Final = 2.0
"""How old the state of the swarm may be that is told."""
PATIENCE_S: Final = 3.0
"""How long the directory is waited for before what was known is told."""
FIRST_TRY_S: Final = 10.0
"""How long a request waits for the first try to find the swarm: a server and its first caller start together."""
RETRY_S: Final = 5.0
"""Between tries to find the swarm, and between looks at it."""
LOST_S: Final = 60.0
"""After so long without any node of the model it is looked for again: it may be served with other weights now."""


@dataclass(frozen=True, slots=True)
class SwarmSource:
    """Where the model is."""

    name: str
    connect: Callable[[], AbstractAsyncContextManager[AsyncSwarm]]
    join: Sequence[str] = ()


class ModelLink:
    """A swarm that was found: its model, the sessions that are kept there, and which layers are served.

    Attributes:
        coverage: as last read; None before the first time.
    """

    def __init__(self, swarm: AsyncSwarm, sessions: SessionPool, clock: Callable[[], float]) -> None:
        self.swarm = swarm
        self.sessions = sessions
        self.reader = JobReader(swarm.factory)
        self.coverage: Coverage | None = None
        self._clock = clock
        self._read_at = float("-inf")
        self._is_read = asyncio.Lock()

    async def look(self) -> Coverage | None:
        """Which layers are served: as of now, or as last known where the directory takes too long."""
        async with self._is_read:
            if self._clock() - self._read_at >= RECENT_S:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        self.coverage = await self.swarm.coverage()
                except (TimeoutError, RegistryError) as error:
                    logger.debug("the directory did not answer", exc_info=error)
                self._read_at = self._clock()
        return self.coverage


class SwarmLink:
    """The link to the model, while it is kept up by `keep`."""

    def __init__(self, source: SwarmSource, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._limits = limits
        self._clock = clock
        self._created = int(time.time())
        self._model: ModelLink | None = None
        self._card: ModelCard | None = None  # as it was when it was last open
        self._why: Exception = self._still_looking()
        self._log = CountedLog(logger, clock)
        self.tried = asyncio.Event()
        """Set once the first try has ended, whether the model was found or not."""

    @property
    def name(self) -> str:
        return self._source.name if self._model is None else self._source.name or self._model.swarm.target.name

    @property
    def sessions(self) -> SessionPool | None:
        """Those that are kept; None while the model was not found."""
        return None if self._model is None else self._model.sessions

    def model(self) -> ModelLink:
        """The model.

        Raises:
            SwarmError: it was not found yet; the error says why.
        """
        if self._model is None:
            raise self._why
        return self._model

    async def sought(self) -> ModelLink:
        """The model, for which the first try is waited for, at most `FIRST_TRY_S`.

        Raises:
            SwarmError: it was not found yet; the error says why.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TRY_S):
                await self.tried.wait()
        return self.model()

    def reset(self) -> None:
        """Forget how the last try ended: another one begins."""
        self._why = self._still_looking()
        self.tried.clear()

    def refuse(self, why: Exception) -> None:
        """Stop trying to reach the swarm; requests that wait fail with the reason."""
        self._why = why
        self.tried.set()

    def _still_looking(self) -> SwarmError:
        return RouteError(f"still looking for {self._source.name or 'a model'} in the swarm", ())

    async def keep(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Connect, and again where nothing of the model is left; never ends.

        Raises:
            ConfigError: what the user asked for cannot be: no such model, or a draft that does not fit.
        """
        while True:
            try:
                async with self._source.connect() as swarm, TaskScope() as scope:
                    self._model = ModelLink(swarm, SessionPool(swarm.opener, scope, self._limits), self._clock)
                    self.tried.set()
                    await self._watch(self._model, pause)
            except (RouteError, RegistryError) as error:
                self._why = error
                self._log.say("find", f"{plain_line(str(error))}; trying again")
            finally:
                self._model = None
            self.tried.set()
            await pause(RETRY_S)

    async def _watch(self, model: ModelLink, pause: Callable[[float], Awaitable[None]]) -> None:
        """Look at the model's nodes now and then; ends when there have been none for long."""
        last_seen = self._clock()
        while True:
            coverage = await model.look()
            if coverage is None or coverage.records:
                last_seen = self._clock()
            elif self._clock() - last_seen >= LOST_S:
                self._why = RouteError(f"nobody serves {coverage.model.name} any more", _all(coverage))
                return
            await pause(RETRY_S)

    async def card(self) -> ModelCard:
        if self._model is not None:
            await self._model.look()
        return self.known_card()

    def known_card(self) -> ModelCard:
        if self._model is None:
            unknown = self._unknown()
            if self._card is None:
                return unknown
            return replace(self._card, is_complete=False, missing=unknown.missing, serve_line=unknown.serve_line)
        target, coverage = self._model.swarm.target, self._model.coverage
        missing = () if coverage is None else coverage.missing
        lines = [] if coverage is None or not missing else fill_lines(coverage, self._source.join)
        template = self._model.reader.template
        self._card = ModelCard(
            id=self.name,
            created=self._created,
            context_length=target.max_positions or 0,
            fingerprint=self._model.swarm.identity.fingerprint,
            is_complete=coverage is not None and not missing,
            missing=tuple(map(str, missing)),
            serve_line=lines[0] if lines else "",
            has_template=template.has_template,
            tool_family=template.family,
            sampling=self._model.swarm.defaults,
        )
        return self._card

    def _unknown(self) -> ModelCard:
        spans = [Span(start, end) for start, end in getattr(self._why, "missing", ())]
        name = self._source.name
        line = serve_line(name or "MODEL", spans[0] if spans else "auto", self._source.join)
        return ModelCard(name, self._created, 0, "", False, tuple(map(str, spans)), line, False, "", is_open=False)

    async def explained(self, error: RouteError) -> RouteError:
        """The same error, with the time in which a node that loads the missing layers will serve them, if one does."""
        coverage = None if self._model is None else await self._model.look()
        loading = [] if coverage is None else [one for one in coverage.records if one.state is NodeState.JOINING]
        comes = error.missing and all(
            any(node.span.start <= start and end <= node.span.end for node in loading) for start, end in error.missing
        )
        error.eta_s = ROUTE_RETRY_S if comes else None
        return error


def _all(coverage: Coverage) -> list[tuple[int, int]]:
    return [(0, coverage.model.num_layers)]
