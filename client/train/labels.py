"""What a target says about lines: hidden rows and distributions, which every training learns from. Trains nothing.

A target that lies here gives its whole distribution (`ModelLabels`). Through a swarm come its likeliest tokens and
their probabilities (`client.train.swarm_labels`): then the rest of the vocabulary counts as one more token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from swarm.inference.layers.pass_through import find_layers

MIN_REST = 1e-6
"""Probability of all tokens that are not named, at least: a logarithm is taken of it."""


@dataclass(frozen=True, slots=True)
class TargetLogs:
    """The target's distribution at n places.

    Attributes:
        logs: [n, k], log-probabilities.
        tokens: int64 [n, k], the likeliest tokens, best first; None where `logs` is of the whole vocabulary.
    """

    logs: torch.Tensor
    tokens: torch.Tensor | None = None

    def best(self) -> torch.Tensor:
        """The likeliest token at each place [n]."""
        return self.logs.argmax(dim=1) if self.tokens is None else self.tokens[:, 0]

    def sampled(self, noise: torch.Tensor) -> torch.Tensor:
        """The token that wins under noise [n, vocab_size] at each place [n], among those that are named."""
        if self.tokens is None:
            return (self.logs + noise).argmax(dim=1)
        won = (self.logs + noise.gather(1, self.tokens)).argmax(dim=1, keepdim=True)
        return self.tokens.gather(1, won)[:, 0]

    def divergence(self, ours: torch.Tensor) -> torch.Tensor:
        """KL(target ‖ ours) in nats at each place [n]; `ours` [n, vocab_size] are log-probabilities."""
        if self.tokens is None:
            return F.kl_div(ours, self.logs, log_target=True, reduction="none").sum(dim=1)
        probs = self.logs.exp()
        named = (probs * (self.logs - ours.gather(1, self.tokens))).sum(dim=1)
        if self.tokens.shape[1] == ours.shape[1]:
            return named
        rest = (1 - probs.sum(dim=1)).clamp_min(MIN_REST)
        our_rest = ours.scatter(1, self.tokens, -torch.inf).logsumexp(dim=1)
        return named + rest * (rest.log() - our_rest)


@dataclass(frozen=True, slots=True)
class TargetLabels:
    """What the target computes for lines.

    Attributes:
        tokens: int64 [n, t].
        known: bool [n, t], places of which there is a hidden row and a distribution.
        logs: [n, t, k], log-probabilities of what follows each place.
        top: int64 [n, t, k], the tokens that they are of; None where they are of the whole vocabulary.
        rows: [n, t, width], hidden rows before the final norm; None where nobody asked for them.
    """

    tokens: torch.Tensor
    known: torch.Tensor
    logs: torch.Tensor
    top: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class LabelSource(Protocol):
    """Gives the labels of lines."""

    @property
    def entries(self) -> torch.Tensor:
        """[lines, …], a row for each line; `labels` takes rows of it."""
        ...

    @property
    def device(self) -> torch.device:
        """Where labels lie, and drafts are trained."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the target's output matrix."""
        ...

    def labels(self, entries: torch.Tensor) -> TargetLabels:
        """The labels of some lines, on the device."""
        ...


@dataclass(slots=True)
class ModelLabels:
    """Labels of a target whose weights lie here.

    Attributes:
        target: frozen.
        lines: int32 [lines, tokens], sampled from it.
        with_rows: whether hidden rows are wanted too.
    """

    target: PreTrainedModel
    lines: torch.Tensor
    with_rows: bool
    _captured: list[torch.Tensor] = field(default_factory=list)

    @property
    def entries(self) -> torch.Tensor:
        """The lines themselves."""
        return self.lines

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.target.device

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        size: int = self.target.config.vocab_size
        return size

    @torch.no_grad()
    def labels(self, entries: torch.Tensor) -> TargetLabels:
        """One forward of the target."""
        tokens = entries.to(self.device, torch.long)
        hook = self._capture_rows() if self.with_rows else None
        try:
            logits: torch.Tensor = cast("Any", self.target)(tokens, use_cache=False).logits
        finally:
            if hook is not None:
                hook.remove()
        known = torch.ones_like(tokens, dtype=torch.bool)
        rows = self._captured.pop() if self.with_rows else None
        return TargetLabels(tokens, known, F.log_softmax(logits.float(), dim=2), None, rows)

    def _capture_rows(self) -> Any:  # noqa: ANN401 - torch's removable handle
        layers = self.target.get_submodule(find_layers(self.target))
        last = cast("nn.ModuleList", layers)[-1]
        return last.register_forward_hook(lambda _layer, _inputs, output: self._captured.append(output))
