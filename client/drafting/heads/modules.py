"""Trained heads: small networks that draft from the target's last hidden row.

    begin(rows, tokens)   a state from hidden rows and the certain tokens that follow them
    step(state, tokens)   the state one token on
    score(rows, state)    logits of what comes next

All three work on batches: beams, frontier nodes, or training data. Rows are those of the target's last layer, before
the final norm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from swarm.errors import UnsupportedModel

HeadKind = Literal["redrafter", "dgf"]
EMBEDDING, OUTPUT = "embedding", "output"
"""The head's matrices [vocab_size, hidden_size], which may be the target's own."""
OWN_MATRIX_SCALE = 0.02
"""Standard deviation of a matrix before it is learned."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The head's config.json.

    Attributes:
        canopy_head: its kind.
        hidden_size: values of the target's hidden rows.
        vocab_size: rows of the target's output matrix.
        depth: residual blocks.
        tokenizer: digest of the target's.
        borrowed: from the head's matrices to the tensors of the target's checkpoint that stand for them.
    """

    canopy_head: HeadKind
    hidden_size: int
    vocab_size: int
    depth: int
    tokenizer: str
    borrowed: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """For config.json."""
        return asdict(self)

    @classmethod
    def parse(cls, content: dict[str, Any], name: str) -> HeadConfig:
        """From config.json.

        Raises:
            UnsupportedModel: says what is wrong with it.
        """
        try:
            config = cls(**content)
            sizes = (config.hidden_size, config.vocab_size, config.depth)
            fits = all(type(size) is int and 0 < size <= 1 << 20 for size in sizes)
            fits &= isinstance(config.borrowed, dict) and set(config.borrowed) <= {EMBEDDING, OUTPUT}
            fits &= all(isinstance(tensor, str) for tensor in config.borrowed.values())
        except TypeError as error:
            raise UnsupportedModel(f"{name}: its config.json is no head's ({error})") from None
        if config.canopy_head not in get_args(HeadKind):
            kinds = " and ".join(get_args(HeadKind))
            raise UnsupportedModel(f"{name}: a head of kind {config.canopy_head!r}; this version knows {kinds}")
        if not fits:
            raise UnsupportedModel(f"{name}: its config.json has a size, depth or tensor name that cannot be")
        return config


class Head(nn.Module):
    """What every kind has: embedding and output matrices, and norms."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.row_norm = RowNorm(width, eps=1e-5)
        self.token_norm = RowNorm(width, eps=1e-5)
        self.out_norm = RowNorm(width, eps=1e-5)
        self.register_buffer(EMBEDDING, torch.zeros(config.vocab_size, width), persistent=False)
        self.register_buffer(OUTPUT, torch.zeros(config.vocab_size, width), persistent=False)

    def begin(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States [n, width] from hidden rows [n, hidden_size] and the token after each."""
        raise NotImplementedError

    def step(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States [n, width] after one token more."""
        raise NotImplementedError

    def score(self, rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of the next token; `rows` are those that `begin` had."""
        raise NotImplementedError

    def matrix(self, name: str) -> torch.Tensor:
        """The matrix `EMBEDDING` or `OUTPUT`: a buffer, or a parameter while it is learned."""
        found: torch.Tensor = getattr(self, name)
        return found

    def learn_matrix(self) -> None:
        """Have a matrix of the head's own from now on, embedding and output matrix in one, which training changes."""
        weight = nn.Parameter(torch.randn(self.config.vocab_size, self.config.hidden_size) * OWN_MATRIX_SCALE)
        for name in (EMBEDDING, OUTPUT):
            delattr(self, name)
            self.register_parameter(name, weight)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed embeddings [n, hidden_size]."""
        found: torch.Tensor = self.token_norm(F.embedding(tokens, self.matrix(EMBEDDING)))
        return found

    def logits(self, values: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of values [n, hidden_size]."""
        return F.linear(self.out_norm(values), self.matrix(OUTPUT))


class ReDrafterHead(Head):
    """A recurrent drafter on one hidden row.

    s_t = SiLU(W·emb(token) + U·s_(t−1)); logits from [row; s_t] through residual blocks.
    Source: ReDrafter (arXiv 2403.09919), section 3.1.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.token_in = nn.Linear(width, width)
        self.state_in = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(config.depth))
        self.out = nn.Linear(2 * width, width)

    def begin(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """A state of the first token alone; the row enters with every score."""
        return F.silu(self.token_in(self.embed(tokens)))

    def step(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The recurrent cell."""
        return F.silu(self.token_in(self.embed(tokens)) + self.state_in(state))

    def score(self, rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Logits of [row; state] through the residual blocks."""
        values = torch.cat([self.row_norm(rows), state], dim=1)
        for block in self.blocks:
            values = values + F.silu(block(values))
        return self.logits(self.out(values))


class DgfHead(Head):
    """Predicts the next hidden row from this one and the next token, by dynamic gating fusion, again and again.

    h1 = h·W1; h2 = SiLU(LN(e)·W2); z = σ([h1; h2]·Wz); out = z⊙h1 + (1−z)⊙h2; then `depth` gated MLP blocks.
    Source: Dovetail (arXiv 2412.18934), section on dynamic gating fusion. Its drafter attends to the rows before; this
    one has no attention, since the target's row depends on the whole text already.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.row_in = nn.Linear(width, width, bias=False)
        self.token_in = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(2 * width, width)
        self.blocks = nn.ModuleList(DgfBlock(width) for _ in range(config.depth))

    def begin(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The predicted row of the token."""
        return self.step(rows, tokens)

    def step(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The predicted row of one more token, from a predicted row instead of the target's."""
        row = self.row_in(self.row_norm(state))
        token = F.silu(self.token_in(self.embed(tokens)))
        gate = torch.sigmoid(self.gate(torch.cat([row, token], dim=1)))
        values: torch.Tensor = gate * row + (1 - gate) * token
        for block in self.blocks:
            values = block(values)
        return values

    def score(self, rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The target's own way from a row to logits, with a norm that was learned."""
        return self.logits(state)


class RowNorm(nn.RMSNorm):
    """A norm in its weight's type, whatever type comes in: training may run products in a narrower one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] to [n, width]."""
        return super().forward(x.to(self.weight.dtype))


class DgfBlock(nn.Module):
    """x + down(SiLU(gate(norm(x))) ⊙ up(norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RowNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[n, width] to [n, width]."""
        inner = self.norm(values)
        out: torch.Tensor = values + self.down(F.silu(self.gate(inner)) * self.up(inner))
        return out


def make_head(config: HeadConfig) -> Head:
    """A new head of a kind, without the matrices that it borrows."""
    return ReDrafterHead(config) if config.canopy_head == "redrafter" else DgfHead(config)
