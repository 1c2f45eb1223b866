"""How the tail picks a token, as values: noise and filters, and the rules that depend on the path to a node.

`swarm.compute` applies them, `swarm.protocol.wire` carries them. Owns no tensor and no grammar library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, get_args

from swarm.base.declared import RISING, RISING_PAIRS, Broken, ListForm, Rule, Size, Within, Written, below
from swarm.base.errors import LocalProtocolError
from swarm.protocol.limits import MAX_PROMPT_ROWS, MAX_TEMPERATURE, WORD_END, Natural, TokenNumber

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
MAX_CANDIDATES = 32
"""Tokens of a draft's distribution that travel, the most probable ones."""
MAX_DRAWS = 16
"""Children drawn after one node, repeats counted."""

PenaltyNumber = Annotated[float, Within(-MAX_PENALTY, MAX_PENALTY)]
Fraction = Annotated[float, Within(0.0, 1.0)]
ABOVE_0 = Rule("above 0", lambda value: value > 0)
MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0: logit / T stays finite for every float32 logit."""
WARM = Rule("0 or 1e-6 and more", lambda value: value == 0 or value >= MIN_TEMPERATURE)
Temperature = Annotated[float, Within(0.0, MAX_TEMPERATURE), WARM]
Biases = Annotated[
    tuple[tuple[TokenNumber, Annotated[float, Within(-MAX_BIAS, MAX_BIAS)]], ...],
    Size(MAX_BIASES),
    RISING_PAIRS,
    Written(columns=("bias_tokens", "biases")),
]
EndTokens = Annotated[tuple[TokenNumber, ...], Size(MAX_END_TOKENS), RISING]
GrammarText = Annotated[
    str,
    Rule(f"at most {MAX_GRAMMAR_BYTES} bytes", lambda text: len(text.encode("utf-8", "replace")) <= MAX_GRAMMAR_BYTES),
]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must match from its first token to its end.

    Attributes:
        kind: `json_schema`; `json` for any JSON object (its text is then ignored); `regex`; `lark`, a context-free
            grammar in the dialect of llguidance, which can also begin at a trigger in the middle of a text.
        text: of the schema, expression or grammar.
    """

    kind: GrammarKind
    text: GrammarText = ""


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

    start: Natural = 0
    frequency_penalty: PenaltyNumber = 0.0
    presence_penalty: PenaltyNumber = 0.0
    repetition_penalty: Annotated[float, Within(*REPETITION)] = 1.0
    logit_bias: Biases = ()
    grammar: Annotated[Grammar | None, Written(as_one=True)] = None
    end_tokens: EndTokens = ()

    @property
    def has_penalty(self) -> bool:
        """Whether a pick depends on which tokens came before."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def check(self) -> None:
        """Refuse a grammar that no text could end."""
        if self.grammar is not None and not self.end_tokens:
            raise Broken("grammar", "needs a model with a token that ends its texts")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tail picks a token. Design: docs/design/session-protocol.md.

    Attributes:
        seed: key of the Gumbel noise, below 2^64.
        temperature: 0 is greedy.
        top_k: None is no filter.
        top_p: None is no filter.
        min_p: None is no filter.
        multistep: pick by multi-step speculative sampling over `Sweep.guesses`, not by coupled noise.
        rules: those that depend on the path; None for none.
    """

    seed: Annotated[int, below(1 << 64)] = 0
    temperature: Temperature = 0.0
    top_k: Annotated[int, Within(1, WORD_END - 1)] | None = None
    top_p: Annotated[Fraction, ABOVE_0] | None = None
    min_p: Fraction | None = None
    multistep: bool = False
    rules: PickRules | None = None

    def problem(self, vocab_size: int) -> tuple[str, str] | None:
        """What no session may ask for: the field and why; None where all is well.

        Args:
            vocab_size: token ids are below it.
        """
        try:
            _form().check(self)
        except LocalProtocolError as error:
            return error.field, error.reason
        return self.beyond(vocab_size)

    def beyond(self, vocab_size: int) -> tuple[str, str] | None:
        """The field that names token ids that are none, and why; all else was held to its bounds by whoever decoded it.

        Args:
            vocab_size: token ids are below it.
        """
        rules = self.rules or PickRules()
        for field, ids in ("logit_bias", [token for token, _ in rules.logit_bias]), ("end_tokens", rules.end_tokens):
            if any(token >= vocab_size for token in ids):
                return field, f"must name token ids below {vocab_size}"
        return None


@cache
def _form() -> ListForm[Sampling]:
    return ListForm(Sampling, LocalProtocolError)


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
    top_log_probs: Annotated[int, Within(0, MAX_TOP_LOG_PROBS)] = 0
    prompt_rows: Annotated[int, Within(0, MAX_PROMPT_ROWS)] = 0


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """A draft's distribution after one node of a sweep, and what was drawn from it (SpecInfer, arXiv 2305.09781).

    Attributes:
        offset: the node's place in its sweep.
        tokens: [n], n <= MAX_CANDIDATES, each once: what could be drawn.
        weights: [n] finite float32 values above 0; draft probabilities are `weights / sum(weights)`.
        draws: at most MAX_DRAWS places in `tokens`, in the order of drawing; repeats count.
    """

    offset: int
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    draws: tuple[int, ...]

    def problem(self, vocab_size: int) -> str | None:
        """What is wrong with it, if anything."""
        count = len(self.tokens)
        if not 1 <= count <= MAX_CANDIDATES or len(self.weights) != count or len(set(self.tokens)) != count:
            return f"{count} tokens and {len(self.weights)} weights: as many, 1 to {MAX_CANDIDATES}, no token twice"
        if not all(0 <= token < vocab_size for token in self.tokens):
            return f"token ids must be below {vocab_size}"
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            return "weights must be finite and above 0"
        if len(self.draws) > MAX_DRAWS or not all(0 <= draw < count for draw in self.draws):
            return f"draws are at most {MAX_DRAWS} places in the {count} tokens"
        return None
