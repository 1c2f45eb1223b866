"""A conversation through the swarm that keeps its session between turns, so that only new tokens travel.

What a turn has in common with the session's sequence stays where it is; a session that ended meanwhile, or whose window
is full, is opened again and gets the whole conversation once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

from transformers import PreTrainedTokenizerFast

from client.base.options import GenerateOptions, make_options
from client.base.stats import Result, Stats
from client.decode.state import GenerationState
from client.dialogue.messages import AnswerDelta, ContentDelta, Message, ReasoningDelta, Role
from client.dialogue.parsing import AnswerParser
from client.dialogue.plan import AnswerPlan, AnswerRequest, plan_answer
from client.dialogue.template import ChatTemplate
from client.library.jobs import GenerationFactory
from client.library.session import Beginning, Piece, Session, SessionOpener
from swarm.base.errors import Busy, ConfigError, ContextFull, GenerationInterrupted
from swarm.base.tasks import HeldContext, TaskScope, relay


class Conversation:
    """Messages in order, the system's first if there is one.

    Attributes:
        messages: so far.
        template: makes prompts of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, system: str | None = None) -> None:
        self.template = ChatTemplate(tokenizer)
        self._opening = [] if system is None else [Message("system", system)]
        self.messages = list(self._opening)

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template; without one turns are joined as a plain transcript."""
        return self.template.has_template

    def add(self, role: Role, content: str) -> None:
        """Add the next message."""
        self.messages.append(Message(role, content))

    def take_back(self) -> None:
        """Remove the last message."""
        self.messages.pop()

    def clear(self) -> None:
        """Remove all messages but the system's."""
        self.messages = list(self._opening)

    def plan(self) -> AnswerPlan:
        """What the assistant's next answer needs.

        Raises:
            ConfigError: the template does not take these messages, such as a system message where it knows none, or
                they are not valid text.
        """
        return plan_answer(self.template, AnswerRequest(self.messages))


FIRST_WINDOW_TOKENS = 2_048
"""Window that a conversation reserves at first; it doubles when it is full."""


