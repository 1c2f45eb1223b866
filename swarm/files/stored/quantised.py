"""Checkpoints in a quantised format, as a source of plain names: which of its tensors make one of the model's.

A format is found in the config's `quantization_config`. Which modules are quantised, with how many bits and in what
groups, is found from the tensors themselves: lists of exceptions in a config name modules of classes that are not here.
What only quantised activations need is left out. Activations are never quantised here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from swarm.base.errors import UnsupportedModel
from swarm.files.pretrained import first_line
from swarm.files.stored.combine import WORD_BITS, Parts, awq, bitsandbytes, compressed, fp8, gptq, modelopt, mxfp4
from swarm.files.stored.eight_bits import TYPES
from swarm.files.stored.source import SafetensorsSource, StoredSize, StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from swarm.files.parts.byte_ranges import ByteRanges
    from swarm.files.tensor_header import TensorHeader

Combine = Callable[[Parts, Mapping[str, Any]], torch.Tensor | StoredTensor]
"""Makes one tensor of its parts, as the format's config says."""


@dataclass(frozen=True, slots=True)
class Format:
    """A quantised format.

    Attributes:
        combine: makes one tensor of its parts.
        parts: the end that a quantised tensor's name has in the plain model, and the ends of the names that make it.
            The first of these is there in every quantised module.
        left_out: ends of names that are not needed.
    """

    combine: Combine
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    left_out: tuple[str, ...] = ()


_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".input_g_idx",
    ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".output_scale",
)  # fmt: skip
_WORDS = ((".weight", (".qweight", ".qzeros", ".scales", ".g_idx")),)
_PACKED = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
_STATE = (".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
_KINDS = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
FORMATS: Final[Mapping[str, Format]] = {
    "fp8": Format(
        fp8,
        (("", ("_scale_inv", "")), (".weight", (".weight_scale", ".weight"))),
        (*_ACTIVATIONS, "_activation_scale", "_activation_scale_inv"),
    ),
    "fbgemm_fp8": Format(fp8, ((".weight", (".weight_scale", ".weight")),), (*_ACTIVATIONS, ".input_scale_ub")),
    "mxfp4": Format(mxfp4, (("", ("_blocks", "_scales")),)),
    "compressed-tensors": Format(
        compressed,
        (
            (".weight", (*_PACKED, ".weight_global_scale")),
            (".weight", (".weight_scale", ".weight", ".weight_zero_point", ".weight_g_idx")),
        ),
        _ACTIVATIONS,
    ),
    "modelopt": Format(modelopt, ((".weight", (".weight_scale", ".weight", ".weight_scale_2")),), _ACTIVATIONS),
    "gptq": Format(gptq, _WORDS),
    "awq": Format(awq, _WORDS),
    "bitsandbytes": Format(
        bitsandbytes,
        ((".weight", (".weight.absmax", ".weight", *_STATE, *_KINDS)), (".weight", (".SCB", ".weight"))),
        (".weight_format",),
    ),
}
"""What is handled, by `quant_method`."""
_MODELOPT = ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
"""How the algorithms of ModelOpt begin that are handled; what layers mix is found from their tensors."""
UNFIT = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError, ArithmeticError)
"""What tensors raise that are not what their names say."""
MAX_NAME = 32
ON_A_LINE: Final = re.compile(r"(?:gptq|awq|ct|bnb)(?P<bits>[2-8])|mxfp4|nvfp4")
"""Formats of integers that share a step; FP4's numbers are integers when doubled."""
FP4_BITS: Final = 5
WIDTHS: Final = {"nvfp4": 16, "mxfp4": 32}
ROW_WIDTH: Final = 256
"""Columns that share a step at least, where a config names no group: a row."""
"""Characters of a format's name in a numeric class."""


def quantisation_of(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """A config's `quantization_config`, the text model's first; None where nothing is quantised."""
    for part in (config.get_text_config(), config):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found if isinstance(found, Mapping) else found.to_dict())
    return None


