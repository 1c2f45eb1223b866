"""A weight matrix as a GGUF file holds it. Each row is whole blocks, so it is decoded by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from swarm.models.stored.matrix import StoredMatrix

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from swarm.models.gguf.encodings import Encoding


class GgufMatrix(StoredMatrix):
    """Rows of blocks, uint8 [rows, bytes of a row], byte for byte those of the file."""

    def __init__(self, blocks: torch.Tensor, values: Encoding) -> None:
        self.blocks, self.values = blocks, values
        self.rows = blocks.shape[0]
        self.columns = blocks.shape[1] // values.block_bytes * values.block
        self.encoding = values.name

    def parts(self) -> Mapping[str, torch.Tensor]:
        """The blocks, which are all that lies in memory."""
        return {"blocks": self.blocks}

    def with_parts(self, parts: Mapping[str, torch.Tensor]) -> Self:
        """A matrix of these blocks."""
        return type(self)(parts["blocks"], self.values)

    def decode(self, start: int, end: int) -> torch.Tensor:
        """Rows `[start, end)` as float32 [end - start, columns]."""
        return self.values.decode(self.blocks[start:end])
