"""Ollama's dialect: chat, generate and what its clients ask of models. Owns no template and no queue."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from client.api.backend import ChatJob, Delta, Finished, Job, ModelCard, TextJob
from client.api.context import ApiContext, ModelContext
from client.api.errors import NOT_FOUND, ApiError, error_body, invalid, unsupported
from client.api.json_text import JsonObject, JsonRoute, arguments_object
from client.api.openai.chat import MAX_MESSAGES, MAX_TOOLS
from client.api.openai.fields import (
    ApiModel,
    RequestBody,
    Whole,
    asked_options,
    log_prob_entries,
    penalties,
    schema_grammar,
    stop_strings,
    written_time,
)
from client.api.request_fields import BodyKind, LeftOut
from client.api.writers import AnswerWriter, send_answer
from client.base.options import GenerateOptions, Grammar
from client.dialogue.messages import Message, Tool, ToolCall, ToolCallDelta

NS_PER_S: Final = 1e9

T = TypeVar("T")


class RunWriter(AnswerWriter):
    """Writes one answer.

    A call is written when it is whole: Ollama's clients take its arguments as an object.
    """

    def __init__(
        self,
        kind: Literal["chat", "generate"],
        model: str,
        clock: Callable[[], float],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        super().__init__(self._take_log_probs)
        self._kind = kind
        self._model = model
        self._clock = clock
        self._token_bytes = token_bytes
        self._call: ToolCall | None = None
        self._call_index = -1
        self._calls: list[JsonObject] = []
        self._texts: dict[str, list[str]] = {"content": [], "thinking": []}
        self._log_probs: list[JsonObject] = []

    def _take_log_probs(self, delta: Delta) -> list[JsonObject]:
        entries = log_prob_entries(delta.log_probs, self._token_bytes)
        self._log_probs += entries
        return entries

    def _write_content(self, text: str, entries: list[JsonObject]) -> Iterator[JsonObject]:
        yield from self._end_call()
        self._texts["content"].append(text)
        yield self._line(content=text, log_probs=entries)

    def _write_reasoning(self, text: str) -> Iterator[JsonObject]:
        yield from self._end_call()
        self._texts["thinking"].append(text)
        yield self._line(thinking=text)

    def finish(self, finished: Finished) -> Iterator[JsonObject]:
        yield from self._end_call()
        yield {**self._line(), **self._end(finished)}

    def whole(self, finished: Finished) -> JsonObject:
        line = self._line(
            content="".join(self._texts["content"]),
            thinking="".join(self._texts["thinking"]),
            calls=self._calls,
            log_probs=self._log_probs,
        )
        return {**line, **self._end(finished)}

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield error_body("ollama", error)

    def nothing(self, reason: str) -> JsonObject:
        """The answer to a request that only asks whether the model is there."""
        return {**self._line(), "done": True, "done_reason": reason}

    def _write_call(self, part: ToolCallDelta) -> Iterator[JsonObject]:
        if self._call is not None and part.index == self._call_index:
            self._call = ToolCall(self._call.id, self._call.name, self._call.arguments + part.arguments)
            return
        yield from self._end_call()
        self._call = ToolCall(part.id, part.name, part.arguments)
        self._call_index = part.index

    def _end_call(self) -> Iterator[JsonObject]:
        call, self._call = self._call, None
        if call is None:
            return
        function = {"index": self._call_index, "name": call.name, "arguments": arguments_object(call.arguments)}
        written = {"id": call.id, "function": function}
        self._calls.append(written)
        yield self._line(calls=[written])

    def _line(
        self,
        *,
        content: str = "",
        thinking: str = "",
        calls: list[JsonObject] | None = None,
        log_probs: list[JsonObject] | None = None,
    ) -> JsonObject:
        thought = {"thinking": thinking} if thinking else {}
        called = {"tool_calls": calls} if calls else {}
        if self._kind == "chat":
            said: JsonObject = {"message": {"role": "assistant", "content": content, **thought, **called}}
        else:
            said = {"response": content, **thought, **called}
        line = {"model": self._model, "created_at": written_time(self._clock()), **said, "done": False}
        return {**line, "logprobs": log_probs} if log_probs else line

    def _end(self, finished: Finished) -> JsonObject:
        stats = finished.result.stats
        first_s = min(stats.time_to_first_token_s, stats.total_s)
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            "total_duration": round(stats.total_s * NS_PER_S),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": round(first_s * NS_PER_S),
            "eval_count": stats.tokens,
            "eval_duration": round((stats.total_s - first_s) * NS_PER_S),
        }


OLLAMA_VERSION: Final = "0.12.6"
"""The release of Ollama whose API this is; clients ask for at least some version."""
TAG: Final = ":latest"
_PARAMETERS: Final = {"repetition_penalty": "repeat_penalty"}
"""Options that Ollama calls otherwise."""


def tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}{TAG}"


def listed(card: ModelCard) -> JsonObject:
    """The model in `/api/tags`. Its size is not known here: nobody holds it whole."""
    return {
        "name": tagged(card.id),
        "model": tagged(card.id),
        "modified_at": written_time(card.created),
        "size": 0,
        "digest": card.fingerprint,
        "details": details(card),
    }


def running(card: ModelCard, now_s: float) -> JsonObject:
    """The model in `/api/ps`; a swarm does not unload it."""
    described = listed(card)
    del described["modified_at"]
    expires_at = written_time(now_s + 24 * 3600)
    return {**described, "expires_at": expires_at, "size_vram": 0, "context_length": card.context_length}


def shown(card: ModelCard) -> JsonObject:
    """The answer of `/api/show`."""
    capabilities = ["completion", *(["tools"] if card.tool_family else [])]
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{_PARAMETERS.get(name, name)} {value}" for name, value in card.sampling.items()),
        "template": "",
        "license": "",
        "modified_at": written_time(card.created),
        "details": details(card),
        "model_info": {
            "general.architecture": "canopy",
            "general.basename": card.id,
            "canopy.context_length": card.context_length,
        },
        "capabilities": capabilities,
    }


def details(card: ModelCard) -> JsonObject:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "canopy",
        "families": ["canopy"],
        "parameter_size": "",
        "quantization_level": "",
    }


USUAL: Final = GenerateOptions(temperature=0.8, top_k=40, top_p=0.9)
"""What Ollama takes where neither a request nor a model says."""


class RunOptions(RequestBody):
    """`options`."""

    body = BodyKind.OLLAMA_OPTIONS

    model_config = ConfigDict(strict=False)  # its clients send 20.0 for 20

    num_predict: int | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class RunRequest(RequestBody):
    """What chat and generate share."""

    model: str
    stream: bool | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: RunOptions | None = None
    think: bool | Literal["high", "medium", "low", "max"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether lines are sent as they come, which is so unless it is refused."""
        return self.stream is not False


