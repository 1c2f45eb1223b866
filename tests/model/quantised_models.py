"""Tiny checkpoints in quantised formats: written and read back by the formats' own libraries.

    library             formats                                        where it is not installed
    compressed-tensors  ct4, ct8, int8, fp8 of rows, NVFP4, MXFP4      the tests are skipped
    bitsandbytes        nf4, fp4, int8                                 the tests are skipped

The libraries of GPTQ, AWQ and ModelOpt ask for other versions than ours: files that they made lie in
`tests.model.gptqmodel` and `tests.model.modelopt`. Here GPTQ and AWQ are written by the documented packing.
compressed-tensors has a reader of AWQ's; GPTQ's is read by its definition.
DeepSeek's FP8 and gpt-oss's MXFP4 are read by transformers' own dequantisers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

Tensors = dict[str, torch.Tensor]
SHARDS = 3


@dataclass(frozen=True, slots=True)
class Written:
    """How a format writes and reads a matrix.

    Attributes:
        config: the `quantization_config`.
        write: a matrix [rows, columns] to its tensors, by the ends of their names.
        read: the same tensors to the matrix, by the format's own library.
        root: what of the plain name stays.
    """

    config: Mapping[str, Any]
    write: Callable[[torch.Tensor], Tensors]
    read: Callable[[Tensors], torch.Tensor]
    root: str = ".weight"


@dataclass(frozen=True, slots=True)
class QuantisedModel:
    """A checkpoint, and the model that it means.

    Attributes:
        folder: of the quantised checkpoint.
        meant: Hugging Face's model in float32 with the values that the library reads.
        packed_bytes: what the file holds of quantised matrices.
    """

    folder: Path
    meant: PreTrainedModel
    packed_bytes: int


def compressed(scheme: dict[str, Any], dtype: torch.dtype = torch.bfloat16, *, both: bool = False) -> Written:
    """compressed-tensors, by its own compressor of a scheme; with `both`, activations are quantised too."""
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    infer: Any = pytest.importorskip("compressed_tensors.compressors.format")
    library: Any = pytest.importorskip("compressed_tensors.quantization")
    helpers: Any = pytest.importorskip("compressed_tensors.quantization.utils")
    args = library.QuantizationArgs(**scheme)
    rows = library.QuantizationArgs(num_bits=8, type=args.type, strategy="token", dynamic=True) if both else None
    own = library.QuantizationScheme(targets=["Linear"], weights=args, input_activations=rows)
    form = infer.infer_module_format(torch.nn.Linear, own)
    compressor = compressors.BaseCompressor.get_value_from_registry(form.value)

    def write(weight: torch.Tensor) -> Tensors:
        weight = weight.to(dtype)
        state: Tensors = {"weight": weight}
        overall = None
        if scheme.get("strategy") == "tensor_group":
            overall = helpers.generate_gparam(weight.min(), weight.max())
            state["weight_global_scale"] = overall.reshape(1)
        low, high = _extremes(weight, scheme)
        scale, zero = helpers.calculate_qparams(low, high, args, global_scale=overall)
        state |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        made = compressor.compress(state, own)
        return {f".{name}": tensor for name, tensor in made.items()}

    def read(parts: Tensors) -> torch.Tensor:
        state = {name.removeprefix("."): tensor for name, tensor in parts.items()}
        return cast("torch.Tensor", compressor.decompress(state, own)["weight"])

    group = own.model_dump(mode="json") | {"format": form.value}
    config = {"quant_method": "compressed-tensors", "format": form.value, "config_groups": {"group_0": group}}
    return Written({**config, "quantization_status": "compressed", "ignore": ["lm_head"]}, write, read, "")


def _extremes(weight: torch.Tensor, scheme: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest values of what shares a scale."""
    match scheme.get("strategy"):
        case "group" | "tensor_group":
            cut = weight.view(len(weight), -1, scheme["group_size"])
            return cut.amin(-1), cut.amax(-1)
        case "block":
            rows, columns = scheme["block_structure"]
            cut = weight.view(-1, rows, weight.shape[1] // columns, columns)
            return cut.amin((1, 3)), cut.amax((1, 3))
        case "channel":
            return weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    return weight.amin().reshape(1), weight.amax().reshape(1)


def bitsandbytes(kind: str, *, nested: bool = False) -> Written:
    """bitsandbytes, on a CPU."""
    library = pytest.importorskip("bitsandbytes")
    functional = library.functional
    if kind == "int8":

        def write8(weight: torch.Tensor) -> Tensors:
            codes, magnitudes, _ = functional.int8_vectorwise_quant(weight.half())
            return {"": codes, "|.SCB": magnitudes, "|.weight_format": torch.tensor(0, dtype=torch.uint8)}

        def read8(parts: Tensors) -> torch.Tensor:
            return cast("torch.Tensor", functional.int8_vectorwise_dequant(parts[""], parts["|.SCB"]))

        return Written({"quant_method": "bitsandbytes", "load_in_8bit": True}, write8, read8)

    def write(weight: torch.Tensor) -> Tensors:
        codes, state = functional.quantize_4bit(
            weight.bfloat16(), blocksize=64, compress_statistics=nested, quant_type=kind
        )
        return {"": codes} | {f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()}

    def read(parts: Tensors) -> torch.Tensor:
        named = {name.removeprefix("."): tensor for name, tensor in parts.items() if name}
        state = functional.QuantState.from_dict(named, device=torch.device("cpu"))
        return cast("torch.Tensor", functional.dequantize_4bit(parts[""], state))

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Written({**config, "bnb_4bit_use_double_quant": nested}, write, read)


def fp8(*, block: tuple[int, int]) -> Written:
    """DeepSeek's FP8, as transformers reads it."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    height, width = block

    def write(weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        own_rows, own_columns = min(height, rows), min(width, columns)
        cut = weight.view(rows // own_rows, own_rows, columns // own_columns, own_columns)
        scales = cut.abs().amax((1, 3)) / 448
        codes = (cut / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        return {"": codes.view(rows, columns), "_scale_inv": scales}

    def read(parts: Tensors) -> torch.Tensor:
        own = cast("Any", Fp8Dequantize)(None)
        return cast("torch.Tensor", own._dequantize_one(parts[""], parts["_scale_inv"], torch.float32))

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [*block]}
    return Written(config, write, read)


def fbgemm() -> Written:
    """FBGEMM's FP8, a scale for each row; what activations need is there too."""

    def write(weight: torch.Tensor) -> Tensors:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scales).to(torch.float8_e4m3fn)
        return {"": codes, "_scale": scales, "|.input_scale_ub": torch.tensor([1200.0])}

    return Written(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        write,
        lambda parts: parts[""].float() * parts["_scale"],
    )


