"""Rules of picks that depend on the path to a tree node: penalties, biases and grammars, exact for any tree.

A node's path is all committed tokens, then its ancestors and itself. What counts along the committed part is kept from
sweep to sweep; only the few tokens below it are counted per node. A logit is changed in one step from the model's own,
so a text is the same whether its tokens were committed or live: docs/design/session-protocol.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.base.ids import TreeNodeId
from swarm.protocol.pick_rules import PickRules
from swarm.protocol.session import CommittedToken, SessionState


class PathRules:
    """One session's rules at its tail, for as long as they stay the same."""

    def __init__(self, rules: PickRules) -> None:
        """Begin at the start of a text."""
        self.rules = rules
        self._base = _BaseCounts(rules.start)

    @torch.inference_mode()
    def apply(
        self, logits: Tensor, nodes: Sequence[TreeNodeId], state: SessionState, masks: NodeMasks | None = None
    ) -> None:
        """Change the logits after some nodes, in place.

        Args:
            logits: float32 [len(nodes), vocab_size]
            masks: what the grammar takes after each of these nodes; None where none is followed.
        """
        paths = NodePaths.of(nodes, state)
        if self.rules.has_penalty:
            self._penalise(logits, paths, state)
        if self.rules.logit_bias:
            tokens, biases = zip(*self.rules.logit_bias, strict=True)
            logits[:, list(tokens)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        if masks is not None:
            masks.block(logits, nodes)

    def _penalise(self, logits: Tensor, paths: NodePaths, state: SessionState) -> None:
        """The penalties: for tokens of the common part of all rows at once, then for each row's own tokens."""
        base, start = self._base, self.rules.start
        base.follow(state.committed, paths.length)
        rows: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        for row, path in enumerate(paths.below):
            generated = Counter(path[max(start - paths.length, 0) :])
            for token in dict.fromkeys(path):
                rows.append(row)
                tokens.append(token)
                counts.append(base.generated[token] + generated[token])
        own = logits[rows, tokens]  # before the common part changes: each logit is changed once
        common = list(base.all)
        if common:
            values = self._penalised(logits[:, common], [base.generated[token] for token in common])
            logits[:, common] = values
        if rows:
            logits[rows, tokens] = self._penalised(own, counts)

    def _penalised(self, logits: Tensor, counts: Sequence[int]) -> Tensor:
        """Logits [..., len(counts)] of tokens that stand on a path, generated so many times."""
        rules = self.rules
        values, times = logits.double(), torch.tensor(counts, dtype=torch.float64, device=logits.device)
        if rules.repetition_penalty != 1:
            values = torch.where(values < 0, values * rules.repetition_penalty, values / rules.repetition_penalty)
        values = values - (rules.frequency_penalty * times + rules.presence_penalty * (times > 0))
        return values.to(logits.dtype)


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """What a grammar takes after some nodes.

    Attributes:
        rows: which of the masks each node has.
        bits: uint8 [masks, ⌈vocab_size / 8⌉], a bit per token that may be picked, the lowest first.
    """

    rows: Mapping[TreeNodeId, int]
    bits: NDArray[np.uint8]

    @classmethod
    def of(cls, nodes: Sequence[TreeNodeId], chosen: Sequence[int], data: bytes, vocab_size: int) -> NodeMasks:
        """As a worker answers: which mask each node has, and the masks one after the other."""
        bits = np.frombuffer(data, dtype=np.uint8).reshape(-1, -(-vocab_size // 8))
        return cls(dict(zip(nodes, chosen, strict=True)), bits)

    def allows(self, node: TreeNodeId, token: int) -> bool:
        """Whether the token may be picked after the node."""
        return bool(self.bits[self.rows[node], token >> 3] >> (token & 7) & 1)

    def block(self, logits: Tensor, nodes: Sequence[TreeNodeId]) -> None:
        """Leave nothing else after these nodes, in place.

        Args:
            logits: float32 [len(nodes), vocab_size]
            nodes: of those that there are masks for.
        """
        blocked = np.invert(self.bits[[self.rows[node] for node in nodes]])
        bits = np.unpackbits(blocked, axis=1, count=logits.shape[1], bitorder="little")
        logits.masked_fill_(torch.from_numpy(bits).view(torch.bool).to(logits.device), -torch.inf)


class NodePaths:
    """The paths to some nodes: a committed part that they share, and the tokens below it.

    Attributes:
        length: committed tokens that all of them share.
        below: [nodes] each node's other tokens, downwards, its own included.
    """

    def __init__(self, length: int, below: list[list[int]]) -> None:
        self.length = length
        self.below = below

    @classmethod
    def of(cls, nodes: Sequence[TreeNodeId], state: SessionState) -> NodePaths:
        """Their paths in this state. A replay asks about committed nodes too (R6)."""
        committed = state.committed
        ends = [
            len(committed) if node in state.live else 1 + bisect_left(committed, node, key=lambda token: token.id)
            for node in nodes
        ]
        length = min(ends, default=len(committed))
        below = [[token.token for token in committed[length:end]] for end in ends]
        for node, path in zip(nodes, below, strict=True):
            if node in state.live:
                path += [state.live[above].token for above in state.path_to(node)]
        return cls(length, below)


class _BaseCounts:
    """How often tokens stand on a committed path; follows it as it grows and is cut.

    Attributes:
        generated: only those.
    """

    def __init__(self, start: int) -> None:
        self.all: Counter[int] = Counter()
        self.generated: Counter[int] = Counter()
        self._start = start
        self._path: list[CommittedToken] = []

    def follow(self, committed: Sequence[CommittedToken], length: int) -> None:
        """Count the first `length` committed tokens. Ids are never used again, so one id stands for all before it."""
        path = self._path
        kept = min(len(path), length)
        while kept and path[kept - 1].id != committed[kept - 1].id:
            kept -= 1
        while len(path) > kept:
            self._add(len(path) - 1, path.pop().token, -1)
        for place in range(kept, length):
            path.append(committed[place])
            self._add(place, committed[place].token, 1)

    def _add(self, place: int, token: int, change: int) -> None:
        for counter in (self.all, self.generated) if place >= self._start else (self.all,):
            counter[token] += change
            if not counter[token]:
                del counter[token]