class CallFunction(ApiModel):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ChatCall(ApiModel):
    """A call of an assistant's message."""

    id: str | None = None
    function: CallFunction


class ChatTurn(ApiModel):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ChatCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(ApiModel):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=r"^[\w.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(ApiModel):
    """A tool."""

    type: str = "function"
    function: ToolFunction | None = None


class ChatRunRequest(RunRequest):
    """Of `/api/chat`; no messages ask whether the model is there."""

    body = BodyKind.OLLAMA_CHAT

    messages: list[ChatTurn] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[ChatTool] | None = Field(default=None, max_length=MAX_TOOLS)


class GenerateRequest(RunRequest):
    """Of `/api/generate`; no prompt asks whether the model is there."""

    body = BodyKind.OLLAMA_GENERATE

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


def chat_job(request: ChatRunRequest) -> ChatJob:
    """The job of a chat.

    Raises:
        ApiError: a function is missing.
    """
    left_out = LeftOut()
    tools = []
    for place, tool in enumerate(request.tools or ()):
        spec = tool.function
        if tool.type != "function":
            left_out.tool(tool.type)
        elif spec is None:
            raise invalid(f"tools[{place}].function is missing", f"tools[{place}].function")
        else:
            tools.append(Tool(spec.name, spec.description or "", spec.parameters or {}))
    messages = tuple(_messages(request.messages, left_out))
    return ChatJob(
        messages=messages,
        options=_options(request),
        tools=tuple(tools),
        reasoning=_reasoning(request),
        continues=request.messages[-1].role == "assistant",
        left_out=left_out.words,
        defaults=USUAL,
    )


