"""What Ollama's API says of the model and of itself."""

from __future__ import annotations

from typing import Final

from client.api.backend import ModelCard
from client.api.json_text import JsonObject
from client.api.ollama.writer import written_time

OLLAMA_VERSION: Final = "0.12.6"
"""The release of Ollama whose API this is; clients ask for at least some version."""
TAG: Final = ":latest"
_PARAMETERS: Final = {"repetition_penalty": "repeat_penalty"}
"""Options that Ollama calls otherwise."""


def tagged(name: str) -> str:
    """A model's name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}{TAG}"


def listed(card: ModelCard) -> JsonObject:
    """The model in `/api/tags`. Its size is not known here: nobody holds it whole."""
    return {
        "name": tagged(card.id),
        "model": tagged(card.id),
        "modified_at": written_time(card.created),
        "size": 0,
        "digest": card.fingerprint,
        "details": details(card),
    }


def running(card: ModelCard, now_s: float) -> JsonObject:
    """The model in `/api/ps`; a swarm does not unload it."""
    described = listed(card)
    del described["modified_at"]
    expires_at = written_time(now_s + 24 * 3600)
    return {**described, "expires_at": expires_at, "size_vram": 0, "context_length": card.context_length}


def shown(card: ModelCard) -> JsonObject:
    """The answer of `/api/show`."""
    capabilities = ["completion", *(["tools"] if card.tool_family else [])]
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{_PARAMETERS.get(name, name)} {value}" for name, value in card.sampling.items()),
        "template": "",
        "license": "",
        "modified_at": written_time(card.created),
        "details": details(card),
        "model_info": {
            "general.architecture": "canopy",
            "general.basename": card.id,
            "canopy.context_length": card.context_length,
        },
        "capabilities": capabilities,
    }


def details(card: ModelCard) -> JsonObject:
    """What is known of the weights."""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "canopy",
        "families": ["canopy"],
        "parameter_size": "",
        "quantization_level": "",
    }
