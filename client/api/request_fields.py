"""Every field that a request may have, of whom it is, and what becomes of it. The table is the only place that says so.

The requests' models read what is honoured; `take_fields` refuses the rest by name or notes that it was left out;
docs/reference/api-dialects.md is made from it (`tools.request_fields`). Owns no route and no model of a body.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any, Final

from starlette.types import Scope

from client.api.errors import unsupported

logger = logging.getLogger(__name__)

HEADER: Final = "canopy-left-out"
SCOPE: Final = "canopy.left_out"
"""Where the words of a request stand in its scope: a list that the guard puts there, and makes a header of."""
MAX_WORDS: Final = 16
"""Kinds that one answer names, at most."""
MAX_LOGGED: Final = 64
"""Kinds that the log names, at most, in the life of a server: each once."""
_NAMES: Final = {
    "image": "an image",
    "screenshot": "an image",
    "audio": "a recording",
    "video": "a video",
    "document": "a document",
    "file": "a file",
}


class LeftOut:
    def __init__(self) -> None:
        self._words: dict[str, None] = {}

    @property
    def words(self) -> tuple[str, ...]:
        """Each kind once, such as `tool web_search`."""
        return tuple(self._words)

    def tool(self, kind: str) -> None:
        self._add("tool", kind)

    def item(self, kind: str) -> None:
        self._add("item", kind)

    def part(self, kind: str) -> str:
        """A part that is no text; the value is what the model reads in its place."""
        self._add("part", kind)
        name = next((name for word, name in _NAMES.items() if word in kind), "something that is no text")
        return f"[Here was {name}; this model reads text only.]"

    def _add(self, place: str, kind: str) -> None:
        if len(self._words) < MAX_WORDS:
            self._words[f"{place} {re.sub(r'[^A-Za-z0-9_.-]', '?', kind[:40])}"] = None


class LeftOutLog:
    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, words: Iterable[str], scope: Scope) -> None:
        """Note the words of one request, for its header and the log."""
        words = list(words)
        scope[SCOPE] += words
        new = [word for word in words if word not in self._said]
        if new and len(self._said) < MAX_LOGGED:
            self._said.update(new)
            logger.info("requests go without: %s", ", ".join(new))


def header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header that says what a request goes without; none where it has everything."""
    words = scope[SCOPE]
    return [(HEADER.encode(), ", ".join(words).encode())] if words else []


MAX_LEFT_OUT: Final = 32
"""Names in that header, at most."""
_NAME: Final = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


class Handling(Enum):
    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


