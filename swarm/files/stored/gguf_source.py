"""The tensors of a GGUF model under the names, and in the layout, of transformers' class for it.

Blocks stay as they are in the file: rows are put in another order at most. Files are mapped, so only what is asked for
is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, Self

import numpy
import torch

from swarm.base.errors import UnsupportedModel
from swarm.files.gguf.folder import TensorTable
from swarm.files.parts.byte_ranges import ByteRange, ByteRanges
from swarm.files.parts.reading import readable_file
from swarm.files.pretrained import first_line
from swarm.files.stored.gguf_layout import ClassLayout
from swarm.files.stored.matrix import StoredMatrix
from swarm.files.stored.source import StoredSize, StoredTensor
from swarm.files.text_classes import class_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

    from swarm.files.gguf.container import TensorPlace
    from swarm.files.gguf.encodings import Encoding
    from swarm.files.hub import Hub
    from swarm.files.linear_codes import LinearCodes


FUSED: Final = re.compile(
    r".*\.layers\.(?P<index>\d+)\..*(?:experts\.gate_up_proj(?P<bias>_bias)?|(?P<shared>shared_mlp.input_linear)\.weight)"
)
"""Gate and up of all experts, or of one for all tokens, in one tensor, which GGUF holds in two."""
GROUPED: Final = re.compile(r".*\.query_key_value\.(?:weight|bias)")
"""Queries, keys and values by heads of keys, which GGUF has by kind."""
QUERIES_KEYS: Final = re.compile(r"blk\.\d+\.attn_(?P<which>[qk])\.(?:weight|bias)")
MIXED: Final = re.compile(r".*\.layers\.(?P<index>\d+)\.linear_attn\.in_proj_qkvz\.weight")
"""Queries, keys, values and gates of linear attention, head by head, which GGUF holds in two tensors."""
LATENT: Final = re.compile(r".*\.layers\.(?P<index>\d+)\.self_attn\.kv_b_proj\.weight")
"""What makes keys and values of latent rows, which GGUF holds in two tensors."""
SCALES: Final = re.compile(r".*\.layers\.(?P<index>\d+)\.router\.(?P<each>per_expert_)?scale")
"""What a router multiplies rows and experts by."""
UNREAD: Final = re.compile(r"rope_(?:freqs|factors_long|factors_short)\.weight|(?:v|a|mm)\..*")
"""Tensors that went into the config, and those of parts that see or hear."""
TILED: Final = re.compile(
    r"blk\.\d+\.(?P<which>attn_qkv|attn_gate|ssm_alpha|ssm_beta|ssm_a|ssm_dt|ssm_conv1d)(?:\.weight|\.bias)?"
)
"""Tensors with rows for heads of values of linear attention."""
TILES: Final = {"qwen35", "qwen35moe"}
"""Architectures whose heads of values of linear attention lie by their place among those of a key."""
BLOCK: Final = re.compile(r"blk\.(\d+)\.")


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
        return type(self)(parts["blocks"], self.values)

    def decode(self, start: int, end: int) -> torch.Tensor:
        """Rows `[start, end)` as float32 [end - start, columns]."""
        return self.values.decode(self.blocks[start:end])

    def linear_codes(self, start: int, end: int) -> LinearCodes | None:
        return self.values.linear_codes(self.blocks[start:end])


@dataclass(frozen=True, slots=True)
class GgufSource:
    """Tensors of a GGUF model.

    Attributes:
        folder: as `swarm.files.gguf.folder` makes it.
        config: of the model, which is a language model alone.
        stored: llama.cpp's names of what a tensor is made of, by its name in the class.
        hub: whence its files come; None for files of the user's.
    """

    folder: Path
    model: str
    config: PreTrainedConfig
    layout: ClassLayout
    table: TensorTable
    stored: Mapping[str, tuple[str, ...]]
    hub: Hub | None = None

    @classmethod
    def of(cls, folder: Path, config: PreTrainedConfig, model: str, hub: Hub | None = None) -> GgufSource:
        """The source of a model's folder.

        Raises:
            UnsupportedModel: Canopy cannot run its family, or it has tensors that the class has not, or lacks some.
        """
        table = TensorTable.read(folder)
        whole = _empty_model(model, config)
        layout = ClassLayout.of(whole, table.family)
        if layout.is_other_rope:
            raise UnsupportedModel(f"{model}: {type(whole).__name__} turns other numbers of a head than llama.cpp")
        stored = _stored_names(layout, config, table)
        known = {name for names in stored.values() for name in names}
        others = sorted(name for name in table.places.keys() - known if not UNREAD.fullmatch(name))
        if strange := [one for one in others if not _is_idle(one, config)]:
            reason = f"{len(strange)} tensors that {type(whole).__name__} does not have, such as {strange[0]}"
            raise UnsupportedModel(f"{model}: its file has {reason}; use the safetensors")
        if lacking := sorted(layout.shapes.keys() - stored.keys() - layout.tied):
            raise UnsupportedModel(f"{model}: its file has no tensor for {lacking[0]}; use the safetensors")
        source = cls(folder, model, config, layout, table, stored, hub)
        source.check_shapes()
        return source

    def check_shapes(self) -> None:
        """Refuse a tensor whose shape is not what the metadata say.

        Raises:
            UnsupportedModel: names it.
        """
        for name, parts in self.stored.items():
            places = [self.table.places[part][1] for part in parts]
            shape, own = self.layout.shapes[name], places[0].shape
            flat = len(shape) < min(3, len(own)) or len(places) > 1  # such as norms of groups
            is_alike = flat or sorted(one for one in shape if one > 1) == sorted(one for one in own if one > 1)
            if not is_alike or sum(place.rows * place.columns for place in places) != prod(shape):
                said = f"{parts[0]} has the shape {list(own)}, and by the metadata {name} has {list(shape)}"
                raise UnsupportedModel(f"{self.model}: damaged: {said}; convert it again")

    @property
    def encoding(self) -> str:
        """As `WeightSource.encoding`: files mix types, and the fingerprint says which file it is."""
        is_packed = any(place.encoding.dtype is None for _, place in self.table.places.values())
        return "gguf" if is_packed else ""

    @property
    def has_codes(self) -> bool:
        encodings = {place.encoding for _, place in self.table.places.values() if place.encoding.dtype is None}
        return bool(encodings) and all(encoding.grain for encoding in encodings)

    @property
    def files(self) -> Mapping[str, tuple[str, ...]]:
        return {name: tuple({self.table.places[one][0]: None for one in parts}) for name, parts in self.stored.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
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

    def stored_sizes(self, name: str) -> tuple[StoredSize, ...]:
        """As `WeightSource.stored_sizes`: the table has it, and no file is opened."""
        places = [self.table.places[one][1] for one in self.stored[name]]
        if (LATENT.fullmatch(name) and len(places) > 1) or self._has_other_columns(self.stored[name][0]):
            return ()
        if not all(self._stays(name, place) for place in places):
            return ()
        return tuple(
            StoredSize(place.rows * place.columns, place.size_bytes, *(place.encoding.grain or ())) for place in places
        )

    def encodings(self, name: str) -> Mapping[str, int]:
        """As `WeightSource.encodings`: the table has it."""
        found: dict[str, int] = {}
        for place in (self.table.places[one][1] for one in self.stored[name]):
            if place.encoding.dtype is None:
                found[place.encoding.name] = found.get(place.encoding.name, 0) + place.rows * place.columns
        return found

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
        parts = [self._part(name, one, opened) for one in self.stored[name]]
        if len(parts) > 1 and LATENT.fullmatch(name):
            return self._latent(*parts)
        if len(parts) > 1:
            return self._mixed(*parts) if MIXED.fullmatch(name) else self._fused(name, *parts)
        whole = parts[0]
        return whole.view(self.layout.shapes[name]) if isinstance(whole, torch.Tensor) else whole

    def _part(
        self, ours: str, name: str, opened: Mapping[str, numpy.memmap[tuple[int], numpy.dtype[numpy.uint8]]]
    ) -> torch.Tensor | StoredTensor:
        """One tensor of a file, in the layout of the class."""
        file, place = self.table.places[name]
        raw = torch.from_numpy(numpy.array(opened[file][place.start : place.start + place.size_bytes]))
        rows = self._order(ours, name, place)
        is_transposed = ours in self.layout.turned and len(self.stored[ours]) == 1
        if self._has_other_columns(name):
            return place.encoding.decode(raw.view(place.rows, -1))[
                :, self._key_by_key(self.config.linear_value_head_dim)
            ]
        if self._stays(ours, place):
            blocks = raw.view(place.rows, place.encoding.row_bytes(place.columns))
            matrix = GgufMatrix(blocks if rows is None else blocks[rows], place.encoding)
            return StoredTensor(matrix, self._shape_of(ours, place), is_transposed)
        plain = self._plain(raw, place)
        if ours in self.layout.plus_one:
            plain = plain.float() - 1
        if name.endswith(".ssm_a"):
            plain = torch.log(-plain.float())  # stored is what it decays by
        plain = plain if rows is None else plain[rows]
        return plain.transpose(-1, -2).contiguous() if is_transposed else plain

    def _stays(self, ours: str, place: TensorPlace) -> bool:
        """Whether values are held as they are stored: what a packed file leaves in 16 bits stays in 16 bits."""
        own = self.layout.shapes[ours]
        if (
            len(place.shape) < 2
            or len(own) > len(place.shape)
            or (ours in self.layout.turned and len(own) < 3 < 1 + len(place.shape))
        ):
            return False  # such as the kernels of a convolution
        return place.encoding.dtype is None or (place.encoding.dtype != torch.float32 and bool(self.encoding))

    def _shape_of(self, ours: str, place: TensorPlace) -> tuple[int, ...]:
        """The shape that the class has, where a file has the rows of experts apart, or one dimension less."""
        own = self.layout.shapes[ours]
        is_alone = len(self.stored[ours]) == 1 and ours not in self.layout.turned
        return own if is_alone and own[-1] == place.shape[-1] and prod(own) == prod(place.shape) else place.shape

    def _plain(self, raw: torch.Tensor, place: TensorPlace) -> torch.Tensor:
        if place.encoding.dtype is not None:
            return raw.view(place.encoding.dtype).view(place.shape)
        return place.encoding.decode(raw.view(1, -1)).view(place.shape)

    def _order(self, ours: str, name: str, place: TensorPlace) -> torch.Tensor | None:
        """In which order the class has a tensor's rows; None where it has them as the file."""
        if GROUPED.fullmatch(ours):
            return self._group_by_group(place.shape[0])
        if self._groups > 1 and (tiled := TILED.fullmatch(name)):
            config: Any = self.config
            keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            width = 1 if tiled["which"].startswith("ssm_") else config.linear_value_head_dim
            if tiled["which"] in ("attn_qkv", "ssm_conv1d"):
                return torch.cat([torch.arange(keys), keys + self._key_by_key(config.linear_value_head_dim)])
            return self._key_by_key(width)
        found = QUERIES_KEYS.fullmatch(name) if self.layout.is_reordered else None
        if found is None:
            return None
        heads = self.config.num_attention_heads if found["which"] == "q" else self.config.num_key_value_heads
        rows = torch.arange(place.shape[0])
        if heads < 1 or len(rows) % (2 * heads):
            raise UnsupportedModel(f"{self.model}: {name} has {len(rows)} rows, not as many for each of {heads} heads")
        return rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)  # llama.cpp has the two halves of a head mixed

    @property
    def _groups(self) -> int:
        """Heads of values for each of keys, of linear attention whose heads of values lie by their place among them."""
        config: Any = self.config
        return config.linear_num_value_heads // config.linear_num_key_heads if self.table.family in TILES else 1

    def _group_by_group(self, rows: int) -> torch.Tensor:
        """Numbers of the rows of all queries, keys and values, those of a head of keys together."""
        heads: int = self.config.num_attention_heads
        width = self.config.hidden_size // heads
        groups = (rows // width - heads) // 2
        queries, keys, values = torch.split(torch.arange(rows), [heads * width, groups * width, groups * width])
        return torch.cat([one.view(groups, -1, width) for one in (queries, keys, values)], dim=1).reshape(-1)

    def _key_by_key(self, width: int) -> torch.Tensor:
        """Numbers of the rows of all heads of values, those of a key's together."""
        heads: int = self.config.linear_num_key_heads
        return torch.arange(self._groups * heads * width).view(self._groups, heads, width).transpose(0, 1).reshape(-1)

    def _has_other_columns(self, name: str) -> bool:
        return self._groups > 1 and name.endswith(".ssm_out.weight")

    def _mixed(
        self, joint: torch.Tensor | StoredTensor, gate: torch.Tensor | StoredTensor
    ) -> torch.Tensor | StoredTensor:
        """Queries, keys and values of all heads, and their gates, mixed head by head."""
        config: Any = self.config
        heads, groups = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        keys, values = heads * config.linear_key_head_dim, heads * groups * config.linear_value_head_dim
        starts = torch.split(torch.arange(2 * keys + 2 * values), [keys, keys, values, values])
        order = torch.cat([rows.view(heads, -1) for rows in starts], dim=1).reshape(-1)
        if isinstance(joint, StoredTensor) and isinstance(gate, StoredTensor) and joint.matrix.joins(gate.matrix):
            both = joint.matrix.join([gate.matrix]).select(order)
            return StoredTensor(both, (both.rows, both.columns))
        return torch.cat([_decoded(joint), _decoded(gate)])[order]

    def _latent(self, keys: torch.Tensor | StoredTensor, values: torch.Tensor | StoredTensor) -> torch.Tensor:
        """What makes keys and values, head by head; the file has the part of the keys turned."""
        both = [_decoded(keys).transpose(1, 2), _decoded(values)]  # [heads, width, rank]
        return torch.cat(both, dim=1).flatten(0, 1).contiguous()

    def _fused(
        self, name: str, gate: torch.Tensor | StoredTensor, up: torch.Tensor | StoredTensor
    ) -> torch.Tensor | StoredTensor:
        """Gate and up of all experts in one: for each expert one below the other, or mixed row by row."""
        if name.endswith("input_linear.weight"):
            return _below(gate, up)
        mixes, turns = name in self.layout.mixed, name in self.layout.turned
        if isinstance(gate, StoredTensor) and isinstance(up, StoredTensor) and gate.matrix.joins(up.matrix):
            experts, rows, columns = gate.shape
            numbers = torch.arange(2 * experts * rows).view(2, experts, rows)
            order = numbers.permute(1, 2, 0) if mixes else numbers.transpose(0, 1)
            both = gate.matrix.join([up.matrix]).select(order.reshape(-1))
            return StoredTensor(both, (experts, 2 * rows, columns), turns)
        plain = [_decoded(one) for one in (gate, up)]
        joined = torch.stack(plain, dim=2).flatten(1, 2) if mixes else torch.cat(plain, dim=1)  # [experts, 2 rows, …]
        return joined.transpose(1, 2).contiguous() if turns and joined.ndim == 3 else joined


def _is_idle(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor is of layers that predict further tokens, or of keys and values that others stand in for."""
    block = BLOCK.match(name)
    layers, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", 0) or 0
    is_kept = block is not None and re.search(r"attn_(?:k|v|k_norm)\.weight$", name) is not None
    return block is not None and int(block[1]) >= layers - (shared if is_kept else 0)


def _below(upper: torch.Tensor | StoredTensor, lower: torch.Tensor | StoredTensor) -> torch.Tensor | StoredTensor:
    """Rows of two matrices, one below the other."""
    if isinstance(upper, StoredTensor) and isinstance(lower, StoredTensor) and upper.matrix.joins(lower.matrix):
        both = upper.matrix.join([lower.matrix])
        return StoredTensor(both, (both.rows, both.columns))
    return torch.cat([_decoded(upper), _decoded(lower)])


def _decoded(tensor: torch.Tensor | StoredTensor) -> torch.Tensor:
    return tensor.decode() if isinstance(tensor, StoredTensor) else tensor


def _empty_model(title: str, config: PreTrainedConfig) -> Any:  # noqa: ANN401
    """A model of the class without values."""
    try:
        model_class: Any = class_of(config)
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:  # a class may raise anything on numbers that no model has
        reason = f"damaged: {config.model_type} cannot be made of its metadata ({first_line(error)})"
        raise UnsupportedModel(f"{title}: {reason}") from error


def _stored_names(layout: ClassLayout, config: PreTrainedConfig, table: TensorTable) -> dict[str, tuple[str, ...]]:
    """What each tensor of the class is made of; a tied head is not there."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == table.family)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, tuple[str, ...]] = {}
    for ours in layout.shapes:
        ways = (parts for name in _published(ours, config) for parts in _ways(name, names.get_name))
        if parts := next((parts for parts in ways if all(part in table.places for part in parts)), None):
            found[ours] = parts
    return found


def _published(ours: str, config: PreTrainedConfig) -> Iterator[str]:
    """What checkpoints call a tensor of the class, which converters read: its own name first."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # heavy, as in `opening`
    from transformers.core_model_loading import WeightRenaming

    yield ours
    mapping_of: Any = get_checkpoint_conversion_mapping
    name = ours
    for one in reversed([one for one in mapping_of(config.model_type) or () if type(one) is WeightRenaming]):
        name = one.reverse_transform().rename_source_key(name)[0]
    yield name
    yield name.removeprefix("transformer.")
    yield ours.replace(".mixer.", ".mlp.")


def _ways(ours: str, lookup: Callable[[str], str | None]) -> Iterator[tuple[str, ...]]:
    """llama.cpp's names of what may make a tensor of the class."""
    yield (_stored_name(ours, lookup),)
    yield (f"{lookup(ours)}",)
    yield (f"{lookup(ours)}.bias",)
    if scale := SCALES.fullmatch(ours):
        yield (f"blk.{scale['index']}.ffn_{'down_exps' if scale['each'] else 'gate_inp'}.scale",)
    if fused := FUSED.fullmatch(ours):
        kind, which = "bias" if fused["bias"] else "weight", "shexp" if fused["shared"] else "exps"
        yield (f"blk.{fused['index']}.ffn_gate_{which}.{kind}", f"blk.{fused['index']}.ffn_up_{which}.{kind}")
    if fused and fused["shared"]:
        yield (f"blk.{fused['index']}.ffn_gate.weight", f"blk.{fused['index']}.ffn_up.weight")
    if mixed := MIXED.fullmatch(ours):
        yield (f"blk.{mixed['index']}.attn_qkv.weight", f"blk.{mixed['index']}.attn_gate.weight")
    if latent := LATENT.fullmatch(ours):
        yield (f"blk.{latent['index']}.attn_k_b.weight", f"blk.{latent['index']}.attn_v_b.weight")


def _stored_name(ours: str, lookup: Callable[[str], str | None]) -> str:
    """llama.cpp's name for a tensor of the class."""
    stem, _, kind = ours.rpartition(".")
    if kind in ("weight", "bias"):
        name = lookup(stem) or ("output" if stem == "lm_head" else None)
        return f"{name}.{kind}"
    if kind == "dt_bias":
        return f"{lookup(f'{stem}.dt_proj')}.bias"
    if kind.endswith("_bias"):
        return f"{lookup(ours.removesuffix('_bias'))}.bias"
    return f"{lookup(ours)}.weight"
