"""Weights of 16 bits in a model that computes in 32: what a quantised checkpoint leaves as it was. Exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from swarm.models.stored.matrix import PartedMatrix, bits_of
from swarm.models.stored.source import StoredTensor

TYPES: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class HalfMatrix(PartedMatrix):
    """A matrix of bfloat16 or float16.

    Attributes:
        rows: as of `StoredMatrix`.
        columns: as of `StoredMatrix`.
        encoding: `bf16` or `f16`.
        codes: int16 [rows, columns], the numbers' bits.
        kind: their type.
    """

    kind: torch.dtype

    def decode(self, start: int, end: int) -> torch.Tensor:
        """As `StoredMatrix.decode`."""
        return self.codes[start:end].view(self.kind).float()


def as_half(tensor: torch.Tensor) -> StoredTensor:
    """A tensor [..., rows, columns] of 16 bits as a stored one."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    encoding = "bf16" if tensor.dtype is torch.bfloat16 else "f16"
    matrix = HalfMatrix(len(flat), flat.shape[1], encoding, bits_of(flat), tensor.dtype)
    return StoredTensor(matrix, tuple(tensor.shape))
