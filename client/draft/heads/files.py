"""A head on disk: config.json and model.safetensors, and the few tensors that it borrows from the target.

Trained heads: small networks that draft from the target's last hidden row.

    begin(rows, tokens)   a state from hidden rows and the certain tokens that follow them
    step(state, tokens)   the state one token on
    score(rows, state)    logits of what comes next

All three work on batches: beams, frontier nodes, or training data. Rows are those of the target's last layer, before
the final norm.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from swarm.base.errors import UnsupportedModel
from swarm.files.hub import Hub, find_model
from swarm.files.model_config import read_config
from swarm.files.stored.opening import open_source
from swarm.files.stored.source import StoredTensor, WeightSource, decoded
from swarm.files.tensor_files import fetch_tensors

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


logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAX_CONFIG_BYTES = 65_536


def read_head_config(model: str | Path) -> HeadConfig | None:
    """The config of a head's folder or hub id; None where it is a model's.

    Raises:
        UnknownModel: there is no such folder or id.
        UnsupportedModel: a head that this version does not know.
    """
    folder, _ = find_model(model)
    try:
        with (folder / CONFIG).open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None  # loading it as a model then says what is wrong with it
    if not isinstance(content, dict) or "canopy_head" not in content:
        return None
    return HeadConfig.parse(content, str(model))


def load_head(model: str | Path, config: HeadConfig, target: str | Path, revision: str | None = None) -> Head:
    """Load a head, and the tensors that it borrows from the target's checkpoint.

    Raises:
        UnsupportedModel: weights that do not fit the config, or a target without the tensors that are borrowed.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model)
    if hub is not None:
        hub.fetch([WEIGHTS])
    head = make_head(config)
    try:
        weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{model}: {WEIGHTS} cannot be read ({error}); fetch it again") from error
    borrowed = load_tensors(target, set(config.borrowed.values()), revision)
    matrices = {name: borrowed[tensor] for name, tensor in config.borrowed.items()}
    matrices |= {name: weights.pop(name) for name in (EMBEDDING, OUTPUT) if name in weights and name not in matrices}
    if EMBEDDING in matrices and not config.borrowed:
        matrices.setdefault(OUTPUT, matrices[EMBEDDING])  # one that was learned here is both
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UnsupportedModel(f"{model}: its weights do not fit its config.json ({reason})") from None
    for name in (EMBEDDING, OUTPUT):
        shape = (config.vocab_size, config.hidden_size)
        if name not in matrices or tuple(matrices[name].shape) != shape:
            raise UnsupportedModel(f"{model}: no {name} matrix of {shape[0]} × {shape[1]}, its own or the target's")
        setattr(head, name, matrices[name])
    return head.eval().requires_grad_(requires_grad=False)


def save_head(head: Head, folder: Path) -> int:
    """Write a head in bfloat16, without the matrices that it borrows. Returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    for name in (EMBEDDING, OUTPUT):
        weights.pop(name, None)
        if name not in head.config.borrowed:
            weights[name] = head.matrix(name).detach().to(torch.bfloat16).clone()
    if head.matrix(OUTPUT) is head.matrix(EMBEDDING) and not head.config.borrowed:
        del weights[OUTPUT]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(head.config.to_json(), indent=1) + "\n", encoding="utf-8")
    return (folder / WEIGHTS).stat().st_size


def load_tensors(model: str | Path, names: Collection[str], revision: str | None = None) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint as float32, as `read_tensors` finds them.

    Raises:
        UnsupportedModel: the checkpoint has no such tensor.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    return {name: one.float() for name, one in read_tensors(model, names, revision, torch.float32).items()}


def stored_names(model: str | Path, revision: str | None = None) -> Collection[str]:
    """The tensors of a checkpoint as the model's class calls them, whatever they are stored in.

    Raises:
        UnsupportedModel: the weights are of no format that is read.
        HubError: the hub refuses, or cannot be reached.
    """
    return _source(model, revision)[0].files.keys()


def read_tensors(
    model: str | Path, names: Collection[str], revision: str | None = None, packed: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint; no other is read, and of the hub only what holds them is fetched.

    Args:
        model: folder, GGUF file or hub id.
        names: as the model's class calls them.
        revision: on the hub.
        packed: type to which those are decoded that are stored in fewer bits; all others keep their own.

    Raises:
        UnsupportedModel: the checkpoint has no such tensor.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    return decoded(read_stored(model, names, revision), packed) if names else {}


def read_stored(
    model: str | Path, names: Collection[str], revision: str | None = None
) -> dict[str, torch.Tensor | StoredTensor]:
    """As `read_tensors`, with what is stored in fewer bits as it is."""
    source, hub = _source(model, revision)
    for name in names:
        if name not in source.files:
            raise UnsupportedModel(f"{model}: its checkpoint has no tensor {name!r}, which the head borrows")
    if hub is not None:
        fetch_tensors(source, hub, names)
    read = source.read(names)
    size = sum(one.matrix.size_bytes if isinstance(one, StoredTensor) else one.nbytes for one in read.values())
    logger.info("%s: %d of its tensors read, %d bytes", model, len(read), size)
    return read


def _source(model: str | Path, revision: str | None) -> tuple[WeightSource, Hub | None]:
    folder, hub = find_model(model, revision)
    return open_source(folder, hub, read_config(folder, str(model)), str(model)), hub
