"""What several dialects' requests and answers share: sampling fields, usage, log-probabilities. Owns no route."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from client.api.backend import Finished, ModelCard
from client.api.errors import invalid, missing
from client.api.json_text import read_json
from client.api.request_fields import BodyKind, take_fields
from client.base.options import GenerateOptions, Grammar
from client.base.stats import Result, TokenLogProbs
from swarm.protocol.pick_rules import MAX_END_TOKENS, MAX_GRAMMAR_BYTES

SEEDS: Final = 2**63
"""There are so many; what is asked for beyond them wraps."""
BEST_ONLY: Final = 1e-9
"""A `top_p` that leaves the best token alone, as 0 means it."""
MAX_RULES: Final = 256
"""Rules of a GBNF grammar; the time to convert one grows with their square, and is 0.1 s here."""
_LARK: Final = re.compile(r"^(?:%llguidance\b|[ \t]*start[ \t]*:(?!:=))", re.MULTILINE)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which JSON may write as 6.0."""


def asked_options(**values: Any) -> GenerateOptions:  # noqa: ANN401 - each option has its own type
    """The options that a request sets; None means that it does not."""
    if values.get("top_p") == 0:
        values["top_p"] = BEST_ONLY
    if values.get("top_k") is not None:
        values["top_k"] = max(values["top_k"], 0)
    return cast("GenerateOptions", {name: value for name, value in values.items() if value is not None})


def token_limit(*limits: int | None) -> int | None:
    """The first limit that is given; None for none, which is what -1 means too."""
    given = next((limit for limit in limits if limit is not None), None)
    return None if given is None or given < 0 else given


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def penalties(last_n: int | None, repetition: float | None, **others: float | None) -> dict[str, float | None]:
    """Penalties of a request whose service counts the last tokens alone, where it says how many.

    Raises:
        ApiError: it wants another number than all, and a penalty.
    """
    asked = {"repetition_penalty": repetition, **others}
    if last_n == 0:
        return {"repetition_penalty": 1.0, **dict.fromkeys(others, None)}
    if last_n not in (None, -1) and (repetition not in (None, 1) or any(others.values())):
        raise invalid("'repeat_last_n' is -1 or 0 here: penalties count all tokens.", "repeat_last_n")
    return asked


def schema_grammar(schema: Mapping[str, Any] | bool) -> Grammar:
    """What a text must match so that it is JSON of this schema."""
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """What a text must match so that it is one of these."""
    return Grammar("regex", f"({'|'.join(map(re.escape, choices))})")