def gptq(*, bits: int = 4, group: int = 32, act_order: bool = False, version: str = "gptq") -> Written:
    """GPTQ as its packing is documented: codes and zeros in int32 words, a scale and a zero for a group of inputs."""

    def write(weight: torch.Tensor) -> Tensors:
        columns = weight.shape[1]
        order = torch.arange(columns) // group
        if act_order:
            order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        scales, zeros, codes = _rounded_ints(weight, order, bits)
        stored = (zeros - int(version == "gptq")) & ((1 << bits) - 1)
        return {
            ".qweight": _words(codes.t(), bits).contiguous(),
            ".qzeros": _words(stored.t().reshape(-1), bits).view(len(zeros.t()), -1),
            ".scales": scales.t().contiguous(),
            ".g_idx": order.int(),
        }

    def read(parts: Tensors) -> torch.Tensor:
        mask, shifts = (1 << bits) - 1, torch.arange(0, 32, bits, dtype=torch.int32)
        codes = (parts[".qweight"][:, None, :] >> shifts[None, :, None]).flatten(0, 1) & mask
        zeros = (parts[".qzeros"][:, :, None] >> shifts).flatten(1) & mask
        zeros = (zeros + int(version == "gptq")) & mask
        order = parts[".g_idx"].long()
        return ((codes - zeros[order]).half() * parts[".scales"][order]).t()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False}
    return Written({**config, "checkpoint_format": version}, write, read, "")


