"""Boost-tuning: each next draft learns what the earlier ones miss, so that together they guess more than copies would.

Drafts that complete each other speak with one voice (`client.source_joint`): the mean of their log-probabilities. The
next draft is trained in that company, the others being as they are:

    loss = KL(target_probs ‖ softmax((log own_probs + Σ log earlier_probs) / drafts))

So where the earlier ones are right there is nothing to learn, and the less chance they give a token that the target
picks, the more it weighs. SpecInfer trains on the places alone where no earlier draft has the target's token on top:
that draft's chances are wrong everywhere else, which ruins trees that have several candidates of each draft.

Source: SpecInfer (arXiv 2305.09781), section 3: collective boost-tuning of several small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from client.train_draft import DraftTraining, log_probs
from swarm.errors import ConfigError, IncompatibleDraft


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

    def _logs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ours, theirs = DraftTraining._logs(self, tokens)  # super() does not know a class with slots
        with torch.no_grad():
            earlier = [log_probs(draft, tokens.to(self.target.device)) for draft in self.earlier]
        return F.log_softmax(torch.stack([ours, *earlier]).mean(dim=0), dim=1), theirs
