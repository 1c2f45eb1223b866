"""Does a pick follow from the final row that its tail names? Pure: owns no head, no session, no verdict on a machine.

    final row ──head──▶ logits ──rules, temperature, noise──▶ scores     gap = best score − score of the pick

A tail names the row itself, so this finds tails that pick otherwise than their own row says: that ignore the seed, the
rules, or favour a token. It is consistency, not truth: a row can be made for a pick.

Picks are judged by their gap and never by being another token: where two scores are near, rounding decides. Filters cut
at a place that rounding moves, too. So the best score is taken over what a filter surely keeps, and a pick counts as
kept wherever it may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from swarm.base.ids import TreeNodeId
from swarm.compute.gumbel import gumbel_row
from swarm.compute.path_rules import NodeMasks, PathRules
from swarm.protocol.numeric_class import NumericClass
from swarm.protocol.pick_rules import Sampling
from swarm.protocol.session import Limits, SessionState

BOUNDS: Final = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625}
"""By compute type, the largest gap of an honest pick, in logits of up to `UNIT`: docs/decisions/0092, 0094."""
UNIT: Final = 32.0
"""Numbers are as coarse as they are large: beyond it bounds grow with the largest logit."""


@dataclass(frozen=True, slots=True)
class NamedPicks:
    """Picks along one text.

    Attributes:
        tokens: of the text, the prompt's and those that were picked.
        places: [n] where in it the tokens stand after which was picked; the pick after place p is `tokens[p + 1]`.
        sampling: how they were to be picked: not by multi-step sampling.
        valid_tokens: ids from here on are padding.
        masks: what the text's grammar takes, by place; None without one.
    """

    tokens: Sequence[int]
    places: Sequence[int]
    sampling: Sampling
    valid_tokens: int
    masks: NodeMasks | None = None


@lru_cache(64)
def bound_of(numeric_class: str) -> float | None:
    """The largest gap of an honest pick of a machine of this class; None where `why_unjudged` says why."""
    found = NumericClass.parse(numeric_class)
    return None if found is None or why_unjudged(numeric_class) else BOUNDS[found.dtype]


def why_unjudged(numeric_class: str) -> str:
    """Why picks of a class are not judged, for people; empty where they are.

    A head of weights in fewer bits is repeated as a CPU multiplies with it. How far a card's product of such weights
    lies from that was not measured.
    """
    found = NumericClass.parse(numeric_class)
    if found is None or found.dtype not in BOUNDS:
        return f"how honest picks of {numeric_class} differ is not known"
    if found.device != "cpu" and (found.weights or (found.stored and found.kernels)):
        return f"heads of {numeric_class} are not computed on a CPU"
    return ""


@torch.inference_mode()
def pick_gaps(logits: Tensor, named: NamedPicks, bound: float) -> list[float]:
    """How far the score of each pick lies below the best one, in logits of `UNIT`; below 0 for none that is better.

    Args:
        logits: float32 [n, vocab_size], of the final row at each place; changed in place.
        named: the picks.
        bound: how far the checker's logits may lie from the tail's: filters cut at a place as uncertain.

    Returns:
        [n]; infinite where rules or filters exclude the pick, or a row is not finite.
    """
    sampling, tokens = named.sampling, named.tokens
    picks = torch.tensor([tokens[place + 1] for place in named.places])
    scale = (logits.abs().amax(dim=1).double() / UNIT).clamp_(min=1.0)  # [n]
    if sampling.rules is not None:
        vocab_size = logits.shape[1]
        state = SessionState.begun(Limits(vocab_size, len(tokens) + 1, 1, 1), tokens, ())
        PathRules(sampling.rules).apply(logits, [TreeNodeId(place) for place in named.places], state, named.masks)
        scale *= max(sampling.rules.repetition_penalty, 1 / sampling.rules.repetition_penalty)
    logits = logits[:, : named.valid_tokens].double()
    temperature = sampling.temperature or 1.0
    scaled = logits / temperature
    slack = (bound / temperature) * scale
    sure, possible = _kept(scaled, sampling, slack)
    scores = scaled.clone()
    if sampling.temperature:
        for row, place in enumerate(named.places):
            scores[row] += torch.from_numpy(gumbel_row(sampling.seed, place + 1, scores.shape[1]))
    best = scores.masked_fill(~sure, -math.inf).amax(dim=1)
    own = scores.masked_fill(~possible, -math.inf).gather(1, picks.clamp(max=scores.shape[1] - 1)[:, None])[:, 0]
    best = torch.where(sure.any(dim=1), best, own)  # nothing is sure to be kept: near ties at the top of a tight filter
    gaps = (best - own) * temperature / scale
    found: list[float] = torch.where(own.isfinite() & (picks < scores.shape[1]), gaps, math.inf).tolist()
    return found


def _kept(scaled: Tensor, sampling: Sampling, slack: Tensor) -> tuple[Tensor, Tensor]:
    """What the filters surely keep, and what they may keep, where each logit lies within `slack` of the tail's.

    Args:
        scaled: float64 [n, vocab_size], logits over the temperature.
        slack: float64 [n], over the temperature too.

    Returns:
        Two masks [n, vocab_size].
    """
    finite = scaled > -math.inf
    sure, possible = finite.clone(), finite.clone()
    if not sampling.temperature:
        return sure, possible
    near = 2 * slack[:, None]  # two logits may come nearer by so much
    top = scaled.amax(dim=1, keepdim=True)
    count = min(sampling.top_k or scaled.shape[1], scaled.shape[1])
    has_nucleus = sampling.top_p is not None and sampling.top_p < 1
    if count < scaled.shape[1] or has_nucleus:
        ordered = scaled.sort(dim=1, descending=True).values
    if count < scaled.shape[1]:
        last, after = ordered[:, count - 1 : count], ordered[:, count : count + 1]
        sure &= scaled > after + near
        possible &= scaled >= last - near
    if sampling.top_p is not None and has_nucleus:
        weights = (ordered[:, :count] - top).exp()
        mass = torch.nn.functional.pad(weights.cumsum(dim=1), (1, 0)) / weights.sum(dim=1, keepdim=True)
        rising = ordered[:, :count].flip(1).contiguous()
        above = count - torch.searchsorted(rising, (scaled + near).contiguous(), right=True)  # surely before it
        beside = count - torch.searchsorted(rising, (scaled - near).contiguous())  # may be before it, itself included
        own = (scaled - top).exp() / weights.sum(dim=1, keepdim=True)
        sure &= (mass.gather(1, beside) - own) * (2 * near).exp() < sampling.top_p
        possible &= mass.gather(1, above) * (-2 * near).exp() < sampling.top_p
    if sampling.min_p:
        least = top + math.log(sampling.min_p)
        sure &= scaled >= least + near
        possible &= scaled >= least - near
    return sure, possible | (finite & (scaled >= top - near))  # filters keep the best one, whichever of these that is
