"""Where a model's tensors come from, under the names that its class has for them. Builds no model, fetches no file.

SafetensorsSource   tensors as they are
QuantisedSource     over another source: what a quantised format holds in several tensors is one again
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from swarm.base.errors import SwarmError, UnsupportedModel
from swarm.files.parts.byte_ranges import ByteRanges
from swarm.files.parts.reading import header_file, readable_file
from swarm.files.pretrained import TEXT_PART, unreadable_weights
from swarm.files.tensor_header import TensorHeader, tensor_headers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from transformers.core_model_loading import WeightRenaming

    from swarm.files.hub import Hub
    from swarm.files.stored.matrix import StoredMatrix

logger = logging.getLogger(__name__)
WRAPPED: Final = r"^(?:module\.|_orig_mod\.)+|(?<=\.)_orig_mod\."
"""What torch puts before names: of modules that are trained in parallel, or compiled."""
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


class StoredSize(NamedTuple):
    """What weights take that are held as they are stored.

    Attributes:
        weights: how many.
        size_bytes: as they are stored.
        bits: of a code, where they are integers on a line (`swarm.files.linear_codes`); else 0.
        width: columns that share a step.
    """

    weights: int
    size_bytes: int
    bits: int = 0
    width: int = 0


class WeightSource(Protocol):
    """Tensors of a checkpoint, under the names that transformers' class expects of a checkpoint."""

    @property
    def encoding(self) -> str:
        """What a numeric class calls the whole checkpoint's format: `[a-z][a-z0-9_]*`, at most 32 characters.

        The same for every span. Empty where tensors are as they are.
        """

    @property
    def has_codes(self) -> bool:
        """Whether all that is packed are integers on a line; the same for every span."""

    @property
    def files(self) -> Mapping[str, tuple[str, ...]]:
        """The files that hold each tensor, by the tensor's name; a packed tensor may lie in several."""

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
        """Read some tensors, whose files are there.

        Raises:
            UnsupportedModel: a file is damaged, or holds what its format does not allow.
        """

    def ranges(self, names: Iterable[str]) -> Mapping[str, ByteRanges]:
        """Where some tensors lie in each file that holds some, with the file's header.

        Raises:
            HubError: a header cannot be fetched.
            UnsupportedModel: a file is damaged.
        """

    def stored_sizes(self, name: str) -> tuple[StoredSize, ...]:
        """What the parts of a tensor take that is held as it is stored; none where it is not, or that is not known."""

    def encodings(self, name: str) -> Mapping[str, int]:
        """How many weights of a packed tensor are in each encoding; empty where they are the checkpoint's one."""


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """Tensors of safetensors files, as they are; of a multimodal model, those of its language model.

    Attributes:
        folder: where the files are, or come to be.
        files: the file that holds each tensor.
        hub: where headers are read of files that are not in the folder; None for a folder of the user's.
        encoding: as of `WeightSource`: none.
        has_codes: as of `WeightSource`.
        renamings: how transformers renames tensors of the whole model, where the language model is a part of it.
        headers: what was read of them, by file.
    """

    folder: Path
    model: str
    files: Mapping[str, tuple[str, ...]]
    hub: Hub | None = None
    encoding: str = ""
    has_codes: bool = False
    renamings: tuple[WeightRenaming, ...] = ()
    headers: dict[str, Mapping[str, TensorHeader]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        folder: Path,
        model: str,
        weight_map: Mapping[str, str],
        hub: Hub | None = None,
        renamings: tuple[WeightRenaming, ...] = (),
    ) -> SafetensorsSource:
        """A source of the files that an index names; tensors of what sees or hears are left out, with a line.

        Raises:
            UnsupportedModel: two tensors have one name, once what is put before names is left out.
        """
        found: dict[str, str] = {}
        whole = {stored: _whole_name(stored, renamings) for stored in weight_map}
        text = set(_text_only(whole.values()))
        for stored, one in whole.items():
            if one in text and found.setdefault(name := _text_name(one), stored) != stored:
                which = f"{found[name]} and {stored} name one tensor"
                raise UnsupportedModel(f"{model}: {which}; remove one of them")
        if count := len(whole) - len(found):
            logger.info("%s: %d tensors of what sees or hears are left out", model, count)
        files = {name: (weight_map[stored],) for name, stored in found.items()}
        return cls(folder, model, files, hub, renamings=renamings)

    def header(self, name: str) -> TensorHeader | None:
        """Type and shape of a tensor, from the header of its file; None where that cannot be read now."""
        file = self.files[name][0]
        if file not in self.headers:
            try:
                self.headers[file] = self._headers(file)
            except SwarmError:
                self.headers[file] = {}
        return self.headers[file].get(name)

    def ranges(self, names: Iterable[str]) -> Mapping[str, ByteRanges]:
        asked: dict[str, list[str]] = {}
        for name in names:
            asked.setdefault(self.files[name][0], []).append(name)
        for file in asked:
            if not self.headers.get(file):
                self.headers[file] = self._headers(file)
        return {file: self._ranges(file, own, self.headers[file]) for file, own in asked.items()}

    def _ranges(self, file: str, names: Iterable[str], headers: Mapping[str, TensorHeader]) -> ByteRanges:
        if missing := sorted(set(names) - headers.keys()):
            raise UnsupportedModel(f"{self.model}: {file} has no {missing[0]}, which its index names; fetch it again")
        first = min(header.start for header in headers.values())
        ends = ((headers[name].start, headers[name].start + headers[name].size_bytes) for name in names)
        return ByteRanges.of([(0, first), *ends])

    def _headers(self, file: str) -> Mapping[str, TensorHeader]:
        try:
            here = header_file(self.folder / file, file, self.hub)
            if here is None and self.hub is not None:
                read = self.hub.tensor_headers(file)
            else:
                read = tensor_headers(here or self.folder / file)
        except (OSError, ValueError) as error:
            raise unreadable_weights(self.model, self.folder / file, error) from error
        return {self._name(one): header for one, header in read.items()}

    def _name(self, stored: str) -> str:
        """What the language model's class calls a tensor of a file."""
        return _text_name(_whole_name(stored, self.renamings))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
        asked = set(names)
        found: dict[str, torch.Tensor | StoredTensor] = {}
        for file in sorted({file for name in asked for file in self.files[name]}):
            path = self._readable(file, [name for name in asked if file in self.files[name]])
            try:
                with safe_open(path, framework="pt") as opened:
                    stored = {self._name(name): name for name in opened.keys()}  # noqa: SIM118 - it is no dict
                    found |= {name: opened.get_tensor(stored[name]) for name in asked & stored.keys()}
            except (OSError, SafetensorError) as error:
                raise unreadable_weights(self.model, path, error) from error
        return found

    def _readable(self, file: str, names: Iterable[str]) -> Path:
        """The file, or the part of it that has these tensors, as its own header says."""

        def needed() -> ByteRanges:
            if header_file(self.folder / file, file, self.hub) is None:
                raise UnsupportedModel(f"{self.model}: the header of {file} is not here; start again to fetch it")
            return self._ranges(file, names, self._headers(file))

        return readable_file(self.folder / file, file, self.hub, needed, self.model)

    def stored_sizes(self, name: str) -> tuple[StoredSize, ...]:
        """As `WeightSource.stored_sizes`: nothing is packed."""
        return ()

    def encodings(self, name: str) -> Mapping[str, int]:
        """As `WeightSource.encodings`: nothing is packed."""
        return {}


def decoded(tensors: Mapping[str, torch.Tensor | StoredTensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Plain tensors of those that were read: packed ones in this type, others in their own."""
    return {
        name: tensor.decode(dtype) if isinstance(tensor, StoredTensor) else tensor for name, tensor in tensors.items()
    }


def _text_only(names: Collection[str]) -> Collection[str]:
    """Of a model that also sees or hears, the language model's tensors.

    Layers that predict further tokens stay: a drafter may use them.
    """
    if not any(re.search(TEXT_PART, name) for name in names):
        return names
    return [name for name in names if re.search(rf"{TEXT_PART}|lm_head|(?:^|[._])mtp[._]", name)]


def _whole_name(tensor: str, renamings: Iterable[WeightRenaming]) -> str:
    """What the class of a whole model calls a tensor of its checkpoints."""
    for one in renamings:
        tensor = one.rename_source_key(tensor)[0]
    return tensor


def _text_name(tensor: str) -> str:
    """A tensor's name in the language model when it is alone, and neither compiled nor trained in parallel."""
    return re.sub(f"{WRAPPED}|{TEXT_PART}", "", tensor)
