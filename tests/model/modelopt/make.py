"""Makes the files beside this one with NVIDIA's ModelOpt; run by hand.

    pip install --no-deps nvidia-modelopt omegaconf pulp antlr4-python3-runtime
    CUDA_VISIBLE_DEVICES= python -m tests.model.modelopt.make

It is in no requirement of the project: it asks for another transformers than ours. Embeddings are left out of the
files, since nothing of them is quantised. Activations of FP4 are quantised on a card only, so that file is of weights
alone.
"""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.model.gptqmodel.make import EMBEDDING, digest, plain_config

HERE: Final = Path(__file__).parent
BLOCK: Final = 32
"""Sides of the blocks of `fp8-blocks`; the library's default of 128 is a whole matrix here."""
KINDS: Final = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8-rows": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8-blocks": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}
"""The library's own configs."""


def main() -> None:
    """Make all files."""
    library: Any = importlib.import_module("modelopt")
    made: dict[str, Any] = {"modelopt": library.__version__, "models": {}}
    with tempfile.TemporaryDirectory() as name:
        for kind, named in KINDS.items():
            folder = Path(name) / kind
            _export(kind, named, folder)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
            tensors = load_file(folder / "model.safetensors")
            tensors.pop(EMBEDDING)
            save_file(tensors, HERE / f"{kind}.safetensors", {"format": "pt"})
            roots = sorted(one.removesuffix(".weight_scale") for one in tensors if one.endswith(".weight_scale"))
            values = {f"{root}.weight": digest(_read(kind, root, tensors)) for root in roots}
            made["models"][kind] = {"config": config, "values": values}
    (HERE / "made.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def _export(kind: str, named: str, folder: Path) -> None:
    quantization: Any = importlib.import_module("modelopt.torch.quantization")
    config = copy.deepcopy(getattr(quantization, named))
    if kind == "fp8-blocks":
        (weights,) = [one for one in config["quant_cfg"] if one["quantizer_name"] == "*weight_quantizer"]
        weights["cfg"]["block_sizes"] = {-1: BLOCK, -2: BLOCK}
    torch.manual_seed(7)
    of_model = plain_config()
    of_model.architectures = ["LlamaForCausalLM"]
    model: Any = LlamaForCausalLM(of_model)
    model.to(torch.bfloat16)
    is_fp4 = kind == "nvfp4"
    ids = torch.arange(64)[None] % 100 + 3
    quantization.quantize(model, config, forward_loop=None if is_fp4 else lambda one: one(ids))
    if is_fp4:
        for module in model.modules():
            if hasattr(module, "input_quantizer"):
                module.input_quantizer.disable()
    importlib.import_module("modelopt.torch.export").export_hf_checkpoint(model, export_dir=str(folder))


def _read(kind: str, root: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """As the library itself reads it, in float32."""
    tensor_types: Any = importlib.import_module("modelopt.torch.quantization.qtensor")
    weight, scale = tensors[f"{root}.weight"], tensors[f"{root}.weight_scale"]
    how: dict[str, Any] = {"scale": scale[:, None] if kind == "fp8-rows" else scale}
    if kind == "fp8-blocks":
        how = {"scale": scale[:, 0, :, 0], "block_sizes": dict.fromkeys((0, 1), BLOCK)}
    shape = weight.shape
    if kind == "nvfp4":
        shape = torch.Size((len(weight), 2 * weight.shape[1]))
        how |= {"double_scale": tensors[f"{root}.weight_scale_2"], "block_sizes": {-1: 16}}
    library_type = tensor_types.NVFP4QTensor if kind == "nvfp4" else tensor_types.FP8QTensor
    values: torch.Tensor = library_type(shape, torch.float32, weight).dequantize(**how)
    return values


if __name__ == "__main__":
    main()
