"""Options of a generation and of a connection: plain values, checked once at the edge."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, get_args

from swarm.discovery.dht.addresses import Membership
from swarm.errors import ConfigError
from swarm.protocol.pick_rules import MAX_TOP_LOG_PROBS, PickRules, Sampling
from swarm.protocol.pick_rules import Grammar as Grammar
from swarm.runtime.cli_types import Count, Found, Number, Probability, Text, headed
from swarm.runtime.plain_text import plain_line

if TYPE_CHECKING:
    from swarm.discovery.registry import Registry

logger = logging.getLogger(__name__)

MAX_NODES = 2_048
MAX_NEW_TOKENS = 2**31
MAX_VOCABULARY = 2**31
_TYPES: dict[str, tuple[Any, str]] = {
    "max_new_tokens": (Integral, "a whole number"),
    "temperature": (Real | None, "a number"),
    "top_k": (Integral | None, "a whole number"),
    "top_p": (Real | None, "a number"),
    "min_p": (Real | None, "a number"),
    "seed": (Integral | None, "a whole number"),
    "nodes": (Integral | None, "a whole number"),
    "multistep": (bool, "True or False"),
    "trace": (bool, "True or False"),
    "frequency_penalty": (Real, "a number"),
    "presence_penalty": (Real, "a number"),
    "repetition_penalty": (Real | None, "a number"),
    "grammar": (Grammar | None, "a Grammar"),
    "log_probs": (Integral | None, "a whole number"),
}
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a generation config says of sampling, and the library calls the same."""
_COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""JSON without blanks and line ends, which cost tokens."""
CodecChoice = Literal["lossless", "int8"]
"""How hidden rows travel between hops: every bit of them, or in int8 blocks, which changes results."""


@headed(
    text=("max_new_tokens", "stop"),
    sampling=("temperature", "top_k", "top_p", "min_p", "seed", "multistep"),
    penalties=("frequency_penalty", "presence_penalty", "repetition_penalty"),
    drafting=("nodes",),
)
@dataclass(frozen=True, slots=True)
class Options:
    """How to generate; defaults stand here only.

    What is None is what the model's generation_config.json says, and else the default.

    Attributes:
        max_new_tokens: most tokens to emit.
        temperature: 0 is greedy, 1 is the model's own distribution (default: the checkpoint's, else 0).
        top_k: pick among the k best tokens; 0 for all (default: the checkpoint's, else all).
        top_p: pick among the best tokens that hold this much probability; 1 for all (default: the checkpoint's, else
            all).
        min_p: pick among tokens at least this fraction as probable as the best; 0 for all (default: the checkpoint's,
            else all).
        seed: the same seed gives the same text (default: drawn, and reported).
        stop: strings that end the text, which is cut before them (default: none).
        nodes: tree nodes per sweep (K); 0 is plain decoding (default: whatever pays most, chosen before each sweep).
        multistep: pick by multi-step speculative sampling: the same law, but a text that depends on the trees too.
        trace: hand out what people see of each sweep as well (`Piece.sweeps`).
        frequency_penalty: take so much from a token's logit for each time that it was generated; -2 to 2.
        presence_penalty: take so much from the logit of each token that was generated; -2 to 2.
        repetition_penalty: divide logits above 0, and multiply others, of all tokens so far; 1 does nothing (default:
            the checkpoint's, else 1).
        logit_bias: pairs of a token id and what is added to its logit, -100 to 100; at most 1,024.
        grammar: what the text must match.
        log_probs: give each token's log-probability, and those of so many of the likeliest tokens, at most 20.
        show: special tokens that the text shows, such as `<|python_tag|>`; decoding drops all others.
        end_tokens: ids that end the text (default: the model's own).
        stop_tokens: ids that end it beside those.
    """

    max_new_tokens: Count = 128
    temperature: Number | None = None
    top_k: Count | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    seed: Count | None = None
    stop: tuple[Text, ...] = ()
    nodes: Count | None = None
    multistep: bool = False
    trace: Found[bool] = False
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    repetition_penalty: Number | None = None
    logit_bias: Found[tuple[tuple[int, float], ...]] = ()
    grammar: Found[Grammar | None] = None
    log_probs: Found[int | None] = None
    show: Found[tuple[str, ...]] = ()
    end_tokens: Found[tuple[int, ...] | None] = None
    stop_tokens: Found[tuple[int, ...]] = ()

    def with_defaults(self, *defaults: GenerateOptions) -> Options:
        """The same, where each option that is None is that of the first defaults that have it."""
        found: dict[str, Any] = {}
        for given in reversed(defaults):
            found.update(given)
        return replace(self, **{name: value for name, value in found.items() if getattr(self, name) is None})

    def ends(self, own: frozenset[int]) -> frozenset[int]:
        """Ids that end the text, where `own` are the model's."""
        return (own if self.end_tokens is None else frozenset(self.end_tokens)).union(self.stop_tokens)

    def sampling(self, start: int = 0, end_tokens: Collection[int] = ()) -> Sampling:
        """The options that the tail needs; a seed is drawn if there is none.

        Args:
            start: tokens of the prompt.
            end_tokens: ids that end a text.
        """
        seed = secrets.randbits(63) if self.seed is None else self.seed
        temperature = 0.0 if self.temperature is None else self.temperature
        top_p = None if self.top_p == 1 else self.top_p
        plain = Sampling(seed, temperature, self.top_k or None, top_p, self.min_p or None, self.multistep)
        rules = PickRules(
            frequency_penalty=float(self.frequency_penalty),
            presence_penalty=float(self.presence_penalty),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            logit_bias=tuple((token, float(bias)) for token, bias in sorted(self.logit_bias)),
            grammar=None if self.grammar is None else compact(self.grammar),
        )
        if rules == PickRules():
            return plain
        return replace(plain, rules=replace(rules, start=start, end_tokens=tuple(sorted(end_tokens))))

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is of the wrong type or out of range; the message names the option.
        """
        from swarm.inference.sampling import check as check_sampling  # torch takes seconds to import

        for name, (kind, words) in _TYPES.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name} must be {words}, got {value!r}")
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise ConfigError(f"max_new_tokens: {self.max_new_tokens}; ask for 1 … {MAX_NEW_TOKENS}")
        if self.nodes is not None and not 0 <= self.nodes <= MAX_NODES:
            raise ConfigError(f"nodes: {self.nodes} is not in 0 … {MAX_NODES}")
        if self.log_probs is not None and not 0 <= self.log_probs <= MAX_TOP_LOG_PROBS:
            raise ConfigError(f"log_probs: {self.log_probs} is not in 0 … {MAX_TOP_LOG_PROBS}")
        if not all(isinstance(token, Integral) and isinstance(bias, Real) for token, bias in self.logit_bias):
            raise ConfigError("logit_bias must map token ids, which are whole numbers, to numbers")
        if not all(isinstance(stop, str) for stop in self.stop):
            raise ConfigError(f"stop: {self.stop!r}; give strings")
        _check_ids("end_tokens", self.end_tokens or ())
        _check_ids("stop_tokens", self.stop_tokens)
        if not all(self.stop):
            raise ConfigError("stop: an empty stop string would end every text at once")
        check_sampling(self.sampling(end_tokens=(0,)), MAX_VOCABULARY)


class GenerateOptions(TypedDict, total=False):
    """The fields of `Options` as keyword arguments; `stop` may also be one string or a list."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    nodes: int | None
    multistep: bool
    show: Sequence[str]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    grammar: Grammar | None
    log_probs: int | None
    end_tokens: Sequence[int] | None
    stop_tokens: Sequence[int]
    trace: bool


UNCHANGED = GenerateOptions(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
"""What options were that a generation left open, before its checkpoint had a say."""


class ConnectOptions(TypedDict, total=False):
    """How to join a swarm; `AsyncSwarm.connect` describes each."""

    peers: Sequence[str]
    draft: str | Path | Sequence[str | Path] | None
    draft_device: str | None
    revision: str | None
    fingerprint: str | None
    nodes: int | None
    registry: Registry
    threads: int | None
    codec: CodecChoice
    wait: float
    hedge: bool
    reproducible: bool
    insecure: bool
    membership: Membership
    lookup: bool
    siblings: bool
    adapt: bool
    calibration: Path | None
    generation_config: bool


def check_codec(codec: CodecChoice) -> CodecChoice:
    """Return the codec if there is one of this name; callers without a type checker may pass any value.

    Raises:
        ConfigError: there is none.
    """
    if codec not in get_args(CodecChoice):
        raise ConfigError(f"codec: {codec!r}; there are {' and '.join(get_args(CodecChoice))}")
    return codec


def check_text(text: str, name: str) -> str:
    """Return the text if it is valid Unicode; no tokenizer takes lone surrogates.

    Raises:
        ConfigError: it is not; the message calls it `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: is not valid text (UTF-8)") from None
    return text


def make_options(arguments: GenerateOptions) -> Options:
    """Options from keyword arguments; `Options.check` checks their values.

    Raises:
        ConfigError: there is no option of a name.
    """
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; there are {', '.join(known)}")
    given: dict[str, Any] = dict(arguments)
    for name in ("stop", "show"):
        several = given.get(name, ())
        given[name] = tuple(several) if isinstance(several, Iterable) and not isinstance(several, str) else (several,)
    for name in ("end_tokens", "stop_tokens"):
        if isinstance(given.get(name), list):  # as in JSON
            given[name] = tuple(given[name])
    if isinstance(given.get("grammar"), Mapping):  # of a generation that was interrupted
        given["grammar"] = Grammar(**given["grammar"])
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    return Options(**given)


def _check_ids(name: str, tokens: object) -> None:
    if not isinstance(tokens, tuple) or not all(isinstance(token, Integral) for token in tokens):
        raise ConfigError(f"{name} must be token ids, which are whole numbers")


def described(options: GenerateOptions) -> str:
    """Options for people, such as `temperature 0.7, top_p 0.8`."""
    return ", ".join(f"{name} {value:g}" for name, value in options.items() if isinstance(value, int | float))


def sampling_of(generation: Mapping[str, Any]) -> GenerateOptions:
    """How a generation config samples, where it says something; a value that cannot be is left aside with one line.

    Without `do_sample` its numbers hold all the same: few checkpoints state it. Where it is false, picks are greedy;
    where it is true, the temperature is 1 unless it is given.
    """
    found: dict[str, Any] = {}
    for name in _SAMPLED:
        value = generation.get(name)
        if value is None:
            continue
        try:
            if isinstance(value, bool):
                raise ConfigError(f"{name} must be a number, got {value}")
            Options(**{name: value}).check()
        except ConfigError as error:
            logger.warning("%s: %s; it is left aside", "generation_config.json", plain_line(str(error))[:200])
        else:
            found[name] = value
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    elif generation.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    return cast("GenerateOptions", found)


def json_rule(schema: Any) -> str:  # noqa: ANN401 - a schema may also be true or false
    """JSON that follows a schema, compact, as a part of a grammar."""
    schema = {} if schema is True else schema
    value = {**schema, "x-guidance": _COMPACT} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(value, separators=(',', ':'))}"


def compact(grammar: Grammar) -> Grammar:
    """A grammar of JSON whose texts have no blanks; any other as it is.

    It is written out, so that machines of every release follow the same one.

    Raises:
        ConfigError: the schema is no JSON.
    """
    if grammar.kind not in {"json", "json_schema"}:
        return grammar
    try:
        schema = {"type": "object"} if grammar.kind == "json" else json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"grammar: no JSON schema ({error})") from None
    return Grammar("lark", f"%llguidance {{}}\nstart: {json_rule(schema)}\n")


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs from a mapping, or from the pairs of a generation that was interrupted.

    Raises:
        ConfigError: it is neither.
    """
    try:
        pairs = given.items() if isinstance(given, Mapping) else given
        return tuple((token, bias) for token, bias in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ConfigError("logit_bias must map token ids to numbers") from None