class AsyncChat:
    """A conversation; made by `AsyncSwarm.chat`, used as `async with swarm.chat() as chat:`."""

    def __init__(
        self,
        opener: SessionOpener,
        factory: GenerationFactory,
        scope: TaskScope,
        conversation: Conversation,
        defaults: GenerateOptions,
    ) -> None:
        make_options(defaults).check()
        self._opener = opener
        self._factory = factory
        self._scope = scope
        self._conversation = conversation
        self._defaults = defaults
        self._turn = asyncio.Lock()
        self._held: HeldContext[Session] | None = None
        self._session: Session | None = None
        self._nodes = 0
        self._stats: Stats | None = None

    @property
    def stats(self) -> Stats | None:
        """Of the last answer, also of one that was left early or broke off; None before the first."""
        return self._stats

    @property
    def history(self) -> Sequence[Message]:
        """Every message so far, an unfinished answer included as far as it was read."""
        return tuple(self._conversation.messages)

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template; without one turns are joined as a plain transcript."""
        return self._conversation.has_template

    async def stream(self, text: str, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Piece, None]:
        """Say something and hand out the answer as it becomes certain; a second call waits for the first.

        Leaving early ends the answer. What was handed out stays in the history, and the session stays open. If nothing
        was handed out, the turn is taken back. What the model thinks before it answers, where its template marks that,
        comes apart from the text, and is neither in the result's text nor in the history.

        Args:
            text: what the user says.
            options: fields of `client.Options`; those of `AsyncSwarm.chat` are the defaults.

        Raises:
            ConfigError: an option is not valid, or the model's template does not take the conversation.
            ContextFull: the conversation exceeds the model's context.
            RouteError: nobody serves some layers.
            GenerationInterrupted: the chain broke midway; the conversation can go on.
        """
        async with self._turn:
            self._conversation.add("user", text)
            pieces_read: list[str] = []
            is_over = False
            try:
                async with aclosing(relay(self._scope, self._answer({**self._defaults, **options}))) as pieces:
                    async for piece in pieces:
                        pieces_read.append(piece.text)
                        is_over = piece.result is not None
                        yield piece
            finally:
                if is_over or any(pieces_read):
                    self._conversation.add("assistant", "".join(pieces_read))
                else:
                    self._conversation.take_back()

    async def say(self, text: str, **options: Unpack[GenerateOptions]) -> Result:
        """Say something and return the whole answer; arguments and errors as in `stream`."""
        result = None
        async for piece in self.stream(text, **options):
            result = piece.result
        assert result is not None, "a stream ends with a result or an error"
        return result

    async def clear(self) -> None:
        """Begin again: forget every message but the system's."""
        async with self._turn:
            self._conversation.clear()

    async def close(self) -> None:
        """End the session; its KV is free everywhere."""
        held, self._held, self._session = self._held, None, None
        if held is not None:
            await held.close()

    async def __aenter__(self) -> Self:
        """Open nothing yet: the first turn opens the session."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session."""
        await self.close()

    async def _answer(self, options: GenerateOptions) -> AsyncGenerator[Piece, None]:
        """Run one turn; if the kept session has ended meanwhile, again in a new one."""
        plan = await asyncio.to_thread(self._conversation.plan)
        state = await self._generation(plan, options)
        session = self._fitting(state)
        if session is not None:
            try:
                async with aclosing(_parsed(session.run(state, self._note), plan.parser)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except GenerationInterrupted as error:
                await self.close()
                if error.tokens:
                    raise
            plan = await asyncio.to_thread(self._conversation.plan)
            state = await self._generation(plan, options)
        session = await self._open(state)
        try:
            async with aclosing(_parsed(session.run(state, self._note), plan.parser)) as pieces:
                async for piece in pieces:
                    yield piece
        except GenerationInterrupted:
            await self.close()
            raise

    def _note(self, stats: Stats) -> None:
        self._stats = stats

    async def _generation(self, plan: AnswerPlan, given: GenerateOptions) -> GenerationState:
        """Make the generation of the next answer; near the end of the context it gets the tokens that are left."""
        options = make_options(given)
        options = replace(options, stop=(*options.stop, *plan.stop), show=(*options.show, *plan.show))
        prompt, limit = plan.tokens, self._opener.target.max_positions
        if not prompt:
            raise ConfigError("say something: the prompt is empty")
        if limit is not None:
            if len(prompt) >= limit:
                raise ContextFull(
                    f"the conversation has {len(prompt)} tokens, the model's context {limit}; clear it and begin again"
                )
            options = replace(options, max_new_tokens=min(options.max_new_tokens, limit - len(prompt)))
        state = self._factory.make(prompt, options)
        await self._factory.check_grammar(state)
        return state

    def _fitting(self, state: GenerationState) -> Session | None:
        """The kept session, if this turn fits it."""
        needed = len(state.prompt) + state.max_new_tokens
        if self._session is None or needed > self._session.window_tokens or state.nodes > self._nodes:
            return None
        return self._session

    async def _open(self, state: GenerationState) -> Session:
        """A new session with room for later turns, if the nodes have that much."""
        await self.close()
        needed, limit = len(state.prompt) + state.max_new_tokens, self._opener.target.max_positions
        roomy = FIRST_WINDOW_TOKENS
        while roomy < 2 * needed:
            roomy *= 2
        roomy = max(needed, min(roomy, limit or roomy))
        try:
            return await self._hold(roomy, state)
        except Busy:
            if roomy == needed:
                raise
            return await self._hold(needed, state)

    async def _hold(self, window_tokens: int, state: GenerationState) -> Session:
        held: HeldContext[Session] = HeldContext(self._scope)
        session = await held.open(
            self._opener.open(window_tokens, state.nodes, Beginning(state.prompt, state.max_new_tokens))
        )
        self._held, self._session, self._nodes = held, session, state.nodes
        return session


async def _parsed(pieces: AsyncGenerator[Piece, None], parser: AnswerParser) -> AsyncGenerator[Piece, None]:
    """The pieces with what the model thinks apart from what it says."""
    said: list[str] = []
    async with aclosing(pieces):
        async for piece in pieces:
            deltas = parser.push(piece.text)
            if piece.result is not None:
                deltas += parser.finish()
            text, reasoning = _texts(deltas)
            said.append(text)
            result = None if piece.result is None else replace(piece.result, text="".join(said))
            yield replace(piece, text=text, reasoning=reasoning, result=result)


def _texts(deltas: Sequence[AnswerDelta]) -> tuple[str, str]:
    """What is said, and what is thought."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    return text, "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
