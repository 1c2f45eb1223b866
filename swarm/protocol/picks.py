"""Rules, draft distributions and log-probabilities of picks, from protobuf: all bounded before they become values."""

from __future__ import annotations

from collections.abc import Collection

from swarm.errors import RemoteProtocolError
from swarm.protocol import checks
from swarm.protocol.draft_distribution import DraftDistribution
from swarm.protocol.pick_rules import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_END_TOKENS,
    MAX_GRAMMAR_BYTES,
    MAX_PENALTY,
    MAX_TOP_LOG_PROBS,
    REPETITION,
    Grammar,
    GrammarKind,
    PickRules,
)
from swarm.protocol.v1 import node_pb2 as pb
from swarm.runtime.version import unknown_here

GRAMMAR_KINDS: dict[int, GrammarKind] = {
    pb.GRAMMAR_KIND_JSON_SCHEMA: "json_schema",
    pb.GRAMMAR_KIND_JSON: "json",
    pb.GRAMMAR_KIND_REGEX: "regex",
    pb.GRAMMAR_KIND_LARK: "lark",
}

TopLogProbs = tuple[tuple[tuple[int, float], ...], ...]


def check_rules(sampling: pb.Sampling) -> None:
    """Refuse rules that are too large, counted on the parsed message.

    Raises:
        RemoteProtocolError: the field that holds too much.
    """
    rules = sampling.rules
    checks.at_most(rules.bias_tokens, MAX_BIASES, "logit_bias")
    checks.same_length(len(rules.biases), len(rules.bias_tokens), "logit_bias", "biased tokens")
    checks.at_most(rules.end_tokens, MAX_END_TOKENS, "end_tokens")
    if rules.HasField("grammar"):
        checks.at_most(rules.grammar.text.encode(), MAX_GRAMMAR_BYTES, "grammar")


def decode_rules(rules: pb.PickRules) -> PickRules:
    """The rules of a session's picks.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    check_rules(pb.Sampling(rules=rules))
    repetition = rules.repetition_penalty if rules.HasField("repetition_penalty") else 1.0
    biases = zip(rules.bias_tokens, rules.biases, strict=True)
    found = PickRules(
        start=checks.number(rules.start, "start"),
        frequency_penalty=_penalty(rules.frequency_penalty, "frequency_penalty"),
        presence_penalty=_penalty(rules.presence_penalty, "presence_penalty"),
        repetition_penalty=checks.between(repetition, "repetition_penalty", *REPETITION),
        logit_bias=tuple((token, checks.between(bias, "logit_bias", -MAX_BIAS, MAX_BIAS)) for token, bias in biases),
        grammar=_grammar(rules.grammar) if rules.HasField("grammar") else None,
        end_tokens=tuple(rules.end_tokens),
    )
    if (problem := found.problem(checks.TOKEN_END)) is not None:
        raise RemoteProtocolError(*problem)
    return found


def decode_log_probs(log_probs: pb.LogProbs, picks: int) -> tuple[tuple[float, ...], TopLogProbs | None]:
    """The log-probabilities of so many picks, and of the likeliest tokens at each; None where none were sent.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    checks.same_length(len(log_probs.values), picks, "log_probs", "ids")
    values = tuple(checks.log_probability(value, "log_probs") for value in log_probs.values)
    tokens, theirs = log_probs.top_tokens, log_probs.top_values
    checks.same_length(len(theirs), len(tokens), "top_log_probs", "tokens")
    if not tokens:
        return values, None
    top, rest = divmod(len(tokens), max(picks, 1))
    if rest or top > MAX_TOP_LOG_PROBS:
        raise RemoteProtocolError("top_log_probs", f"{len(tokens)} tokens for {picks} picks")
    pairs = tuple(
        (checks.number(token, "top_log_probs", checks.TOKEN_END), checks.log_probability(value, "top_log_probs"))
        for token, value in zip(tokens, theirs, strict=True)
    )
    return values, tuple(pairs[start : start + top] for start in range(0, len(pairs), top))


def decode_guesses(guesses: Collection[pb.Guess], nodes: int) -> tuple[DraftDistribution, ...]:
    """What a draft drew after nodes of a sweep of `nodes`: at most one per node, by rising offsets.

    Raises:
        RemoteProtocolError: they break the wire's rules.
    """
    found: list[DraftDistribution] = []
    for sent in checks.at_most(guesses, nodes, "guesses"):
        guess = DraftDistribution(sent.offset, tuple(sent.tokens), tuple(sent.weights), tuple(sent.draws))
        problem = guess.problem(checks.TOKEN_END)
        if problem is not None:
            raise RemoteProtocolError("guesses", problem)
        if guess.offset >= nodes or (found and guess.offset <= found[-1].offset):
            raise RemoteProtocolError("guesses", f"offset {guess.offset} is not below {nodes} or not rising")
        found.append(guess)
    return tuple(found)


def _penalty(value: float, field: str) -> float:
    return checks.between(value, field, -MAX_PENALTY, MAX_PENALTY)


def _grammar(grammar: pb.Grammar) -> Grammar:
    if grammar.kind not in GRAMMAR_KINDS:
        raise RemoteProtocolError("grammar", unknown_here(f"kind of grammar {int(grammar.kind)}"))
    return Grammar(GRAMMAR_KINDS[grammar.kind], grammar.text)