class BodyKind(Flag):
    """The objects of JSON that have fields: a request of each kind, and the options inside Ollama's."""

    CHAT = auto()
    COMPLETIONS = auto()
    RESPONSES = auto()
    MESSAGES = auto()
    OLLAMA_CHAT = auto()
    OLLAMA_GENERATE = auto()
    OLLAMA_OPTIONS = auto()


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field.

    Attributes:
        note: what it does here; of a refused one, what to do instead.
        neutral: values of a refused field that ask for nothing, beside null.
    """

    name: str
    handling: Handling
    bodies: BodyKind
    source: str
    note: str = ""
    neutral: tuple[Any, ...] = ()


_TEXTS: Final = BodyKind.CHAT | BodyKind.COMPLETIONS
_OPENAI: Final = _TEXTS | BodyKind.RESPONSES
_OLLAMA: Final = BodyKind.OLLAMA_CHAT | BodyKind.OLLAMA_GENERATE
_PATHS: Final = _OPENAI | BodyKind.MESSAGES | _OLLAMA


def _honoured(bodies: BodyKind, source: str, **notes: str) -> list[RequestField]:
    return [RequestField(name, Handling.HONOURED, bodies, source, note) for name, note in notes.items()]


def _ignored(bodies: BodyKind, source: str, note: str, *names: str) -> list[RequestField]:
    return [RequestField(name, Handling.IGNORED, bodies, source, note) for name in names]


def _refused(bodies: BodyKind, source: str, name: str, note: str, *neutral: object) -> RequestField:
    return RequestField(name, Handling.REFUSED, bodies, source, note, neutral)


_ONE_CONSTRAINT: Final = "what the text must match; one such field at a time"

FIELDS: Final[tuple[RequestField, ...]] = (
    # What is said, and to whom
    *_honoured(_PATHS, "", model="the swarm's, one of its aliases, or left out"),
    *_honoured(_PATHS, "", stream="whether the answer comes as it grows; Ollama's does unless `false`"),
    *_honoured(BodyKind.CHAT, "OpenAI", messages="texts; a word stands in the place of other parts"),
    *_honoured(
        BodyKind.MESSAGES,
        "Anthropic",
        messages="`text`, `thinking`, `tool_use`, `tool_result`, `search_result`, `document` of "
        "plain text; an answer goes on with a last message of the assistant's",
        system="a text, or blocks of text",
    ),
    *_honoured(
        BodyKind.OLLAMA_CHAT,
        "Ollama",
        messages="`role`, `content`, `thinking`, `tool_calls`, `tool_name`, `tool_call_id`",
    ),
    *_honoured(
        BodyKind.RESPONSES,
        "OpenAI",
        input="a text, or items: `message`, `reasoning`, `function_call`, `custom_tool_call`, their outputs, and "
        "calls of other tools with a `call_id`, which the model reads as calls of that name; `item_reference` is "
        "refused",
        instructions="the system prompt; not carried to the next response",
        previous_response_id="goes on after a stored response of the same key",
        store="`false` keeps nothing",
        truncation="`auto` leaves out the oldest turns, whole, until the prompt fits; system messages and the last "
        "turn stay",
        metadata="comes back",
        user="comes back",
    ),
    *_honoured(BodyKind.COMPLETIONS, "OpenAI", prompt="texts, or token ids", echo="the prompt comes first"),
    *_honoured(
        BodyKind.OLLAMA_GENERATE,
        "Ollama",
        prompt="a turn of the user; without a template the text itself",
        system="the system prompt",
        raw="goes on with the text itself",
        images="a word stands in the prompt for each",
    ),
    *_honoured(_OLLAMA, "Ollama", options="below", keep_alive="0 says `unload`; a swarm does not unload its model"),
    *_honoured(BodyKind.CHAT, "vLLM", continue_final_message="goes on with a last message of the assistant's"),
    *_honoured(BodyKind.CHAT, "vLLM", add_generation_prompt="`false` only beside `continue_final_message`"),
    # How long, how many
    *_honoured(
        _TEXTS,
        "OpenAI",
        max_tokens="a limit; the answer ends where the context does, also for -1",
        n="up to 128 answers, each with a seed of its own",
        stream_options="`include_usage`",
    ),
    *_honoured(BodyKind.CHAT, "OpenAI", max_completion_tokens="the same as `max_tokens`, and counts before it"),
    *_honoured(_TEXTS, "llama.cpp", n_predict="the same as `max_tokens`"),
    *_honoured(BodyKind.RESPONSES, "OpenAI", max_output_tokens="a limit; the answer ends where the context does"),
    *_honoured(BodyKind.MESSAGES, "Anthropic", max_tokens="a limit, required; the answer ends where the context does"),
    *_honoured(BodyKind.OLLAMA_OPTIONS, "Ollama", num_predict="a limit; 0 and less are none"),
    *_honoured(BodyKind.COMPLETIONS, "OpenAI", best_of="the same as `n`, or it is refused"),
    # How tokens are picked
    *_honoured(
        _OPENAI | BodyKind.MESSAGES | BodyKind.OLLAMA_OPTIONS,
        "",
        temperature="0 is greedy",
        top_p="0 leaves the best token",
        top_k="0 and -1 are all",
    ),
    *_honoured(
        _OPENAI | BodyKind.OLLAMA_OPTIONS, "vLLM, llama.cpp, Ollama", min_p="at least so much of the best token's"
    ),
    *_honoured(
        _OPENAI | BodyKind.OLLAMA_OPTIONS,
        "OpenAI, Ollama",
        seed="the same seed gives the same text",
        stop="a text or several",
        frequency_penalty="-2 to 2",
        presence_penalty="-2 to 2",
    ),
    *_honoured(_OPENAI, "vLLM", repetition_penalty="of all tokens so far, those of the prompt too"),
    *_honoured(
        _TEXTS | BodyKind.OLLAMA_OPTIONS,
        "llama.cpp, Ollama",
        repeat_penalty="the same as `repetition_penalty`",
        repeat_last_n="-1: penalties count all tokens; 0 turns them off; other numbers are refused beside a penalty",
    ),
    *_honoured(BodyKind.MESSAGES, "Anthropic", stop_sequences="up to 64"),
    *_honoured(_TEXTS, "OpenAI", logit_bias="up to 1,024 token ids, -100 to 100"),
    *_honoured(
        _OPENAI,
        "vLLM",
        stop_token_ids="ids that end the text beside the model's own",
        ignore_eos="the model's own ends of text end nothing",
    ),
    *_honoured(_TEXTS, "Canopy", canopy="`nodes`, `multistep`, `trace`; the answer tells its speed and its hops"),
    # What the text must be
    *_honoured(_TEXTS, "OpenAI", response_format="`text`, `json_object`, `json_schema`; a schema always holds"),
    *_honoured(
        BodyKind.RESPONSES, "OpenAI", text="`format`: `text`, `json_object`, `json_schema`; `verbosity` is ignored"
    ),
    *_honoured(
        BodyKind.MESSAGES,
        "Anthropic",
        output_config="`format`: `json_schema`; `effort` is ignored",
        output_format="the older name of `output_config.format`",
    ),
    *_honoured(_OLLAMA, "Ollama", format="`json`, or a schema"),
    *_honoured(
        _OPENAI,
        "vLLM",
        guided_json=_ONE_CONSTRAINT,
        guided_regex=_ONE_CONSTRAINT,
        guided_choice=_ONE_CONSTRAINT,
        guided_grammar="in Lark or GBNF; one such field at a time",
        structured_outputs="`json`, `json_object`, `regex`, `choice`, `grammar`; its others are refused",
    ),
    *_honoured(_OPENAI, "llama.cpp", grammar="in GBNF or Lark; one such field at a time", json_schema=_ONE_CONSTRAINT),
    # Tools and thoughts
    *_honoured(
        BodyKind.CHAT,
        "OpenAI",
        tools="functions; `strict` makes the arguments follow their schema",
        tool_choice="`auto`, `none`, `required`, a function, `allowed_tools`",
    ),
    *_honoured(
        BodyKind.RESPONSES,
        "OpenAI",
        tools="`function`, where `strict` makes the arguments follow their schema; `custom`, which takes a text and "
        "holds to its `regex`, or to its `lark` grammar where no rule leads back to itself; `namespace`",
        tool_choice="`auto`, `none`, `required`, a function, a custom tool, `allowed_tools`",
    ),
    *_honoured(BodyKind.CHAT | BodyKind.RESPONSES, "OpenAI", parallel_tool_calls="`false`: one call at most"),
    *_honoured(
        BodyKind.MESSAGES,
        "Anthropic",
        tools="with `input_schema`; those that Anthropic defines are left out",
        tool_choice="`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`",
        thinking="`enabled` on, `disabled` off, others leave it to the model; the budget is not kept; "
        "`display: omitted` hides the text",
    ),
    *_honoured(BodyKind.OLLAMA_CHAT, "Ollama", tools="functions; a call comes whole, with its arguments as an object"),
    *_honoured(BodyKind.CHAT, "OpenAI", reasoning_effort="`none` and `minimal` turn thinking off, others on"),
    *_honoured(BodyKind.CHAT, "vLLM", chat_template_kwargs="`enable_thinking`, `thinking`; others are refused"),
    *_honoured(
        BodyKind.RESPONSES,
        "OpenAI",
        reasoning="`effort`: `none` and `minimal` turn thinking off, others on; `summary` is ignored",
    ),
    *_honoured(_OLLAMA, "Ollama", think="on, off, or a level, which means on"),
    # What else is told
    *_honoured(BodyKind.CHAT, "OpenAI", logprobs="of each token", top_logprobs="up to 20 beside each"),
    *_honoured(BodyKind.COMPLETIONS, "OpenAI", logprobs="of each token and up to 5 beside it"),
    *_honoured(BodyKind.RESPONSES, "OpenAI", top_logprobs="up to 20 beside each token"),
    *_honoured(
        BodyKind.RESPONSES,
        "OpenAI",
        include="`message.output_text.logprobs`; `reasoning.encrypted_content` adds nothing",
    ),
    *_honoured(_OLLAMA, "Ollama", logprobs="of each token", top_logprobs="up to 20 beside each"),
    # Ignored: the text is the same
    *_ignored(_OPENAI, "OpenAI", "nobody else is told", "safety_identifier"),
    *_ignored(_TEXTS, "OpenAI", "nobody else is told", "user", "metadata"),
    *_ignored(BodyKind.CHAT, "OpenAI", "nothing is stored", "store"),
    *_ignored(BodyKind.CHAT, "OpenAI", "the model decides", "verbosity"),
    *_ignored(BodyKind.CHAT, "OpenAI", "changes the speed alone", "prediction"),
    *_ignored(
        _OPENAI,
        "OpenAI",
        "prompts are reused anyway, inside one key",
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    ),
    *_ignored(_OPENAI | BodyKind.MESSAGES, "OpenAI, Anthropic", "the queue is fair between keys", "service_tier"),
    *_ignored(BodyKind.RESPONSES, "OpenAI", "no tool runs here", "max_tool_calls"),
    *_ignored(BodyKind.RESPONSES, "OpenAI", "nothing is padded", "stream_options"),
    *_ignored(BodyKind.RESPONSES, "OpenAI", "about images", "image"),
    *_ignored(BodyKind.RESPONSES, "OpenAI", "about OpenAI's own service", "access_programs", "client_metadata"),
    *_ignored(BodyKind.RESPONSES, "OpenAI", "`background` is refused", "background_options"),
    *_ignored(
        BodyKind.RESPONSES | BodyKind.MESSAGES, "OpenAI, Anthropic", "turns stay as they are sent", "context_management"
    ),
    *_ignored(BodyKind.MESSAGES, "Anthropic", "nobody else is told", "metadata", "user_profile_id", "workspace_id"),
    *_ignored(
        BodyKind.MESSAGES, "Anthropic", "prompts are reused anyway, inside one key", "cache_control", "diagnostics"
    ),
    *_ignored(
        BodyKind.MESSAGES,
        "Anthropic",
        "about Anthropic's own service",
        *("betas", "inference_geo", "speed", "billing_policy", "fallback_credit_token", "fallbacks"),
    ),
    *_ignored(_OPENAI, "vLLM", "prompts are reused inside one key alone", "cache_salt"),
    *_ignored(_OPENAI, "vLLM", "about vLLM's own engine", "priority", "request_id", "guided_decoding_backend"),
    *_ignored(_OPENAI, "vLLM", "about slow tokenizers", "spaces_between_special_tokens"),
    *_ignored(_OPENAI, "vLLM", "about images", "media_io_kwargs", "mm_processor_kwargs"),
    *_ignored(
        _TEXTS,
        "llama.cpp",
        "about llama.cpp's own engine",
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "return_progress", "timings_per_token"),
        *("speculative.n_max", "speculative.n_min", "speculative.p_min", "backend_sampling"),
    ),
    *_ignored(
        _TEXTS | BodyKind.OLLAMA_OPTIONS,
        "llama.cpp, Ollama",
        "counts only beside a field that is refused",
        *("mirostat_tau", "mirostat_eta"),
    ),
    *_ignored(
        _TEXTS,
        "llama.cpp",
        "counts only beside a field that is refused",
        *("dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("xtc_threshold", "adaptive_decay"),
    ),
    *_ignored(
        BodyKind.OLLAMA_OPTIONS,
        "Ollama",
        "about Ollama's own engine",
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_gqa", "num_thread", "num_keep", "numa", "low_vram"),
        *("f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
    ),
    *_ignored(_OLLAMA, "Ollama", "a prompt that exceeds the context is refused", "truncate", "shift"),
    # Refused: the answer would be another one
    _refused(BodyKind.CHAT, "OpenAI", "audio", "this server writes text alone"),
    _refused(BodyKind.CHAT, "OpenAI", "modalities", "this server writes text alone", ["text"]),
    _refused(BodyKind.CHAT, "OpenAI", "functions", "use `tools`"),
    _refused(BodyKind.CHAT, "OpenAI", "function_call", "use `tool_choice`"),
    _refused(BodyKind.CHAT, "OpenAI", "web_search_options", "this server searches nothing"),
    _refused(BodyKind.CHAT | BodyKind.RESPONSES, "OpenAI", "moderation", "this server moderates nothing"),
    _refused(BodyKind.COMPLETIONS, "OpenAI", "suffix", "texts go on; gaps in them are not filled", ""),
    _refused(BodyKind.RESPONSES, "OpenAI", "background", "answers come while one waits", False),
    _refused(BodyKind.RESPONSES, "OpenAI", "conversation", "use `previous_response_id`"),
    _refused(BodyKind.RESPONSES, "OpenAI", "prompt", "use `instructions` and `input`"),
    _refused(BodyKind.MESSAGES, "Anthropic", "container", "there are no containers"),
    _refused(BodyKind.MESSAGES, "Anthropic", "mcp_servers", "call them from the client", []),
    _refused(BodyKind.MESSAGES, "Anthropic", "compaction", "turns stay as they are sent"),
    _refused(BodyKind.MESSAGES, "Anthropic", "thread", "send the whole conversation"),
    _refused(BodyKind.OLLAMA_GENERATE, "Ollama", "suffix", "the model does not support insert", ""),
    _refused(BodyKind.OLLAMA_GENERATE, "Ollama", "template", "the model's own is used; `raw` takes a whole prompt", ""),
    _refused(BodyKind.OLLAMA_GENERATE, "Ollama", "context", "/api/chat takes the messages so far", []),
    *(
        _refused(BodyKind.OLLAMA_GENERATE, "Ollama", name, "it makes no images", 0)
        for name in ("width", "height", "steps")
    ),
    _refused(_OLLAMA, "Ollama", "_debug_render_only", "answers only", False),
    _refused(_OPENAI, "vLLM", "min_tokens", "use `ignore_eos` with `max_tokens`", 0),
    _refused(_OPENAI, "vLLM", "use_beam_search", "tokens are picked one by one", False),
    _refused(_OPENAI, "vLLM", "length_penalty", "there are no beams", 1),
    _refused(_OPENAI, "vLLM", "early_stopping", "there are no beams", False),
    _refused(_OPENAI, "vLLM", "prompt_logprobs", "those of a prompt are not known"),
    _refused(_OPENAI, "vLLM", "allowed_token_ids", "use a grammar"),
    _refused(_OPENAI, "vLLM", "bad_words", "use `logit_bias`", []),
    _refused(_OPENAI, "vLLM", "skip_special_tokens", "special tokens are never shown", True),
    _refused(_OPENAI, "vLLM", "include_stop_str_in_output", "a text ends before its stop string", False),
    _refused(_OPENAI, "vLLM", "truncate_prompt_tokens", "send a shorter prompt"),
    _refused(BodyKind.CHAT, "vLLM", "add_special_tokens", "the template writes them", False),
    _refused(BodyKind.COMPLETIONS, "vLLM", "add_special_tokens", "send token ids", True),
    _refused(BodyKind.CHAT, "vLLM", "echo", "the conversation is not repeated", False),
    _refused(BodyKind.CHAT, "vLLM", "documents", "write them into the messages", []),
    _refused(BodyKind.CHAT, "vLLM", "chat_template", "the model's own is used"),
    _refused(BodyKind.CHAT, "vLLM", "include_reasoning", "thoughts always come, apart from the text", True),
    _refused(_OPENAI, "vLLM", "thinking_token_budget", "turn thinking off with `reasoning_effort`"),
    _refused(_OPENAI, "vLLM", "guided_whitespace_pattern", "JSON is written without blanks"),
    _refused(_OPENAI, "vLLM", "structural_tag", "use `tools` with `strict`"),
    _refused(_OPENAI, "vLLM", "logits_processors", "code of others is not run", []),
    _refused(_OPENAI, "vLLM", "repetition_detection", "use a penalty"),
    _refused(_OPENAI, "vLLM", "return_tokens_as_token_ids", "tokens come as text and bytes", False),
    _refused(_OPENAI, "vLLM", "return_token_ids", "tokens come as text and bytes", False),
    _refused(_OPENAI, "vLLM", "kv_transfer_params", "the swarm moves its own caches"),
    _refused(_OPENAI, "vLLM", "vllm_xargs", "nobody here reads them", {}),
    _refused(_TEXTS | BodyKind.OLLAMA_OPTIONS, "llama.cpp, Ollama", "mirostat", "use `top_p` or `min_p`", 0),
    _refused(_TEXTS | BodyKind.OLLAMA_OPTIONS, "llama.cpp, Ollama", "typical_p", "use `top_p` or `min_p`", 1),
    _refused(_TEXTS | BodyKind.OLLAMA_OPTIONS, "llama.cpp, Ollama", "tfs_z", "use `top_p` or `min_p`", 1),
    _refused(_TEXTS, "llama.cpp", "penalize_nl", "penalties count every token", True),
    _refused(BodyKind.OLLAMA_OPTIONS, "Ollama", "penalize_newline", "penalties count every token", True),
    *(
        _refused(BodyKind.OLLAMA_OPTIONS, "Ollama", name, "positions are the model's own", 0)
        for name in ("rope_frequency_base", "rope_frequency_scale")
    ),
    _refused(_TEXTS, "llama.cpp", "typ_p", "use `top_p` or `min_p`", 1),
    _refused(_TEXTS, "llama.cpp", "dynatemp_range", "use `temperature`", 0),
    _refused(_TEXTS, "llama.cpp", "dry_multiplier", "use `repeat_penalty`", 0),
    _refused(_TEXTS, "llama.cpp", "xtc_probability", "use `temperature`", 0),
    _refused(_TEXTS, "llama.cpp", "top_n_sigma", "use `min_p`", -1, 0),
    _refused(_TEXTS, "llama.cpp", "adaptive_target", "use `temperature`", -1),
    _refused(_TEXTS, "llama.cpp", "samplers", "the order is penalties, temperature, `top_k`, `top_p`, `min_p`"),
    _refused(_TEXTS, "llama.cpp", "min_keep", "one token is always kept", 0, 1),
    _refused(_TEXTS, "llama.cpp", "n_cmpl", "use `n`", 1),
    _refused(_TEXTS, "llama.cpp", "n_probs", "use `logprobs`", 0),
    _refused(_TEXTS, "llama.cpp", "post_sampling_probs", "log-probabilities are the model's", False),
    _refused(_TEXTS, "llama.cpp", "n_indent", "use a grammar", 0),
    _refused(_TEXTS, "llama.cpp", "t_max_predict_ms", "close the connection", 0, -1),
    _refused(_TEXTS, "llama.cpp", "t_max_prompt_ms", "close the connection", 0, -1),
    _refused(_TEXTS, "llama.cpp", "image_data", "the model reads text only", []),
    _refused(_TEXTS, "llama.cpp", "lora", "the weights are the swarm's", []),
    _refused(_TEXTS, "llama.cpp", "return_tokens", "tokens come as text and bytes", False),
    _refused(_TEXTS, "llama.cpp", "response_fields", "answers come whole", []),
    _refused(_TEXTS, "llama.cpp", "grammar_lazy", "a grammar holds from the first token", False),
    _refused(_TEXTS, "llama.cpp", "grammar_triggers", "a grammar holds from the first token", []),
    _refused(_TEXTS, "llama.cpp", "preserved_tokens", "special tokens are never shown", []),
    _refused(
        _TEXTS, "llama.cpp", "reasoning_format", "thoughts always come apart", "auto", "deepseek", "deepseek-legacy"
    ),
    _refused(_TEXTS, "llama.cpp", "thinking_forced_open", "the template decides", False),
    _refused(_TEXTS, "llama.cpp", "parse_tool_calls", "calls always come apart", True),
    *(
        _refused(_TEXTS, "llama.cpp", name, "turn thinking off with `reasoning_effort`", -1)
        for name in ("reasoning_budget", "reasoning_budget_tokens")
    ),
    _refused(_TEXTS, "llama.cpp", "system_prompt", "send a message of the system", ""),
)
"""All of them; of each body a name stands once."""

_OF_BODY: Final[Mapping[BodyKind, Mapping[str, RequestField]]] = {
    body: {field.name: field for field in FIELDS if body in field.bodies} for body in BodyKind
}
_TELL: Final = frozenset({"include", "keep_alive", "metadata", "store", "stream_options", "user"})
"""Names that are honoured somewhere and change no text."""
_CHANGES: Final = frozenset(field.name for field in FIELDS if field.handling is not Handling.IGNORED) - _TELL
"""Names that change the answer somewhere."""
_FORGIVING: Final = _OLLAMA | BodyKind.OLLAMA_OPTIONS
"""Bodies whose service passes over what stands in the wrong place."""


def fields_of(body: BodyKind) -> Mapping[str, RequestField]:
    """The fields that one body may have, by their names."""
    return _OF_BODY[body]


_left_out: ContextVar[list[str] | None] = ContextVar("left_out", default=None)


@contextmanager
def noting_left_out() -> Iterator[list[str]]:
    """Gather what `note_left_out` is told of one request."""
    names: list[str] = []
    token = _left_out.set(names)
    try:
        yield names
    finally:
        _left_out.reset(token)


def note_left_out(name: str) -> None:
    """Say in the header of the answer that a field of the request, such as `text.verbosity`, was left out."""
    names = _left_out.get()
    if names is not None and len(names) < MAX_LEFT_OUT and name not in names and _NAME.fullmatch(name):
        names.append(name)
        logger.info("a request's field %s is ignored", name)


def take_fields(body: BodyKind, value: object) -> None:
    """Check the fields of a request's object before its model reads it, and note what is left out.

    A name that nobody knows is left out, as vLLM, llama.cpp and Ollama do. One that changes answers elsewhere is not.

    Raises:
        ApiError: a field asks for what is not served; `param` names it.
    """
    if not isinstance(value, dict):
        return
    known = _OF_BODY[body]
    for name, given in value.items():
        field = known.get(name)
        if given is None or (field is not None and field.handling is Handling.HONOURED):
            continue
        if field is None and name in _CHANGES and not body & _FORGIVING:
            raise unsupported(name, f"'{name}' is not supported here.")
        if field is not None and field.handling is Handling.REFUSED:
            if not _asks_nothing(given, field):
                instead = field.note.replace("`", "'")
                raise unsupported(name, f"'{name}' is not supported: {instead}.")
            continue
        note_left_out(name)


def _asks_nothing(given: object, field: RequestField) -> bool:
    """Whether a value of a refused field is one of its neutral ones; `true` is no 1 here."""
    return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in field.neutral)