def refusal(quantisation: object) -> str | None:
    """Why a quantised checkpoint cannot be read; None where it can.

    Args:
        quantisation: a config's `quantization_config`.
    """
    if not isinstance(quantisation, Mapping):
        return "the checkpoint is quantised, and its quantization_config cannot be read; fetch it again"
    method = str(quantisation.get("quant_method", "unknown method"))[:MAX_NAME]
    if method not in FORMATS:
        instead = f"take the model in 16 bits, or in one of these: {', '.join(FORMATS)}, GGUF"
        return f"the checkpoint is quantised ({method}), which is not handled; {instead}"
    kind = str(quantisation.get("version" if method == "awq" else "checkpoint_format", "")).lower()
    handled = {"awq": ("", "gemm"), "gptq": ("", "gptq", "gptq_v2")}.get(method)
    if handled is not None and kind not in handled:
        return f"the checkpoint is quantised ({method}) in the form {kind}, which is not handled; {handled[1]} is"
    if method in ("awq", "gptq"):
        handled_bits = (4,) if method == "awq" else WORD_BITS
        others = [bits for bits in _all_bits(quantisation) if bits not in handled_bits]
        if others:
            which = " or ".join(map(str, handled_bits))
            return f"the checkpoint is quantised ({method}) in {others[0]} bits, which is not handled; {which} bits are"
    algorithm = str(quantisation.get("quant_algo") or "FP8").upper()
    if method == "modelopt" and not algorithm.startswith(_MODELOPT):
        return f"the checkpoint is quantised (modelopt) as {algorithm}, which is not handled; FP8 and NVFP4 are"
    if not isinstance(quantisation.get("config_groups") or {}, Mapping):
        return f"the checkpoint is quantised ({method}), and its config_groups cannot be read"
    if quantisation.get("transform_config"):
        return f"the checkpoint is quantised ({method}) with transforms of activations, which are not handled"
    sparsity = quantisation.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        return f"the checkpoint is quantised ({method}) and sparse, which is not handled"
    return None


def is_packed(name: str) -> bool:
    """Whether a tensor of this name is a part of a quantised weight, whatever the config says."""
    return name.endswith(tuple(ends[0] for form in FORMATS.values() for _, ends in form.parts))


def format_name(quantisation: Mapping[str, Any]) -> str:
    """What a numeric class calls the format of a whole checkpoint: as the encodings of its matrices."""
    method = quantisation["quant_method"]
    if method == "bitsandbytes":
        if quantisation.get("load_in_8bit"):
            return "bnb8"
        return "nf4" if quantisation.get("bnb_4bit_quant_type", "fp4") == "nf4" else "bnbfp4"
    if method in ("gptq", "awq"):
        return "_".join(f"{method}{bits}" for bits in _all_bits(quantisation))
    if method == "modelopt":
        return "nvfp4" if "FP4" in str(quantisation.get("quant_algo", "FP8")).upper() else "fp8"
    if method != "compressed-tensors":
        return "fp8" if method == "fbgemm_fp8" else str(method)
    return "_".join(sorted({_name_of(weights) for weights in _groups(quantisation)}))[:MAX_NAME] or "ct"


def _all_bits(quantisation: Mapping[str, Any]) -> list[Any]:
    """Of GPTQ's and AWQ's weights, what a config says: in general, and of some modules (GPTQModel's `dynamic`)."""
    dynamic = quantisation.get("dynamic")
    modules = dynamic.values() if isinstance(dynamic, Mapping) else ()
    found = [quantisation.get("bits", quantisation.get("w_bit", 4))]
    found += [one["bits"] for one in modules if isinstance(one, Mapping) and "bits" in one]
    return list({str(bits): bits for bits in sorted(found, key=str)}.values())


