"""The model as Anthropic's clients read it; they are told apart by the header that each of their requests has."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request

from client.api.backend import ModelCard

VERSION_HEADER: Final = "anthropic-version"


def speaks_anthropic(request: Request) -> bool:
    """Whether a request is of a client of Anthropic's."""
    return VERSION_HEADER in request.headers


def model_info(card: ModelCard) -> dict[str, Any]:
    """The model, as JSON values."""
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
    }


def model_page(card: ModelCard) -> dict[str, Any]:
    """The only page of the list of models."""
    models = [model_info(card)] if card.id else []
    end = card.id or None
    return {"data": models, "has_more": False, "first_id": end, "last_id": end}