def awq(*, group: int = 32) -> Written:
    """AutoAWQ's GEMM form, which compressed-tensors reads."""
    library: Any = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: torch.Tensor) -> torch.Tensor:
        return _words(codes.view(len(codes), -1, 8)[..., order].reshape(-1), 4).view(len(codes), -1)

    def write(weight: torch.Tensor) -> Tensors:
        scales, zeros, codes = _rounded_ints(weight, torch.arange(weight.shape[1]) // group, 4)
        parts = {".qweight": words(codes.t().contiguous()), ".qzeros": words(zeros.t().contiguous())}
        return {**parts, ".scales": scales.t().contiguous()}

    def read(parts: Tensors) -> torch.Tensor:
        own = library.AutoAWQConverter(group_size=group)
        codes, scales, zeros = own._convert_gemm_module(parts[".qweight"], parts[".scales"], parts[".qzeros"])
        grouped = codes.view(len(codes), -1, group) - zeros[..., None]
        return cast("torch.Tensor", (grouped.half() * scales[..., None]).flatten(1))

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Written(config, write, read, "")


def _rounded_ints(weight: torch.Tensor, order: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Scales float16 and zeros int32 [rows, groups], codes int32 [rows, columns]."""
    most = (1 << bits) - 1
    groups = int(order.max()) + 1
    low = torch.stack([weight[:, order == one].amin(1) for one in range(groups)], 1).clamp(max=0)
    high = torch.stack([weight[:, order == one].amax(1) for one in range(groups)], 1).clamp(min=0)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(0, most).int()
    codes = ((weight / scales.float()[:, order]).round() + zeros[:, order]).clamp(0, most).int()
    return scales, zeros, codes


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in int32 words along the first dimension, the first one in the lowest bits."""
    each = 32 // bits
    places = torch.arange(each, dtype=torch.int64) * bits
    cut = codes.to(torch.int64).reshape(-1, each, *codes.shape[1:])
    shaped = places.view(1, each, *[1] * (cut.ndim - 2))
    return (cut << shaped).sum(1).to(torch.int32)


def mxfp4() -> Written:
    """gpt-oss's experts, written by compressed-tensors and read by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    form = compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True})

    def write(weight: torch.Tensor) -> Tensors:
        made = form.write(weight)
        return {"_blocks": made[".weight_packed"].view(len(weight), -1, 16), "_scales": made[".weight_scale"]}

    def read(parts: Tensors) -> torch.Tensor:
        return convert_moe_packed_tensors(parts["_blocks"], parts["_scales"])

    return Written({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, write, read, "")


def save_quantised(model: PreTrainedModel | Path, form: Written, folder: Path) -> QuantisedModel:
    """Save a model in a format, in shards that each hold parts of many tensors.

    Args:
        model: in memory, or the folder of one in a single file, whose small files are kept.
        form: the format.
        folder: made here; the values that it means are saved beside it.
    """
    plain = folder.parent / f"{folder.name}-plain"
    if isinstance(model, Path):
        shutil.copytree(model, plain)
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    else:
        model.save_pretrained(plain)
        folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    packed_bytes = 0
    for name, tensor in list(tensors.items()):
        if not _is_quantised(name, tensor, form):
            stored[name] = tensor
            continue
        if tensor.ndim == 3:  # of gpt-oss: [experts, inputs, outputs]
            each = [form.write(expert.t().contiguous()) for expert in tensor]
            parts = {end: torch.stack([one[end] for one in each]) for end in each[0]}
        else:
            parts = form.write(tensor)
        packed_bytes += sum(part.numel() * part.itemsize for part in parts.values())
        module, root = name.removesuffix(".weight"), name if form.root else name.removesuffix(".weight")
        stored |= {module + end[1:] if end.startswith("|") else root + end: part for end, part in parts.items()}
        tensors[name] = form.read(parts).float().contiguous()
    _save(stored, folder)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(form.config)}))
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    meant: Any = cast("Any", AutoModelForCausalLM).from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    return QuantisedModel(folder, meant.eval(), packed_bytes)


def _is_quantised(name: str, tensor: torch.Tensor, form: Written) -> bool:
    if ".layers." not in name or name.endswith((".bias", "_bias")):
        return False
    if form.config["quant_method"] == "mxfp4":
        return tensor.ndim == 3
    return tensor.ndim == 2 and name.endswith(".weight") and not name.endswith((".gate.weight", ".router.weight"))


def _save(tensors: Tensors, folder: Path) -> None:
    names = sorted(tensors)
    where = {name: f"model-{place % SHARDS + 1:05}-of-{SHARDS:05}.safetensors" for place, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name].contiguous() for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
