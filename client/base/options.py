"""Options of a generation and of a connection: plain values, checked once at the edge."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypedDict, Union, cast, get_args, get_origin, get_type_hints

import tyro

from swarm.base.cli_types import (
    Count,
    DeviceName,
    File,
    Fingerprint,
    Found,
    Insecure,
    Number,
    OwnParts,
    Peer,
    Probability,
    Revision,
    Seconds,
    Text,
    Word,
    headed,
)
from swarm.base.errors import ConfigError
from swarm.base.files import cache_folder
from swarm.base.plain_text import plain_line
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.directory.registry import Registry
from swarm.protocol.pick_rules import MAX_TOP_LOG_PROBS, PickRules, Sampling
from swarm.protocol.pick_rules import Grammar as Grammar

logger = logging.getLogger(__name__)

MAX_NODES = 2_048
MAX_NEW_TOKENS = 2**31
MAX_VOCABULARY = 2**31
AUDITED_SHARE = 0.02
"""Of all texts, by default: what audits compute is then less than a fiftieth of what texts do."""
_TYPES: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    Grammar: (Grammar, "a Grammar"),
}
"""What a value may be where a field of `Options` has this type, and its words."""
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a generation config says of sampling, and the library calls the same."""
_COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""JSON without blanks and line ends, which cost tokens."""
ModelOrFolder = Annotated[str | Path, Word("MODEL")]
AUTO_HEAD = "auto"
CHECKED_PICKS = 1 / 16
CodecChoice = Literal["lossless", "int8"]
"""How hidden rows travel between hops: every bit of them, or in int8 blocks, which changes results."""

ProofChoice = Literal["none", "signed", "rows"]
"""What a text is to prove."""


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
        proof: what the result proves: signed, who signed that it picked which token; rows, also what each machine sent,
            so that every span can be checked by itself. In a session of its own.
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
    proof: Found[ProofChoice] = "none"

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
        from swarm.compute.sampling import check as check_sampling  # torch takes seconds to import

        for name, (kind, words) in _kinds().items():
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
        if self.proof not in get_args(ProofChoice):
            raise ConfigError(f"proof: {self.proof!r}; there are {', '.join(get_args(ProofChoice))}")
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
    proof: ProofChoice


UNCHANGED = GenerateOptions(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
"""What options were that a generation left open, before its checkpoint had a say."""


def default_calibration_folder() -> Path:
    """Where this user's calibrations are kept: `canopy/calibration` in the cache folder."""
    return cache_folder() / "calibration"


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What drafts.

    Attributes:
        draft: hub id, folder or GGUF file of a draft model, best with the same tokenizer, or of a head trained for this
            target (also an EAGLE-3 head), or mtp: the layer that comes with the target's checkpoint; may be repeated,
            and then they work together on one tree (default: none).
        draft_device: where drafts run, as torch calls it: cpu, cuda, cuda:1, xpu, mps (default: a GPU, or the CPU).
        lookup: propose what followed the same tokens earlier in the text, with a draft or without.
        siblings: propose what the target picked on rejected branches, with a draft or without.
        adapt: let draft models learn from the target's picks while a text grows.
        calibration: folder that keeps what is learned about drafts; None keeps nothing after this connection.
    """

    draft: tyro.conf.UseAppendAction[tuple[ModelOrFolder, ...]] = ()
    draft_device: DeviceName | None = None
    lookup: bool = True
    siblings: bool = True
    adapt: bool = True
    calibration: Found[Path | None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions(DraftOptions):
    """How to join a swarm: the keyword arguments of `connect`, and options of the command line; defaults stand here.

    Attributes:
        peers: multiaddresses of peers, as `swarm bootstrap` and `node serve` print them, or invites.
        registry: an open registry to use instead of joining the DHT (default: none).
        nodes: tree nodes per sweep (K) where a generation does not say (default: what pays most, chosen each sweep).
        revision: branch, tag or commit of a hub model (default: its main branch).
        fingerprint: the swarm's model with this fingerprint, or 8 and more digits of it (default: what is served).
        generation_config: sample as the model's generation_config.json says where no option does.
        threads: CPU threads for the draft model (default: as many as pay, which is measured).
        wait: seconds to wait for a machine when some layers are no longer served.
        codec: how hidden rows travel between nodes; int8 sends less and changes results.
        reproducible: use only machines whose numeric class promises the same text for the same seed, however chains
            and trees are laid out; an error says what the swarm computes in otherwise.
        hedge: send every sweep to a second machine with one span of layers too, mostly the slowest, now and then
            any; the first answer counts and the other is compared.
        trusted: peer id of a machine that you trust; may be repeated. Only these, and a node of this machine, compute
            (default: any).
        own: layers that only trusted machines compute, others any: first:4, last:2 or first:4,last:2 (default: all
            layers, where `trusted` is given).
        check_picks: share of the picks to check against final rows that tails send, beside each tail's first ones; 1
            checks all, and waits for that at the end of a text; 0 checks none.
        head: folder, GGUF file or hub id whose output matrix checks picks; auto takes the model's own files where they
            are here.
        audit: share of texts after which one hop's work is done again by another machine; 0 audits none.
        receipts: sign, once per text, how many tokens the machines of its chain computed; health pages see who computed
            how much in which session, and no text.
        owner: identity file of whoever these texts are for, such as a node's: all machines of a chain see its peer id,
            and those that prefer it, or what it contributed, give it more turns (default: nobody says who it is).
        membership: what joining takes beside an address; an invite to a private swarm brings it along.
        calibration: folder that keeps what is learned about drafts (default: one in the user's cache); None keeps
            nothing after this connection.
    """

    peers: Found[tuple[str, ...]] = ()
    registry: Found[Registry | None] = None
    nodes: Found[int | None] = None
    revision: Revision | None = None
    fingerprint: Fingerprint | None = None
    generation_config: bool = True
    threads: Count | None = None
    codec: CodecChoice = "lossless"
    wait: Seconds = 60.0
    reproducible: bool = False
    hedge: bool = False
    trusted: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    own: OwnParts | None = None
    check_picks: Probability = CHECKED_PICKS
    head: ModelOrFolder = AUTO_HEAD
    audit: Probability = AUDITED_SHARE
    receipts: bool = True
    owner: File | None = None
    insecure: Insecure = False
    membership: Found[Membership] = OPEN_SWARM
    calibration: Found[Path | None] = field(default_factory=default_calibration_folder)


class ConnectOptions(TypedDict, total=False):
    """The fields of `ConnectionOptions` as keyword arguments; `draft` may also be one name, or None."""

    draft: str | Path | Sequence[str | Path] | None
    draft_device: str | None
    lookup: bool
    siblings: bool
    adapt: bool
    calibration: Path | None
    peers: Sequence[str]
    registry: Registry | None
    nodes: int | None
    revision: str | None
    fingerprint: str | None
    generation_config: bool
    threads: int | None
    codec: CodecChoice
    wait: float
    reproducible: bool
    hedge: bool
    trusted: Sequence[str]
    own: str | None
    check_picks: float
    head: str | Path
    audit: float
    receipts: bool
    owner: str | Path | None
    insecure: bool
    membership: Membership


def make_connection(arguments: ConnectOptions) -> ConnectionOptions:
    """Options of a connection from keyword arguments.

    Raises:
        ConfigError: there is no option of a name.
    """
    given: dict[str, Any] = dict(arguments)
    _check_names(ConnectionOptions, given)
    drafts = given.get("draft")
    given["draft"] = () if drafts is None else (drafts,) if isinstance(drafts, str | Path) else tuple(drafts)
    given["peers"] = tuple(given.get("peers", ()))
    given["trusted"] = tuple(given.get("trusted", ()))
    return ConnectionOptions(**given)


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


def _check_names(options: type[Options | ConnectionOptions], arguments: Mapping[str, Any]) -> None:
    known = [one.name for one in fields(options)]
    if unknown := sorted(set(arguments) - set(known)):
        raise ConfigError(f"unknown option {unknown[0]!r}; there are {', '.join(known)}")


def make_options(arguments: GenerateOptions) -> Options:
    """Options from keyword arguments; `Options.check` checks their values.

    Raises:
        ConfigError: there is no option of a name.
    """
    given: dict[str, Any] = dict(arguments)
    _check_names(Options, given)
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


@cache
def _kinds() -> dict[str, tuple[Any, str]]:
    """What each field of `Options` with a plain type may be, and its words."""
    found = {}
    for name, kind in get_type_hints(Options).items():
        members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        if members[0] in _TYPES:
            wanted, words = _TYPES[members[0]]
            found[name] = (wanted | None if NoneType in members else wanted, words)
    return found


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
