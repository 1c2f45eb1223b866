"""Boost-tuning: each next draft learns what the earlier ones miss, so that together they guess more than copies would.

    loss = Σ weight · KL(target_probs ‖ own_probs) / Σ weight
    weight of a place: 1 where no earlier draft has the target's likeliest token on top, FOUND elsewhere

Drafts that draft together need not know of each other: the later one hears what the earlier ones said
(`client.drafting.search.ranking`) and learns what that is stop_rule. SpecInfer leaves out the places that were found
altogether; a little of them keeps the draft's chances sound there, which trees with several candidates of each draft
need.

Source: SpecInfer (arXiv 2305.09781), section 3: collective boost-tuning of several small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from client.train.draft_model import DraftTraining, is_found, log_probs
from swarm.errors import ConfigError, IncompatibleDraft

FOUND = 0.2
"""Weight of a place where an earlier draft is right already."""


@dataclass(slots=True)
class BoostTraining(DraftTraining):
    """Trains the draft that comes after some others; its score is theirs together.

    earlier: those, with the same vocabulary.
    """

    earlier: Sequence[PreTrainedModel] = ()

    def __post_init__(self) -> None:
        if not self.earlier:
            raise ConfigError("boost: name the drafts that come before; the first one is trained as any other")
        tokens = self.target.config.vocab_size
        for number, draft in enumerate(self.earlier):
            if draft.config.vocab_size != tokens:
                theirs = draft.config.vocab_size
                raise IncompatibleDraft(
                    f"earlier draft {number} has {theirs} tokens, the target {tokens}; leave it out"
                )

    def _logs(self, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        ours, theirs = DraftTraining._logs(self, tokens)  # super() does not know a class with slots
        with torch.no_grad():
            return [*ours, *(log_probs(draft, tokens.to(self.target.device)) for draft in self.earlier)], theirs

    def _weights(self, drafts: Sequence[torch.Tensor], theirs: torch.Tensor) -> torch.Tensor:
        return torch.where(is_found(drafts[1:], theirs), FOUND, 1.0)
