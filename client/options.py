"""Options of a generation and of a connection: plain values, checked once at the edge."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args

import tyro

from swarm.discovery.dht.addresses import Membership
from swarm.errors import ConfigError
from swarm.protocol.messages import Sampling
from swarm.runtime.cli_types import Count, Number, Probability, Text, headed

if TYPE_CHECKING:
    from swarm.discovery.registry import Registry

MAX_NODES = 2_048
MAX_NEW_TOKENS = 2**31
_TYPES: dict[str, tuple[Any, str]] = {
    "max_new_tokens": (Integral, "a whole number"),
    "temperature": (Real, "a number"),
    "top_k": (Integral | None, "a whole number"),
    "top_p": (Real | None, "a number"),
    "min_p": (Real | None, "a number"),
    "seed": (Integral | None, "a whole number"),
    "nodes": (Integral | None, "a whole number"),
    "multistep": (bool, "True or False"),
    "trace": (bool, "True or False"),
}
CodecChoice = Literal["lossless", "int8"]
"""How hidden rows travel between hops: every bit of them, or in int8 blocks, which changes results."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must match from its first token to its end.

    Attributes:
        kind: `json_schema`; `json` for any JSON object (its text is then ignored); `regex`; `lark`, a context-free
            grammar in the dialect of llguidance, which can also begin at a trigger in the middle of a text.
        text: of the schema, expression or grammar.
    """

    kind: Literal["json_schema", "json", "regex", "lark"]
    text: str = ""


@headed(
    text=("max_new_tokens", "stop"),
    sampling=("temperature", "top_k", "top_p", "min_p", "seed", "multistep"),
    drafting=("nodes",),
)
@dataclass(frozen=True, slots=True)
class Options:
    """How to generate; defaults stand here only.

    Attributes:
        max_new_tokens: most tokens to emit.
        temperature: 0 is greedy, 1 is the model's own distribution.
        top_k: pick among the k best tokens (default: all).
        top_p: pick among the best tokens that hold this much probability (default: all).
        min_p: pick among tokens at least this fraction as probable as the best (default: all).
        seed: the same seed gives the same text (default: drawn, and reported).
        stop: strings that end the text, which is cut before them (default: none).
        nodes: tree nodes per sweep (K); 0 is plain decoding (default: whatever pays most, chosen before each sweep).
        multistep: pick by multi-step speculative sampling: the same law, but a text that depends on the trees too.
        trace: hand out what people see of each sweep as well (`Piece.sweeps`); not for the command line.
    """

    max_new_tokens: Count = 128
    temperature: Number = 0.0
    top_k: Count | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    seed: Count | None = None
    stop: tuple[Text, ...] = ()
    nodes: Count | None = None
    multistep: bool = False
    trace: Annotated[bool, tyro.conf.Suppress] = False

    def sampling(self) -> Sampling:
        """The options that the tail needs; a seed is drawn if there is none."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(seed, self.temperature, self.top_k, self.top_p, self.min_p, self.multistep)

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
        if not all(isinstance(stop, str) for stop in self.stop):
            raise ConfigError(f"stop: {self.stop!r}; give strings")
        if not all(self.stop):
            raise ConfigError("stop: an empty stop string would end every text at once")
        check_sampling(self.sampling())


class GenerateOptions(TypedDict, total=False):
    """The fields of `Options` as keyword arguments; `stop` may also be one string or a list."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    nodes: int | None
    multistep: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    grammar: Grammar | None
    log_probs: int | None
    trace: bool


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
    insecure: bool
    membership: Membership
    lookup: bool
    siblings: bool
    recycle: bool
    adapt: bool
    calibration: Path | None


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
    stop = arguments.get("stop", ())
    rest: dict[str, Any] = {name: value for name, value in arguments.items() if name != "stop"}
    return Options(**rest, stop=tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,))