def generate_job(request: GenerateRequest, card: ModelCard) -> Job:
    """The job of a prompt: a turn of the user in the model's template, or the text itself.

    A model without a template continues the text.

    Raises:
        ApiError: a field asks for what is not served.
    """
    left_out = LeftOut()
    prompt = _with_images(request.prompt, request.images, left_out)
    if request.raw:
        if request.system:
            raise invalid("raw mode does not support template, system, or context", "raw")
        return TextJob(prompt, _options(request), USUAL)
    if not card.has_template:
        if request.system:
            raise unsupported("system", f"{card.id} has no chat template, which system needs")
        return TextJob(prompt, _options(request), USUAL)
    system = [Message("system", request.system)] if request.system else []
    messages = (*system, Message("user", prompt))
    reasoning = _reasoning(request)
    return ChatJob(messages, _options(request), reasoning=reasoning, left_out=left_out.words, defaults=USUAL)


def _reasoning(request: RunRequest) -> bool | None:
    return None if request.think is None else request.think is not False


def _options(request: RunRequest) -> GenerateOptions:
    given = request.options or RunOptions()
    return asked_options(
        max_new_tokens=given.num_predict if given.num_predict and given.num_predict > 0 else None,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=given.seed if given.seed is not None and given.seed >= 0 else None,
        stop=stop_strings(given.stop),
        **penalties(
            given.repeat_last_n,
            given.repeat_penalty,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
        ),
        grammar=_grammar(request.format),
        log_probs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def _grammar(text_format: str | dict[str, Any] | None) -> Grammar | None:
    if not text_format:
        return None
    return Grammar("json") if isinstance(text_format, str) else schema_grammar(text_format)


def _messages(turns: Sequence[ChatTurn], left_out: LeftOut) -> list[Message]:
    """Messages whose calls and results are joined by ids, which old clients do not send."""
    messages: list[Message] = []
    pending: list[ToolCall] = []
    made = 0
    for turn in turns:
        content = _with_images(turn.content or "", turn.images, left_out)
        if turn.role == "tool":
            answered = _take_pending(pending, turn)
            name = turn.tool_name or answered.name
            messages.append(Message("tool", content, tool_call_id=answered.id, name=name))
            continue
        calls = []
        for call in turn.tool_calls or ():
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append(ToolCall(call.id or f"call_{made}", call.function.name, arguments))
            made += 1
        pending += calls
        messages.append(Message(turn.role, content, reasoning=turn.thinking or "", tool_calls=tuple(calls)))
    return messages


def _take_pending(pending: list[ToolCall], turn: ChatTurn) -> ToolCall:
    """The call that a result answers: by its id, else by its name, else the first that has no result yet."""
    for call in pending:
        if turn.tool_call_id == call.id or (turn.tool_call_id is None and turn.tool_name in (None, call.name)):
            pending.remove(call)
            return call
    return ToolCall(turn.tool_call_id or "", turn.tool_name or "", "")


def _with_images(text: str, images: Sequence[str] | None, left_out: LeftOut) -> str:
    """A text with a word for each image that comes with it."""
    return "\n".join(filter(None, (text, *(left_out.part("image") for _ in images or ()))))


REFUSED: Final = {
    "/api/embed": "embeddings are not served",
    "/api/embeddings": "embeddings are not served",
    "/api/create": "models are not made here: the swarm serves them",
    "/api/copy": "models are not copied here: the swarm serves them",
    "/api/pull": "models are not pulled here: the swarm serves them",
    "/api/push": "models are not pushed from here: the swarm serves them",
    "/api/delete": "models are not deleted here: the swarm serves them",
}
"""Paths of Ollama's that change or embed, and why they are refused."""


class ShowRequest(ApiModel):
    """Of `/api/show`; older clients say `name`."""

    model: str | None = None
    name: str | None = None


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["Ollama"], route_class=JsonRoute)
    service = _Ollama(context)
    router.post("/api/chat", response_model=None, summary="Chat")(service.chat)
    router.post("/api/generate", response_model=None, summary="Generate")(service.generate)
    router.get("/api/tags", response_model=None, summary="Models")(service.tags)
    router.get("/api/ps", response_model=None, summary="Running models")(service.ps)
    router.post("/api/show", response_model=None, summary="The model")(service.show)
    router.get("/api/version", response_model=None, summary="Version")(_version)
    for path in REFUSED:
        router.add_api_route(path, _refuse, methods=["POST", "DELETE"], include_in_schema=False)
    return router