def _groups(quantisation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a compressed-tensors config says of weights, group by group; malformed ones are left out."""
    groups = quantisation.get("config_groups")
    every = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if groups else []
    return [weights for weights in every if isinstance(weights, Mapping) and weights.get("num_bits") in range(1, 17)]


def _name_of(weights: Mapping[str, Any]) -> str:
    bits = weights["num_bits"]
    if weights.get("type", "int") != "float":
        return f"ct{bits}"
    return "fp8" if bits == 8 else "nvfp4" if weights.get("group_size") == 16 else "mxfp4"


@dataclass(frozen=True, slots=True)
class QuantisedSource:
    """The plain tensors of a quantised checkpoint.

    Attributes:
        base: of its tensors as they are.
        config: its `quantization_config`.
        parts: what makes each quantised tensor, by the tensor's name: names of `base`, by the ends of their names.
    """

    base: SafetensorsSource
    model: str
    config: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, str]]
    files: Mapping[str, tuple[str, ...]]

    @property
    def encoding(self) -> str:
        return format_name(self.config)

    @classmethod
    def of(cls, base: SafetensorsSource, config: Mapping[str, Any], model: str) -> QuantisedSource:
        """Group the names of a source as the config's format says."""
        form = FORMATS[config["quant_method"]]
        parts = _grouped(base.files, form)
        taken = {name for names in parts.values() for name in names.values()}
        left = [name for name in base.files if name not in taken and not name.endswith(form.left_out)]
        if (unknown := min((name for name in left if _is_unknown_part(name, parts)), default=None)) is not None:
            which = f"the checkpoint is quantised ({config['quant_method']}) with {unknown}, which is not handled"
            raise UnsupportedModel(f"{model}: {which}; choose another version of the model")
        files = {name: base.files[name] for name in left}
        for name, own in parts.items():
            files[name] = tuple(sorted({file for part in own.values() for file in base.files[part]}))
        return cls(base, model, config, parts, files)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor | StoredTensor]:
        asked = list(names)
        read = self.base.read(self._stored(asked))
        found: dict[str, torch.Tensor | StoredTensor] = {}
        for name in asked:
            own = self.parts.get(name)
            found[name] = self._plain(name, read[name]) if own is None else self._combined(name, own, read)
        return found

    def _plain(self, name: str, tensor: torch.Tensor | StoredTensor) -> torch.Tensor | StoredTensor:
        """A tensor that is not quantised."""
        if isinstance(tensor, torch.Tensor) and tensor.dtype in TYPES:
            which = f"{name} is of the type {str(tensor.dtype).removeprefix('torch.')}, and its scales are not known"
            raise UnsupportedModel(f"{self.model}: {which}; choose another version of the model")
        return tensor

    def ranges(self, names: Iterable[str]) -> Mapping[str, ByteRanges]:
        return self.base.ranges(self._stored(names))

    def _stored(self, names: Iterable[str]) -> set[str]:
        """What these are made of."""
        return {one for name in names for one in self.parts.get(name, {"": name}).values()}

    def stored_sizes(self, name: str) -> tuple[StoredSize, ...]:
        """As `WeightSource.stored_sizes`: what its parts take in the file; matrices of 16 bits stay so too."""
        if name not in self.parts:
            plain = self.base.header(name)
            is_half = plain is not None and plain.kind in ("BF16", "F16") and len(plain.shape) > 1
            return (StoredSize(plain.count, plain.size_bytes),) if plain is not None and is_half else ()
        headers = {end: self.base.header(part) for end, part in self.parts[name].items()}
        if None in headers.values():
            return ()
        known = {end: header for end, header in headers.items() if header is not None}
        weights = self._weights_in(known)
        size_bytes = sum(header.size_bytes for header in known.values())
        return () if weights is None else (StoredSize(weights, size_bytes, *(self._grain() or ())),)

    def _grain(self) -> tuple[int, int] | None:
        """Bits of a code, and the columns that share a step, where values lie on a line."""
        if not self.has_codes:
            return None
        names = self.encoding.split("_")
        groups = [one.get("group_size") for one in (self.config, *_groups(self.config))]
        widths = [one for one in groups if isinstance(one, int) and one > 0] or [ROW_WIDTH]
        return max(map(_code_bits, names)), min(WIDTHS.get(name, width) for name in names for width in widths)

    @property
    def has_codes(self) -> bool:
        return all(_code_bits(name) for name in self.encoding.split("_"))

    def encodings(self, name: str) -> Mapping[str, int]:
        """As `WeightSource.encodings`: all are of the checkpoint's."""
        del name
        return {}

    def _weights_in(self, parts: Mapping[str, TensorHeader]) -> int | None:
        """How many weights these parts hold; None where they are not packed."""
        for end, header in parts.items():
            match end:
                case "_blocks":
                    return 2 * header.count
                case ".qweight":
                    return header.count * 32 // _word_bits(parts)
                case ".weight_packed" if header.kind == "U8":
                    return 2 * header.count
                case ".weight_packed":
                    return 32 * header.count // _packed_bits(self.config)
                case ".weight" | "" if any(other.startswith(".weight.quant_state") for other in parts):
                    return 2 * header.size_bytes
                case ".weight" | "" if header.kind == "U8" or (
                    header.kind == "I8" and self.config["quant_method"] == "fp8"
                ):
                    return 2 * header.count
                case ".weight" | "":
                    return header.count if header.kind.startswith(("F8", "I8")) else None
        return None

    def _combined(
        self, name: str, own: Mapping[str, str], read: dict[str, torch.Tensor | StoredTensor]
    ) -> torch.Tensor | StoredTensor:
        method = self.config["quant_method"]
        tensors = {end: tensor for end, one in own.items() if isinstance(tensor := read.pop(one), torch.Tensor)}
        try:
            return FORMATS[method].combine(tensors, self.config)
        except UNFIT as error:
            raise UnsupportedModel(
                f"{self.model}: {name} is not what {method} means ({first_line(error)}); fetch it again, or choose "
                "another version of the model"
            ) from error


