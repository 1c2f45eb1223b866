"""The tensors of a GGUF model under the names, and in the layout, of transformers' class for it.

Blocks stay as they are in the file: rows are put in another order at most. Files are mapped, so only what is asked for
is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from swarm.errors import UnsupportedModel
from swarm.models.gguf.config import ARCHITECTURES, MIXTRAL, Architecture
from swarm.models.gguf.folder import TensorTable
from swarm.models.parts.byte_ranges import ByteRange, ByteRanges
from swarm.models.parts.reading import readable_file
from swarm.models.pretrained import first_line
from swarm.models.stored.gguf_matrix import GgufMatrix
from swarm.models.stored.source import StoredSize, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

    from swarm.models.gguf.container import TensorPlace
    from swarm.models.hub import Hub

FUSED: Final = re.compile(r".*\.layers\.(?P<index>\d+)\..*experts\.gate_up_proj(?P<bias>_bias)?")
"""Gate and up of all experts in one tensor, which GGUF holds in two."""
QUERIES_KEYS: Final = re.compile(r"blk\.\d+\.attn_(?P<which>[qk])\.(?:weight|bias)")
UNREAD: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that went into the config."""


@dataclass(frozen=True, slots=True)
class GgufSource:
    """Tensors of a GGUF model.

    Attributes:
        folder: as `swarm.models.gguf.folder` makes it.
        model: its name, for messages.
        config: of the model, which is a language model alone.
        architecture: how its family is written.
        table: where its tensors lie.
        stored: llama.cpp's names of what a tensor is made of, by its name in the class.
        hub: whence its files come; None for files of the user's.
    """

    folder: Path
    model: str
    config: PreTrainedConfig
    architecture: Architecture
    table: TensorTable
    stored: Mapping[str, tuple[str, ...]]
    hub: Hub | None = None

    @classmethod
    def of(cls, folder: Path, config: PreTrainedConfig, model: str, hub: Hub | None = None) -> GgufSource:
        """The source of a model's folder.

        Raises:
            UnsupportedModel: Canopy cannot run its family, or it has tensors that the class has not.
        """
        table = TensorTable.read(folder)
        is_mixtral = config.model_type == MIXTRAL.model_type
        architecture = MIXTRAL if is_mixtral else ARCHITECTURES[table.family]
        stored = _stored_names(model, config, table)
        known = {name for names in stored.values() for name in names}
        if strange := sorted(table.places.keys() - known - set(UNREAD)):
            reason = f"{len(strange)} tensors that {architecture.model_class} does not have, such as {strange[0]}"
            raise UnsupportedModel(f"{model}: its file has {reason}; use the safetensors")
        return cls(folder, model, config, architecture, table, stored, hub)

    @property
    def encoding(self) -> str:
        """As `WeightSource.encoding`: files mix types, and the fingerprint says which file it is."""
        is_packed = any(place.encoding.dtype is None for _, place in self.table.places.values())
        return "gguf" if is_packed else ""

    @property
    def files(self) -> Mapping[str, tuple[str, ...]]:
        """As `WeightSource.files`."""
        return {name: tuple({self.table.places[one][0]: None for one in parts}) for name, parts in self.stored.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
        """As `WeightSource.read`."""
        asked = sorted(set(names))
        opened = {file: self._map(file, needed) for file, needed in self.ranges(asked).items()}
        return {name: self._tensor(name, opened) for name in asked}

    def ranges(self, names: Iterable[str]) -> Mapping[str, ByteRanges]:
        """As `WeightSource.ranges`: the table has it, and no file is opened."""
        places: dict[str, list[ByteRange]] = {}
        for stored in (one for name in names for one in self.stored[name]):
            file, place = self.table.places[stored]
            places.setdefault(file, []).append((place.start, place.start + place.size_bytes))
        return {file: ByteRanges.of([(0, self.table.first_byte(file)), *own]) for file, own in places.items()}

    def stored_size(self, name: str) -> StoredSize | None:
        """As `WeightSource.stored_size`: the table has it, and no file is opened."""
        places = [self.table.places[one][1] for one in self.stored[name]]
        if not all(len(place.shape) > 1 and self._stays(place) for place in places):
            return None
        return sum(place.rows * place.columns for place in places), sum(place.size_bytes for place in places)

    def _map(self, file: str, needed: ByteRanges) -> numpy.memmap[tuple[int], numpy.dtype[numpy.uint8]]:
        size = self.table.sizes[file]
        path = readable_file(self.folder / file, file, self.hub, lambda: needed, self.model)
        try:
            mapped = numpy.memmap(path, dtype=numpy.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise UnsupportedModel(
                f"{self.model}: {path.resolve()} cannot be read ({error}); fetch it again"
            ) from error
        if len(mapped) != size:
            found = f"{len(mapped)} bytes instead of {size}"
            raise UnsupportedModel(f"{self.model}: {path.resolve()} has {found}; fetch it again")
        return mapped

    def _tensor(
        self, name: str, opened: Mapping[str, numpy.memmap[tuple[int], numpy.dtype[numpy.uint8]]]
    ) -> torch.Tensor | StoredTensor:
        parts = [self._part(one, opened) for one in self.stored[name]]
        return parts[0] if len(parts) == 1 else self._fused(*parts)

    def _part(
        self, name: str, opened: Mapping[str, numpy.memmap[tuple[int], numpy.dtype[numpy.uint8]]]
    ) -> torch.Tensor | StoredTensor:
        """One tensor of a file, in the layout of the class."""
        file, place = self.table.places[name]
        raw = torch.from_numpy(numpy.array(opened[file][place.start : place.start + place.size_bytes]))
        rows = self._order(name, place)
        is_transposed = self._is_transposed(name, place)
        if len(place.shape) > 1 and self._stays(place):
            blocks = raw.view(place.rows, place.encoding.row_bytes(place.columns))
            matrix = GgufMatrix(blocks if rows is None else blocks[rows], place.encoding)
            return StoredTensor(matrix, place.shape, is_transposed)
        plain = self._plain(raw, place)
        if self.architecture.norms_plus_one and name.endswith("norm.weight"):
            plain = plain.float() - 1
        if name.endswith("ffn_gate_inp_shexp.weight"):
            plain = plain.view(1, -1)
        plain = plain if rows is None else plain[rows]
        return plain.transpose(-1, -2).contiguous() if is_transposed else plain

    def _stays(self, place: TensorPlace) -> bool:
        """Whether values are held as they are stored: what a packed file leaves in 16 bits stays in 16 bits."""
        return place.encoding.dtype is None or (place.encoding.dtype != torch.float32 and bool(self.encoding))

    def _is_transposed(self, name: str, place: TensorPlace) -> bool:
        """Whether the class has a tensor the other way round; gate and up are turned when they are one."""
        if self.architecture.mixes_experts:
            return name.endswith("ffn_down_exps.weight")
        return self.architecture.is_transposed and len(place.shape) == 2 and name.startswith("blk.")

    def _plain(self, raw: torch.Tensor, place: TensorPlace) -> torch.Tensor:
        if place.encoding.dtype is not None:
            return raw.view(place.encoding.dtype).view(place.shape)
        return place.encoding.decode(raw.view(1, -1)).view(place.shape)

    def _order(self, name: str, place: TensorPlace) -> torch.Tensor | None:
        """In which order the class has the rows of queries and keys: llama.cpp has the two halves of a head mixed."""
        found = QUERIES_KEYS.fullmatch(name) if self.architecture.is_interleaved else None
        if found is None:
            return None
        heads = self.config.num_attention_heads if found["which"] == "q" else self.config.num_key_value_heads
        rows = torch.arange(place.shape[0])
        if heads < 1 or len(rows) % (2 * heads):
            raise UnsupportedModel(f"{self.model}: {name} has {len(rows)} rows, not as many for each of {heads} heads")
        return rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def _fused(self, gate: torch.Tensor | StoredTensor, up: torch.Tensor | StoredTensor) -> torch.Tensor | StoredTensor:
        """Gate and up of all experts in one: for each expert one below the other, or mixed row by row."""
        mixes = self.architecture.mixes_experts
        if isinstance(gate, StoredTensor) and isinstance(up, StoredTensor) and gate.matrix.joins(up.matrix):
            experts, rows, columns = gate.shape
            numbers = torch.arange(2 * experts * rows).view(2, experts, rows)
            order = numbers.permute(1, 2, 0) if mixes else numbers.transpose(0, 1)
            both = gate.matrix.join([up.matrix]).select(order.reshape(-1))
            return StoredTensor(both, (experts, 2 * rows, columns), mixes)
        plain = [one.decode() if isinstance(one, StoredTensor) else one for one in (gate, up)]
        if not mixes:
            return torch.cat(plain, dim=1)
        mixed = torch.stack(plain, dim=2).flatten(1, 2)  # [experts, 2 rows, …]
        return mixed.transpose(1, 2).contiguous() if mixed.ndim == 3 else mixed


def _stored_names(title: str, config: PreTrainedConfig, table: TensorTable) -> dict[str, tuple[str, ...]]:
    """What each tensor of the class is made of; a tied head is not there."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # a class may raise anything on numbers that no model has
        reason = f"damaged: {config.model_type} cannot be made of its metadata ({first_line(error)})"
        raise UnsupportedModel(f"{title}: {reason}") from error
    number = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == table.family)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, tuple[str, ...]] = {}
    for ours in model.state_dict():
        if fused := FUSED.fullmatch(ours):
            kind = "bias" if fused["bias"] else "weight"
            parts = tuple(f"blk.{fused['index']}.ffn_{half}_exps.{kind}" for half in ("gate", "up"))
        else:
            parts = (_stored_name(ours, names.get_name),)
        if all(part in table.places for part in parts):
            found[ours] = parts
    return found


def _stored_name(ours: str, lookup: Callable[[str], str | None]) -> str:
    """llama.cpp's name for a tensor of the class."""
    stem, _, kind = ours.rpartition(".")
    if kind in ("weight", "bias"):
        name = lookup(stem) or ("output" if stem == "lm_head" else None)
        return f"{name}.{kind}"
    if kind.endswith("_bias"):
        return f"{lookup(ours.removesuffix('_bias'))}.bias"
    return f"{lookup(ours)}.weight"