def written_grammar(text: str, param: str) -> Grammar:
    """A grammar in GBNF, as llama.cpp has it, or in Lark.

    Raises:
        ApiError: it is neither, or too large.
    """
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid(f"'{param}' has at most {MAX_GRAMMAR_BYTES} bytes.", param)
    if _LARK.search(text):
        return Grammar("lark", text)
    if text.count("::=") > MAX_RULES:
        raise invalid(f"'{param}' has at most {MAX_RULES} rules in GBNF; Lark may have more.", param)
    try:
        return Grammar("lark", gbnf_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the converter raises that, and what the text makes it stumble over
        raise invalid(f"Invalid value for '{param}': neither GBNF nor Lark ({str(error)[:200]}).", param) from None


def one_grammar(given: Mapping[str, Grammar | None]) -> Grammar | None:
    """The only grammar among fields that may each bring one.

    Raises:
        ApiError: two of them do.
    """
    asked = [name for name, grammar in given.items() if grammar is not None]
    if len(asked) > 1:
        raise invalid(f"'{asked[1]}' cannot stand beside '{asked[0]}': the text must match one of them.", asked[1])
    return given[asked[0]] if asked else None


def written_time(seconds: float) -> str:
    """A moment of the epoch, as JSON has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def thinks(effort: Effort | None) -> bool | None:
    """Whether to think first, where a request says how much."""
    return None if effort is None else effort not in {"none", "minimal"}


def wrapped_seed(seed: int | None) -> int | None:
    """A seed that the library takes, for any whole number."""
    return None if seed is None else seed % SEEDS


MAX_CHOICES: Final = 128
MAX_STOPS: Final = 4
MAX_BIASES: Final = 1_024
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[Whole, Field(ge=0, lt=2**31)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1_000)]


def _limit(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("give 1 or more, or -1 for no limit")
    return value


Limit = Annotated[Whole, AfterValidator(_limit)]
"""Of tokens; -1 is none. What exceeds the context is cut to what it leaves."""


class ApiModel(BaseModel):
    """A JSON object of a request: fields that are not known are passed over; types are taken as they are."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class RequestBody(ApiModel):
    """An object whose fields `client.api.request_fields` lists: those that are honoured are the model's own."""

    body: ClassVar[BodyKind]

    @model_validator(mode="before")
    @classmethod
    def _take_fields(cls, value: object) -> object:
        take_fields(cls.body, value)
        return value


class StreamOptions(ApiModel):
    """`stream_options`."""

    include_usage: bool | None = None


class CanopyFields(ApiModel):
    """`canopy`: what no other server has.

    Attributes:
        trace: whether chunks carry the sweeps behind them.
        multistep: as `client.Options.multistep`.
    """

    trace: bool = False
    nodes: Annotated[Whole, Field(ge=0, le=2_048)] | None = None
    multistep: bool = False


class JsonSchemaFormat(ApiModel):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """`response_format`; a schema is kept whether it is strict or not.

    Attributes:
        value: a schema beside `json_object`, as Text Generation Inference has it and Hugging Face's client sends it.
        schema_: the same as llama.cpp and others have it.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    value: dict[str, Any] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = Field(default=None, alias="schema")

    def grammar(self) -> Grammar | None:
        """What the text must match.

        Raises:
            ApiError: the schema is missing.
        """
        match self.type:
            case "text":
                return None
            case "json_object":
                schema = self.schema_ if self.value is None else self.value
                return Grammar("json") if schema is None else schema_grammar(schema)
            case "json_schema":
                if self.json_schema is None:
                    raise missing("response_format.json_schema")
                return schema_grammar(self.json_schema.schema_)


class StructuredOutputs(ApiModel):
    """`structured_outputs`, as vLLM has it; of its fields those are here that can be had."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def grammars(self, place: str) -> dict[str, Grammar | None]:
        return {
            f"{place}.json": _of_schema(self.json_, f"{place}.json"),
            f"{place}.json_object": Grammar("json") if self.json_object else None,
            f"{place}.regex": None if self.regex is None else Grammar("regex", self.regex),
            f"{place}.choice": None if self.choice is None else choice_grammar(self.choice),
            f"{place}.grammar": None if self.grammar is None else written_grammar(self.grammar, f"{place}.grammar"),
        }


class SampledRequest(RequestBody):
    """How tokens are picked, and what the text must be: the same in all requests of OpenAI's form."""

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[Whole, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_END_TOKENS)] | None = None
    ignore_eos: bool | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None

    def asked(self, **more: Any) -> GenerateOptions:  # noqa: ANN401 - each option has its own type
        """The options of the request.

        Args:
            more: options of the kind of request; a `grammar` is that of its own field.

        Raises:
            ApiError: two fields say what the text must be, or one of them cannot be read.
        """
        grammars = {
            "response_format": more.pop("grammar", None),
            "guided_json": _of_schema(self.guided_json, "guided_json"),
            "guided_regex": None if self.guided_regex is None else Grammar("regex", self.guided_regex),
            "guided_choice": None if self.guided_choice is None else choice_grammar(self.guided_choice),
            "guided_grammar": _written(self.guided_grammar, "guided_grammar"),
            "grammar": _written(self.grammar, "grammar"),
            "json_schema": _of_schema(self.json_schema, "json_schema"),
        }
        if self.structured_outputs is not None:
            grammars |= self.structured_outputs.grammars("structured_outputs")
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": wrapped_seed(self.seed),
            "stop": stop_strings(self.stop),
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "stop_tokens": tuple(self.stop_token_ids or ()) or None,
            "end_tokens": () if self.ignore_eos else None,
            "grammar": one_grammar(grammars),
        }
        return asked_options(**{**options, **more})


