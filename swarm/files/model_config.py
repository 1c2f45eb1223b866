"""The config of a model whose small files are in a folder: read as transformers reads it, and checked before that.

Whatever reads a model reads its config first, so what refuses a model by its config stands here. Code that comes with a
model is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from transformers import AutoConfig, PreTrainedConfig

from swarm.base.errors import UnknownModel, UnsupportedModel
from swarm.base.plain_text import plain_line
from swarm.files.hub import ADAPTER, CONFIG
from swarm.files.pretrained import check_own_code, first_line
from swarm.files.stored.quantised import quantisation_of, refusal
from swarm.protocol.limits import MAX_LAYERS

if TYPE_CHECKING:
    from pathlib import Path

MAX_DEPTH: Final = 32
"""How deep a config may be nested: published ones have 5 levels."""
COUNTS: Final = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""What a text model has at least one of, where its config names it."""
MAX_COUNT: Final = 1 << 31


def read_config(folder: Path, model: str) -> PreTrainedConfig:
    """The config of a model that transformers knows by itself.

    Raises:
        UnknownModel: there is no config that it can read.
        UnsupportedModel: only code that comes with the model could read it, it is quantised in a way that is not read,
            it is an adapter, or it has numbers that no model has.
    """
    if (folder / ADAPTER).exists():
        base = plain_line(str(_content(folder / ADAPTER, model).get("base_model_name_or_path")))[:200]
        advice = "merge it into its model (PEFT: merge_and_unload, then save_pretrained), or give that model alone"
        raise UnsupportedModel(f"{model}: a PEFT adapter of {base}, which is not run beside a model: {advice}")
    content = _content(folder / CONFIG, model)
    if (reason := _refusal(content)) is not None:
        raise UnsupportedModel(f"{model}: {reason}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
    except Exception as error:  # what classes raise on numbers that no model has may be anything
        check_own_code(folder / CONFIG, model)
        raise UnknownModel(f"{model}: no {CONFIG} that transformers knows ({first_line(error)})") from error
    quantisation = quantisation_of(config)
    reason = _impossible(text) or (None if quantisation is None else refusal(quantisation))
    if reason is not None:
        raise UnsupportedModel(f"{model}: {reason}")
    return config


def _content(file: Path, model: str) -> Mapping[str, Any]:
    """What the file says; empty where it is not there, which transformers puts better."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise UnsupportedModel(f"{model}: {file.name} is nested deeper than {MAX_DEPTH} levels") from None
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{model}: {file.name} cannot be read ({first_line(error)}); fetch it again") from error
    if not isinstance(content, dict):
        raise UnknownModel(f"{model}: {file.name} is no JSON object; fetch it again")
    if _is_deeper(content, MAX_DEPTH):
        raise UnsupportedModel(f"{model}: {file.name} is nested deeper than {MAX_DEPTH} levels")
    return content


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(one, levels - 1) for one in inner if isinstance(one, (dict, list)))


def _refusal(content: Mapping[str, Any]) -> str | None:
    """Why a config is not read any further: how its weights are stored."""
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    for part in parts:
        given = part.get("quantization_config", part.get("compression_config"))
        if given is not None and (reason := refusal(given)) is not None:
            return reason
        own = part.get("quantization")
        if isinstance(own, dict) and "bits" in own and given is None:
            return refusal({"quant_method": "MLX"})
    return None


def _impossible(text: PreTrainedConfig) -> str | None:
    """Why no model has these numbers; None where one may."""
    values, aliases = text.to_dict(), type(text).attribute_map
    for name in COUNTS:
        value = values.get(aliases.get(name, name))
        most = MAX_LAYERS if name == "num_hidden_layers" else MAX_COUNT
        if isinstance(value, int) and not 1 <= value <= most:
            return f"{CONFIG} says {name} {value}, and a model has 1 to {most}; fetch it again, or choose another model"
    return None