class _Ollama:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def chat(self, body: ChatRunRequest, request: Request) -> Response:
        """Answer a conversation; without messages, say that the model is there."""
        asked = await self._of(body.model)
        writer = self._writer("chat", body, asked)
        if not body.messages:
            return JSONResponse(writer.nothing(_nothing_done(body)))
        return await self._answer(asked, chat_job(body), body, writer, request)

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt or go on with a text; without a prompt, say that the model is there."""
        asked = await self._of(body.model)
        job = generate_job(body, asked.card)
        writer = self._writer("generate", body, asked)
        if not body.prompt:
            return JSONResponse(writer.nothing(_nothing_done(body)))
        return await self._answer(asked, job, body, writer, request)

    async def tags(self) -> Response:
        """Every model, the first by each of its names."""
        return JSONResponse({"models": [listed(card) for card in await self._context.cards()]})

    async def ps(self) -> Response:
        """The models that are open and of which every layer is served."""
        now = self._context.settings.clock()
        cards = [card for card in await self._context.models.cards() if card.is_complete and card.is_open]
        return JSONResponse({"models": [running(card, now) for card in cards]})

    async def show(self, body: ShowRequest) -> Response:
        return JSONResponse(shown(await self._found(self._context.card, body.model or body.name or "")))

    async def _of(self, name: str) -> ModelContext:
        return await self._found(self._context.of, name)

    async def _found(self, find: Callable[[str], Awaitable[T]], name: str) -> T:
        """What is found by a name, which Ollama's clients give a tag.

        Raises:
            ApiError: there is no such model (404), in Ollama's words.
        """
        settings = self._context.settings
        unknown = ApiError(404, f"model '{name[:200]}' not found", code=NOT_FOUND)
        if not name and not settings.any_model:
            raise unknown
        try:
            return await find(name if name in settings.aliases else name.removesuffix(TAG))
        except ApiError as error:
            raise unknown if error.code == NOT_FOUND else error from None

    def _writer(self, kind: Literal["chat", "generate"], body: RunRequest, asked: ModelContext) -> RunWriter:
        return RunWriter(kind, body.model, self._context.settings.clock, asked.backend.token_bytes)

    async def _answer(
        self, asked: ModelContext, job: Job, body: RunRequest, writer: RunWriter, request: Request
    ) -> Response:
        return await send_answer(asked, job, request, writer, stream="lines" if body.is_streamed else None)


async def _version() -> Response:
    """The release of Ollama whose API this is."""
    return JSONResponse({"version": OLLAMA_VERSION})


async def _refuse(request: Request) -> Response:
    raise ApiError(501, REFUSED[request.scope["path"]])


def _nothing_done(body: RunRequest) -> str:
    return "unload" if body.keep_alive in (0, "0", "0s") else "load"
