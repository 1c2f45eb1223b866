"""Drafts that complete each other as one source: what they say about a node is averaged before anything is ranked.

Of independent sources the later one hears what the earlier one said of a few candidates. A boost-tuned draft
(`client.boost`) is right only together with the ones before it, so they speak with one voice, calibrated once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client.ranking import Ranker
from client.source import Places, Search, Source
from client.source_model import ModelSource
from swarm.chance import SoftmaxPrior
from swarm.ragged import RaggedModel
from swarm.tree import Lesson


class Listener(Ranker):
    """Hears what one draft says about nodes, and ranks nothing."""

    def __init__(self, vocab_tokens: int) -> None:
        super().__init__(vocab_tokens, SoftmaxPrior())
        self.nodes: tuple[int, ...] = ()
        self.logs = torch.empty(0)

    def add(self, search: Search, nodes: Sequence[int], logits: torch.Tensor) -> None:
        """Keep log-probabilities [nodes, vocab_tokens] of the newest nodes."""
        self.nodes, self.logs = tuple(nodes), logits[:, : self.vocab_tokens].float().log_softmax(dim=1)


class JointSource(Source):
    """Several models, each with KV of its own, asked about the same nodes."""

    weighs = True

    def __init__(self, models: Sequence[RaggedModel], vocab_tokens: int, window_tokens: int, ranker: Ranker) -> None:
        """Arguments as in `ModelSource`; window_tokens holds for all of them, so that they fall silent together."""
        self.ranker = ranker
        self._listeners = [Listener(vocab_tokens) for _ in models]
        self._members = [
            ModelSource(model, vocab_tokens, window_tokens, ranker=listener)
            for model, listener in zip(models, self._listeners, strict=True)
        ]

    def begin(self, search: Search) -> bool:
        """Each catches up with the sequence; candidates below its last token."""
        self.ranker.begin()
        return self._add(search, [member.begin(search) for member in self._members])

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """One pass of each for all nodes that there is room for."""
        return self._add(search, [member.expand(search, nodes) for member in self._members])

    def is_free(self, search: Search, node: int) -> bool:
        """Never."""
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """Every candidate below a node whose pick is known is a label."""
        return self.ranker.lesson(places)

    def forget(self) -> None:
        """All of them begin anew."""
        for member in self._members:
            member.forget()

    def _add(self, search: Search, passed: Sequence[bool]) -> bool:
        if not all(passed):
            return False
        [nodes] = {listener.nodes for listener in self._listeners}  # limits are the same for all
        self.ranker.add(search, nodes, torch.stack([listener.logs for listener in self._listeners]).mean(dim=0))
        return True