class SamplingRequest(SampledRequest):
    """What both kinds of completions take."""

    model: str = ""
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    max_tokens: Limit | None = None
    n_predict: Limit | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1)] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    canopy: CanopyFields | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_trace(self) -> bool:
        return self.canopy is not None and self.canopy.trace

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ApiError: which field.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")

    def generate_options(self, **more: Any) -> GenerateOptions:  # noqa: ANN401 - each option has its own type
        """The options of the first choice, with those of its kind.

        Raises:
            ApiError: as of `asked`; a token of `logit_bias` is no number.
        """
        repetition = self.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty
        own = self.canopy or CanopyFields()
        return self.asked(
            **penalties(
                self.repeat_last_n,
                repetition,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
            ),
            logit_bias=_biases(self.logit_bias or {}) or None,
            nodes=own.nodes,
            trace=own.trace or None,
            multistep=own.multistep or None,
            grammar=None if self.response_format is None else self.response_format.grammar(),
            **more,
        )


def for_choice(options: GenerateOptions, choice: int) -> GenerateOptions:
    """The options of a later choice: with a seed, each has its own, one more than the last's."""
    seed = options.get("seed")
    return options if seed is None or choice == 0 else {**options, "seed": (seed + choice) % SEEDS}


def _of_schema(schema: dict[str, Any] | str | None, param: str) -> Grammar | None:
    """A JSON schema, or the text of one, as a grammar."""
    if not isinstance(schema, str):
        return None if schema is None else schema_grammar(schema)
    try:
        value = read_json(schema.encode())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise invalid(f"Invalid value for '{param}': the text is no JSON schema.", param)
    return schema_grammar(value)


def _written(text: str | None, param: str) -> Grammar | None:
    return None if not text else written_grammar(text, param)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise invalid(f"Invalid key in 'logit_bias': {token[:40]}. Keys are token ids.", "logit_bias")
        biases[int(token)] = bias
    return biases


LEAST_LOG_PROB: Final = -9_999.0
"""What stands for minus infinity, which JSON does not have."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(14)}"


def fingerprint(card: ModelCard) -> str:
    """`system_fingerprint`: the same weights have the same."""
    return f"fp_{card.fingerprint[:10]}"


def usage(prompt_tokens: int, ends: Iterable[Finished], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Of all choices of one request.

    Accepted predictions are drafted tokens that the target picked; rejected ones are the other nodes of the trees.

    Args:
        reasoning_tokens: of the answers, those thought and not said.
    """
    stats = [end.result.stats for end in ends]
    sweeps = [sweep for one in stats for sweep in one.sweeps]
    completion = sum(one.tokens for one in stats)
    accepted = min(sum(sweep.accepted_tokens for sweep in sweeps), completion)
    drafted = sum(sweep.nodes for sweep in sweeps)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {
            "cached_tokens": min(sum(one.reused_tokens for one in stats), prompt_tokens),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, completion),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(drafted - accepted, 0),
            "audio_tokens": 0,
        },
    }


def log_prob_entries(log_probs: Sequence[TokenLogProbs], token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """One object per token, with the likeliest ones in its place."""

    def one(token: int, log_prob: float) -> dict[str, Any]:
        written = token_bytes(token)
        shown = max(log_prob, LEAST_LOG_PROB)
        return {"token": written.decode(errors="replace"), "logprob": shown, "bytes": list(written)}

    return [{**one(at.token, at.log_prob), "top_logprobs": [one(*other) for other in at.top]} for at in log_probs]


def speed(result: Result) -> dict[str, Any]:
    """What `canopy` says of a finished answer."""
    stats = result.stats
    return {
        "seed": stats.seed,
        "reproducible": stats.reproducible,
        "tokens_per_s": stats.tokens_per_s,
        "time_to_first_token_s": stats.time_to_first_token_s,
        "acceptance_length": stats.acceptance_length,
        "hops": list(stats.hops),
    }
