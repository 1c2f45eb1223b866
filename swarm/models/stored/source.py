"""Where a model's tensors come from, under the names that its class has for them. Builds no model, fetches no file.

SafetensorsSource   tensors as they are
QuantisedSource     over another source: what a quantised format holds in several tensors is one again
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from swarm.errors import SwarmError
from swarm.models.pretrained import TEXT_PART, unreadable_weights
from swarm.models.tensor_header import TensorHeader, tensor_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from swarm.models.hub import Hub
    from swarm.models.stored.matrix import StoredMatrix

PIECE: Final = 1 << 22
"""Weights that are decoded at a time, where a whole matrix is wanted."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint holds packed.

    Attributes:
        matrix: its rows; those of several experts lie one below the other.
        shape: of the tensor as it is stored: its last dimension is the matrix's columns.
        is_transposed: whether the model's class has the last two dimensions the other way round.
    """

    matrix: StoredMatrix
    shape: tuple[int, ...]
    is_transposed: bool = False

    def decode(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole tensor, as the model's class has it."""
        matrix = self.matrix
        out = torch.empty(matrix.rows, matrix.columns, dtype=dtype)
        at_once = max(1, PIECE // max(1, matrix.columns))
        for start in range(0, matrix.rows, at_once):
            end = min(start + at_once, matrix.rows)
            out[start:end] = matrix.decode(start, end)
        shaped = out.view(self.shape)
        return shaped.transpose(-1, -2).contiguous() if self.is_transposed else shaped


StoredSize = tuple[int, int]
"""How many weights are held as they are stored, and their bytes."""


class WeightSource(Protocol):
    """Tensors of a checkpoint, under the names that transformers' class expects of a checkpoint."""

    @property
    def encoding(self) -> str:
        """What a numeric class calls the whole checkpoint's format: `[a-z][a-z0-9_]*`, at most 32 characters.

        The same for every span. Empty where tensors are as they are.
        """

    @property
    def files(self) -> Mapping[str, tuple[str, ...]]:
        """The files that hold each tensor, by the tensor's name; a packed tensor may lie in several."""

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
        """Read some tensors, whose files are there.

        Raises:
            UnsupportedModel: a file is damaged, or holds what its format does not allow.
        """

    def stored_size(self, name: str) -> StoredSize | None:
        """How large a tensor is that is held as it is stored; None where it is not, or where that is not known."""


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """Tensors of safetensors files, as they are; of a multimodal model, those of its language model.

    Attributes:
        folder: where the files are, or come to be.
        model: its name, for messages.
        files: the file that holds each tensor.
        hub: where headers are read of files that are not in the folder; None for a folder of the user's.
        encoding: as of `WeightSource`: none.
        headers: what was read of them, by file.
    """

    folder: Path
    model: str
    files: Mapping[str, tuple[str, ...]]
    hub: Hub | None = None
    encoding: str = ""
    headers: dict[str, Mapping[str, TensorHeader]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, model: str, weight_map: Mapping[str, str], hub: Hub | None = None) -> SafetensorsSource:
        """A source of the files that an index names."""
        return cls(folder, model, {name: (file,) for name, file in _text_only(weight_map).items()}, hub)

    def header(self, name: str) -> TensorHeader | None:
        """Type and shape of a tensor, from the header of its file; None where that cannot be read now."""
        file = self.files[name][0]
        if file not in self.headers:
            try:
                read = tensor_headers(self.folder / file) if (self.folder / file).exists() else self._remote(file)
            except (OSError, ValueError, SwarmError):
                read = {}
            self.headers[file] = {_text_name(one): header for one, header in read.items()}
        return self.headers[file].get(name)

    def _remote(self, file: str) -> Mapping[str, TensorHeader]:
        return {} if self.hub is None else self.hub.tensor_headers(file)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
        """As `WeightSource.read`."""
        asked = set(names)
        found: dict[str, torch.Tensor | StoredTensor] = {}
        for file in sorted({file for name in asked for file in self.files[name]}):
            try:
                with safe_open(self.folder / file, framework="pt") as opened:
                    stored = {_text_name(name): name for name in opened.keys()}  # noqa: SIM118 - it is no dict
                    found |= {name: opened.get_tensor(stored[name]) for name in asked & stored.keys()}
            except (OSError, SafetensorError) as error:
                raise unreadable_weights(self.model, self.folder / file, error) from error
        return found

    def stored_size(self, name: str) -> StoredSize | None:
        """As `WeightSource.stored_size`: nothing is packed."""
        return None


def decoded(tensors: Mapping[str, torch.Tensor | StoredTensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Plain tensors of those that were read: packed ones in this type, others in their own."""
    return {
        name: tensor.decode(dtype) if isinstance(tensor, StoredTensor) else tensor for name, tensor in tensors.items()
    }


def _text_only(weight_map: Mapping[str, str]) -> Mapping[str, str]:
    """Of a model that also sees or hears, the language model, under the names that it has when it is alone."""
    if not any(re.search(TEXT_PART, name) for name in weight_map):
        return weight_map
    ours = (name for name in weight_map if re.search(TEXT_PART, name) or "lm_head" in name)
    return {_text_name(name): weight_map[name] for name in ours}


def _text_name(tensor: str) -> str:
    return re.sub(TEXT_PART, "", tensor)
