"""Which of the causal language models that transformers knows run in spans?

For each config class of transformers' list, a tiny random model of the family runs in three spans and is compared with
the whole, as a node does before it serves a family that the tests do not run (`node/model/family_check.py`): two
sessions in one forward, each with a tree. Exact: logits within 1e-5 in float32. Refused: says why, as a node would.
Of models that see, the language part of a tiny checkpoint runs in spans, and is compared with the class of the whole.

    python -m benchmarks families --only llama gemma3 --record
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Final

import torch
import transformers
import tyro
from rich.progress import track
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from benchmarks.sheet import Recording, Sheet
from node.model.family_check import TOLERANCE, conformance_error, language_error, shrink
from node.model.span import load_tested
from swarm.base.cli import make_console
from swarm.base.errors import UnsupportedModel
from swarm.base.library_logging import quiet_libraries
from swarm.files.families import causal_lm_class
from swarm.files.pretrained import first_line

OTHER_SCALE: Final = "with the same greedy text; its class scales logits, or forbids tokens, otherwise than the whole's"
NOT_COMPARED: Final = "not compared: "
LIMIT_S: Final = 60
"""A family that takes longer counts as refused."""
_QWEN4: Final = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "output_gate_type": "sigmoid",
}
COMPLETED: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 128},
    },
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": (["mamba"] * 7 + ["attention"]) * 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""What every published checkpoint of a family sets and its class's default leaves open."""
_AXES: Final = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
_HALF_AXES: Final = _AXES | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
COMPLETED_WHOLE: Final[Mapping[str, Mapping[str, Any]]] = {
    **{
        family: {"text_config": {"rope_parameters": _AXES}}
        for family in ("paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl")
    },
    **{
        family: {"text_config": {"rope_parameters": _HALF_AXES}}
        for family in ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga")
    },
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "chameleon": {"vocabulary_map": {"<image>": 3, "IMGIMGAA": 5}},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    },
    "emu3": {"vocabulary_map": {"<image>": 3, "<|visual token 000001|>": 5}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0], "downsample_rate": "4/8"},
    "step3p7": {"text_config": {"sliding_window": 512}},
}
"""The same of models that see: of their configs, the parts that a class leaves open."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Run every family."""

    only: tuple[str, ...] = ()
    """Families to run; all if none is named."""


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """What became of one family.

    Attributes:
        family: Its name, as configs have it (`model_type`).
        error: Largest difference of the logits; None if it did not run.
        reason: Why it is refused; empty if it is not.
    """

    family: str
    error: float | None
    reason: str
    seconds: float

    @property
    def is_exact(self) -> bool:
        """Whether it runs in spans."""
        return not self.reason


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"its self-test took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(config_class: Any) -> FamilyResult:  # noqa: ANN401 - any of transformers' config classes
    """Run one family's tiny model in three spans."""
    family, started = str(config_class.model_type), time.perf_counter()
    error: float | None = None
    try:
        with _limited(LIMIT_S):
            config = config_class(**COMPLETED.get(family, {}))
            causal_lm_class(config)
            error = conformance_error(shrink(config), load_tested)
            reason = "" if error <= TOLERANCE else f"its logits are {error:.1e} off"
    except UnsupportedModel as refusal:
        reason = str(refusal).removesuffix("; choose another model").partition(": ")[2]
    except Exception as failure:  # noqa: BLE001 - whatever a class raises, it does not run
        reason = f"does not run in spans ({first_line(failure)})"
    return FamilyResult(family, error, reason, time.perf_counter() - started)


def check_language(config_class: Any) -> FamilyResult:  # noqa: ANN401 - any of transformers' config classes
    """Run the language part of a tiny checkpoint of one family of models that see."""
    family, started = str(config_class.model_type), time.perf_counter()
    error: float | None = None
    try:
        with _limited(LIMIT_S):
            config = config_class(**{**COMPLETED.get(family, {}), **COMPLETED_WHOLE.get(family, {})})
            causal_lm_class(config)
            error, is_alike = language_error(config, load_tested)
            reason = "" if error <= TOLERANCE else OTHER_SCALE if is_alike else f"its logits are {error:.1e} off"
    except UnsupportedModel as refusal:
        reason = str(refusal).removesuffix("; choose another model").partition(": ")[2]
    except Exception as failure:  # noqa: BLE001 - whatever a class raises, it was not compared
        reason = NOT_COMPARED + _obstacle(failure)
    return FamilyResult(family, error, reason, time.perf_counter() - started)


def _obstacle(failure: Exception) -> str:
    """Why a class of a whole model gave no logits of a text."""
    if isinstance(failure, ImportError):
        return "its class needs another library"
    if re.search(r"pixel_values|image_embed", str(failure)):
        return "its class takes no text without an image"
    return "the defaults of its config make no model"


def make_sheet(results: list[FamilyResult], parts: list[FamilyResult], options: Options) -> Sheet:
    """The table: exact families, and the others by reason; then those that see."""
    exact = [one.family for one in results if one.is_exact]
    worst = max((one.error for one in results if one.is_exact and one.error is not None), default=0.0)
    sheet = Sheet(
        "families",
        f"{len(exact)} of {len(results)} causal LMs of transformers {transformers.__version__} run in spans, and the "
        f"language parts of {sum(one.is_exact for one in parts)} of {len(parts)} models that see",
        ("result", "families"),
    )
    _add_rows(sheet, results, "")
    _add_rows(sheet, parts, "language part ")
    sheet.notes.append(f"Exact: logits within 1e-5; the largest difference is {worst:.1e}.")
    sheet.measured = {
        "options": asdict(options),
        "transformers": transformers.__version__,
        "exact": len(exact),
        "families": [asdict(one) for one in results],
        "language_parts": [asdict(one) for one in parts],
    }
    return sheet


def _add_rows(sheet: Sheet, results: list[FamilyResult], what: str) -> None:
    exact = [one.family for one in results if one.is_exact]
    sheet.rows.append((f"{what}exact ({len(exact)})", ", ".join(exact)))
    for reason, count in Counter(one.reason for one in results if not one.is_exact).most_common():
        families = ", ".join(one.family for one in results if one.reason == reason)
        said = "" if reason.startswith((OTHER_SCALE, NOT_COMPARED)) else "refused "
        sheet.rows.append((f"{what}{said}({count}): {reason}", families))


def main() -> None:
    options = tyro.cli(Options)
    quiet_libraries()
    torch.set_num_threads(1)
    console = make_console()
    results = [check(one) for one in track(_asked(MODEL_FOR_CAUSAL_LM_MAPPING, options), "families", console=console)]
    seeing = _asked(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, options)
    parts = [check_language(one) for one in track(seeing, "language parts", console=console)]
    make_sheet(results, parts, options).finish(console, options)


def _asked(classes: Iterable[Any], options: Options) -> list[Any]:
    return [one for one in classes if not options.only or re.fullmatch("|".join(options.only), one.model_type)]
