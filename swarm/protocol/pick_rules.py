"""How the tail picks a token, as values: noise and filters, and the rules that depend on the path to a node.

`swarm.inference` applies them, `swarm.protocol.wire` carries them. Owns no tensor and no grammar library.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

GrammarKind = Literal["json_schema", "json", "regex", "lark"]
"""What a grammar's text is."""
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MAX_GRAMMAR_BYTES = 64 << 10
"""A grammar's text in UTF-8."""
MAX_BIASES = 1_024
"""Tokens that a session biases."""
MAX_BIAS = 100.0
"""Of a token's logit, either way."""
MAX_PENALTY = 2.0
"""The frequency and the presence penalty lie in `[-MAX_PENALTY, MAX_PENALTY]`."""
REPETITION = 0.01, 100.0
"""Within which the repetition penalty lies."""
MAX_END_TOKENS = 64
"""Ids that end a text."""
MAX_TOP_LOG_PROBS = 20
"""Tokens whose log-probabilities a reply gives beside that of a pick."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must match from its first token to its end.

    Attributes:
        kind: `json_schema`; `json` for any JSON object (its text is then ignored); `regex`; `lark`, a context-free
            grammar in the dialect of llguidance, which can also begin at a trigger in the middle of a text.
        text: of the schema, expression or grammar.
    """

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class PickRules:
    """Rules of a pick that depend on the path to its node: the committed tokens, then the node's ancestors and itself.

    They apply to the logits in this order, before temperature and filters: repetition, frequency and presence penalty,
    bias, grammar.

    Attributes:
        start: position of the first generated token: what lies before it is the prompt.
        frequency_penalty: taken from a logit for each time that its token was generated.
        presence_penalty: taken from the logit of each token that was generated.
        repetition_penalty: divides positive logits and multiplies negative ones of all tokens on the path, those of the
            prompt too; 1 does nothing.
        logit_bias: at most `MAX_BIASES` of (token id, what is added to its logit), by rising ids.
        grammar: what the generated tokens must match; None for anything.
        end_tokens: ids that end the text, rising; under a grammar they are picked only where it accepts what there is.
    """

    start: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    end_tokens: tuple[int, ...] = ()

    @property
    def has_penalty(self) -> bool:
        """Whether a pick depends on which tokens came before."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def problem(self, vocab_size: int) -> tuple[str, str] | None:
        """What no session may ask for: the field and why; None where all is well.

        Args:
            vocab_size: token ids are below it.
        """
        penalty = f"must lie in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]"
        low, high = REPETITION
        ids = [token for token, _ in self.logit_bias]
        laws = (
            ("frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= MAX_PENALTY, penalty),
            ("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= MAX_PENALTY, penalty),
            (
                "repetition_penalty",
                self.repetition_penalty,
                low <= self.repetition_penalty <= high,
                f"must lie in [{low:g}, {high:g}]",
            ),
            ("logit_bias", f"{len(ids)} tokens", len(ids) <= MAX_BIASES, f"has at most {MAX_BIASES} tokens"),
            ("logit_bias", "others", _rise(ids, vocab_size), f"names each token id once, and all below {vocab_size}"),
            (
                "logit_bias",
                "others",
                all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias),
                f"adds within [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
            ),
            (
                "end_tokens",
                f"{len(self.end_tokens)} ids",
                len(self.end_tokens) <= MAX_END_TOKENS and _rise(self.end_tokens, vocab_size),
                f"are at most {MAX_END_TOKENS} ids below {vocab_size}",
            ),
        )
        for field, value, holds, law in laws:
            if not holds:
                return field, f"{law}, got {value}"
        if self.grammar is not None and not self.end_tokens:
            return "grammar", "needs a model with a token that ends its texts"
        return None if self.grammar is None else _grammar_problem(self.grammar)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tail picks a token. Design: docs/design/session-protocol.md.

    Attributes:
        seed: key of the Gumbel noise, below 2^64.
        temperature: finite; 0 is greedy.
        top_k: at least 1; None is no filter.
        top_p: in `[0, 1]`; None is no filter.
        min_p: in `[0, 1]`; None is no filter.
        multistep: pick by multi-step speculative sampling over `Sweep.guesses`, not by coupled noise.
        rules: those that depend on the path; None for none.
    """

    seed: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    multistep: bool = False
    rules: PickRules | None = None


@dataclass(frozen=True, slots=True)
class Want:
    """What a sweep asks for beside picks.

    Attributes:
        log_probs: the target's log-probability of each pick.
        hidden_rows: final hidden rows of the accepted path.
        top_log_probs: with `log_probs`: of so many of the target's likeliest tokens too.
        prompt_rows: final hidden rows of so many of the sweep's last nodes before `picks_from`: forced tokens.
    """

    log_probs: bool = False
    hidden_rows: bool = False
    top_log_probs: int = 0
    prompt_rows: int = 0


def _grammar_problem(grammar: Grammar) -> tuple[str, str] | None:
    if grammar.kind not in GRAMMAR_KINDS:
        return "grammar", f"there are {', '.join(GRAMMAR_KINDS)}, got {grammar.kind!r}"
    size = len(grammar.text.encode("utf-8", "replace"))
    if size > MAX_GRAMMAR_BYTES:
        return "grammar", f"has at most {MAX_GRAMMAR_BYTES} bytes, got {size}"
    return None


def _rise(ids: tuple[int, ...] | list[int], vocab_size: int) -> bool:
    """Whether token ids rise and lie within the vocabulary."""
    return all(0 <= token < vocab_size for token in ids) and all(a < b for a, b in pairwise(ids))
