"""Boost-tuning: each next draft learns what the earlier ones miss, so that together they guess more than copies would.

    loss = Σ weight · KL(target_probs ‖ own_probs) / Σ weight
    weight of a place: 1 where no earlier draft has the target's likeliest token on top, FOUND_WEIGHT elsewhere

Drafts that work together need not know of each other: the ranker of a later one sees what the earlier ones propose
(`client.drafting.search.ranking`) and learns how far to believe it. SpecInfer leaves out the places that were found
altogether; a small weight there keeps the draft's probabilities sound, which trees with several candidates per draft
need.

Source: SpecInfer (arXiv 2305.09781), section 3: collective boost-tuning of several small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from client.train.draft_model import Compared, DraftTraining, is_agreed, log_probs
from swarm.errors import ConfigError, IncompatibleDraft

FOUND_WEIGHT = 0.2
"""Weight of a place where an earlier draft is right already."""


@dataclass(slots=True)
class BoostTraining(DraftTraining):
    """Trains the draft that comes after some others; its score is that of all of them together.

    Attributes:
        earlier: the others, with the same vocabulary.
    """

    earlier: Sequence[PreTrainedModel] = ()

    def __post_init__(self) -> None:
        if not self.earlier:
            raise ConfigError("boost: name the drafts that come before; the first one is trained as any other")
        tokens = self.source.vocab_size
        for number, draft in enumerate(self.earlier):
            if draft.config.vocab_size != tokens:
                size = draft.config.vocab_size
                raise IncompatibleDraft(f"earlier draft {number} has {size} tokens, the target {tokens}; leave it out")

    def _draft_logs(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        # super() does not work in a dataclass with slots.
        own = DraftTraining._draft_logs(self, tokens)
        with torch.no_grad():
            return [*own, *(log_probs(draft, tokens) for draft in self.earlier)]

    def _weights(self, found: Compared) -> torch.Tensor:
        return torch.where(is_agreed(found.drafts[1:], found.target.best()), FOUND_WEIGHT, 1.0)
