"""Parts that OpenAI's answers share: names, usage, log-probabilities. Plain JSON values."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from client.api.backend import Finished, ModelCard
from client.stats import Result, TokenLogProbs

LEAST_LOG_PROB: Final = -9_999.0
"""What stands for minus infinity, which JSON does not have."""


def new_id(prefix: str) -> str:
    """A name that nothing else has."""
    return f"{prefix}-{secrets.token_hex(14)}"


def fingerprint(card: ModelCard) -> str:
    """`system_fingerprint`: the same weights have the same."""
    return f"fp_{card.fingerprint[:10]}"


def usage(prompt_tokens: int, ends: Iterable[Finished], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Of all choices of one request.

    Accepted predictions are drafted tokens that the target picked; rejected ones are the other nodes of the trees.

    Args:
        prompt_tokens: of every prompt once.
        ends: of the choices.
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


def chat_log_probs(log_probs: Sequence[TokenLogProbs], token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def one(token: int, log_prob: float) -> dict[str, Any]:
        written = token_bytes(token)
        return {
            "token": written.decode(errors="replace"),
            "logprob": max(log_prob, LEAST_LOG_PROB),
            "bytes": list(written),
        }

    content = [
        {
            **one(entry.token, entry.log_prob),
            "top_logprobs": [one(token, log_prob) for token, log_prob in entry.top],
        }
        for entry in log_probs
    ]
    return {"content": content, "refusal": None}


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
