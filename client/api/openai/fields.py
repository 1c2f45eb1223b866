"""Fields that OpenAI's requests share, and what they mean as options of the library. Owns no route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from client.api.errors import invalid
from client.options import GenerateOptions, Grammar

MAX_CHOICES: Final = 4
MAX_STOPS: Final = 4
MAX_BIASES: Final = 1_024
MAX_TOKENS: Final = 2**31
_SEEDS: Final = 2**63
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=1_000)]


class ApiModel(BaseModel):
    """A JSON object of a request: fields that are not known are passed over; types are taken as they are."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(ApiModel):
    """`stream_options`."""

    include_usage: bool | None = None


class CanopyFields(ApiModel):
    """`canopy`: what no other server has.

    Attributes:
        trace: whether chunks carry the sweeps behind them.
        nodes: tree nodes per sweep.
        multistep: as `client.Options.multistep`.
    """

    trace: bool = False
    nodes: Annotated[int, Field(ge=0, le=2_048)] | None = None
    multistep: bool = False


class SamplingRequest(ApiModel):
    """What both kinds of completions take."""

    model: str = ""
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None
    canopy: CanopyFields | None = None

    @property
    def choices(self) -> int:
        """How many answers to make of one prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_trace(self) -> bool:
        """Whether chunks carry the sweeps behind them."""
        return self.canopy is not None and self.canopy.trace

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ApiError: which field.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")

    def generate_options(self) -> GenerateOptions:
        """The options of the first choice; without a temperature it is 1, as OpenAI has it.

        Raises:
            ApiError: a token of `logit_bias` is no number.
        """
        options = GenerateOptions(temperature=1.0 if self.temperature is None else self.temperature)
        given: dict[str, Any] = {
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k is not None and self.top_k > 0 else None,
            "min_p": self.min_p,
            "seed": None if self.seed is None else self.seed % _SEEDS,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "frequency_penalty": self.frequency_penalty or None,
            "presence_penalty": self.presence_penalty or None,
            "repetition_penalty": None if self.repetition_penalty == 1 else self.repetition_penalty,
            "logit_bias": _biases(self.logit_bias or {}) or None,
            "nodes": None if self.canopy is None else self.canopy.nodes,
            "trace": self.wants_trace or None,
            "multistep": True if self.canopy is not None and self.canopy.multistep else None,
        }
        options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
        return options


def for_choice(options: GenerateOptions, choice: int) -> GenerateOptions:
    """The options of a later choice: with a seed, each has its own, one more than the last's."""
    seed = options.get("seed")
    return options if seed is None or choice == 0 else {**options, "seed": (seed + choice) % _SEEDS}


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise invalid(f"Invalid key in 'logit_bias': {token[:40]}. Keys are token ids.", "logit_bias")
        biases[int(token)] = bias
    return biases


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
                return Grammar("json") if schema is None else Grammar("json_schema", json.dumps(schema))
            case "json_schema":
                if self.json_schema is None:
                    param = "response_format.json_schema"
                    raise invalid(f"Missing required parameter: '{param}'.", param, code="missing_required_parameter")
                return Grammar("json_schema", json.dumps(self.json_schema.schema_))