def _code_bits(encoding: str) -> int:
    """Bits of the integers of a format; 0 of one whose values lie on no line."""
    found = ON_A_LINE.fullmatch(encoding)
    return 0 if found is None else int(found["bits"] or FP4_BITS)


def _is_unknown_part(name: str, quantised: Container[str]) -> bool:
    """Whether a tensor is of a quantised module, and nothing says what for: without it, the weights may be wrong.

    AWQ's scales of an activation stand in a module of their own.
    """
    module, _, end = name.rpartition(".")
    return (f"{module}.weight" in quantised and end != "weight" and not end.endswith("bias")) or end == "scales"


def _word_bits(parts: Mapping[str, TensorHeader]) -> int:
    """Of GPTQ's and AWQ's weights, from the words of the zeros."""
    zeros, scales = parts.get(".qzeros"), parts.get(".scales")
    if zeros is None or scales is None or not zeros.count or not scales.count:
        return 4
    return max(32 * zeros.shape[-1] // scales.shape[-1], 1)


def _packed_bits(config: Mapping[str, Any]) -> int:
    """Of integers in words: the most that a group of the config has."""
    return max((one["num_bits"] for one in _groups(config) if one.get("type", "int") != "float"), default=4)


def _grouped(names: Iterable[str], form: Format) -> dict[str, dict[str, str]]:
    """The names that make each quantised tensor, by the ends of theirs."""
    there = set(names)
    found: dict[str, dict[str, str]] = {}
    for plain, ends in form.parts:
        for name in there:
            root = name.removesuffix(ends[0])
            if root == name or (ends[0] == ".weight_scale" and f"{root}.weight_packed" in there):
                continue
            if any(root + end not in there for end in ends if end in ("", ".weight")):
                continue  # a name that only looks like a part
            found[root + plain] = {end: root + end for end in ends if root + end in there}
    return found
