"""Makes the files beside this one with GPTQModel, the library of GPTQ's and AWQ's files; run by hand.

    pip install --no-deps --no-build-isolation gptqmodel device-smi tokenicer logbar pypcre defuser threadpoolctl \
        accelerate
    GPTQMODEL_CPU_WORKERS=4 CUDA_VISIBLE_DEVICES= python -m tests.model.gptqmodel.make

It is in no requirement of the project: the library asks for another torch than ours, and takes a minute for each model.
Embeddings are left out of the files, since nothing of them is quantised.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from swarm.demo import TARGET

HERE: Final = Path(__file__).parent
EMBEDDING: Final = "model.embed_tokens.weight"
KINDS: Final[dict[str, dict[str, Any]]] = {
    "gptq4": {},
    "gptq4-act-order": {"desc_act": True, "act_group_aware": False, "sym": False},
    "gptq8-v2": {"bits": 8, "group_size": -1, "act_group_aware": False, "format": "gptq_v2"},
    "gptq-dynamic": {"dynamic": {r"+:.*down_proj.*": {"bits": 8}, r"-:.*o_proj.*": {}}},
    "awq4": {"method": "awq", "format": "gemm"},
}
"""What GPTQModel's `QuantizeConfig` is given for each file, besides 4 bits in groups of 32."""


def main() -> None:
    """Make all files."""
    library: Any = importlib.import_module("gptqmodel")
    words = Path(TARGET.parent / "passages.jsonl").read_text(encoding="utf-8")
    texts = [words[start : start + 600] for start in range(0, 2400, 600)]
    made: dict[str, Any] = {"gptqmodel": library.__version__, "models": {}}
    with tempfile.TemporaryDirectory() as name:
        source = _source(Path(name) / "source")
        for kind, options in KINDS.items():
            folder = Path(name) / kind
            model = library.GPTQModel.load(
                str(source), library.QuantizeConfig(**{"bits": 4, "group_size": 32, **options}), device="cpu"
            )
            model.quantize(texts, batch_size=1)
            model.save(str(folder))
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
            tensors = load_file(folder / "model.safetensors")
            tensors.pop(EMBEDDING)
            save_file(tensors, HERE / f"{kind}.safetensors", {"format": "pt"})
            is_awq = config["quant_method"] == "awq"
            values = _awq(tensors) if is_awq else _gptq(library, folder)
            config.pop("meta")
            made["models"][kind] = {"config": config, "values": {one: digest(values[one]) for one in sorted(values)}}
    (HERE / "made.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def plain_config() -> LlamaConfig:
    """Of the model before it is quantised."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def digest(values: torch.Tensor) -> str:
    """SHA-256 of a matrix in float32; its zeros have no sign."""
    return hashlib.sha256((values.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def _source(folder: Path) -> Path:
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(plain_config())
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder)
    return folder


def _gptq(library: Any, folder: Path) -> dict[str, torch.Tensor]:  # noqa: ANN401 - a module
    model = library.GPTQModel.load(str(folder), device="cpu", backend=library.BACKEND.TORCH, dtype=torch.float16)
    modules = [(name, one) for name, one in model.model.named_modules() if hasattr(one, "dequantize_weight")]
    return {f"{name}.weight": one.dequantize_weight().t() for name, one in modules}


def _awq(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    packing: Any = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
    roots = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    parts = {root: [tensors[f"{root}.{end}"] for end in ("qweight", "qzeros", "scales")] for root in roots}
    return {f"{root}.weight": packing.dequantize_gemm(*own, 4, 32).t() for root, own in parts.items()}


if __name__ == "__main__":
    main()
