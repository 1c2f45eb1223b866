"""`GET /v1/models`, in the form of OpenAI, Anthropic or Codex; `POST /v1/embeddings`, which is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from client.api.backend import ModelCard
from client.api.context import ApiContext, speaks_anthropic
from client.api.errors import ApiError
from client.api.json_text import JsonRoute
from client.api.openai.fields import written_time

CODEX_INSTRUCTIONS: Final = (
    "You are a coding agent. You work in a terminal, in the folder of the user's project.\n"
    "- Do what the user asks, to its end, and nothing else. A question gets an answer and changes nothing.\n"
    "- Read a file before you change it. Look for what you need with commands such as `rg` and `sed -n`.\n"
    "- Run commands with the tool for it, one step at a time, and read what they print before you go on.\n"
    "- Change files with small edits. Keep to the style of the code around them.\n"
    "- Run the tests that a change concerns, where there are any.\n"
    "- Say what you did in a few plain sentences, with the names of the files. Never claim what you did not check."
)
"""What Codex tells a model that this server lists, instead of its own 4,000 tokens."""


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.get("/v1/models")
    async def list_models(request: Request) -> JSONResponse:
        """Every model, the first by each of its names: context, sampling, and whether every layer is served now.

        The context of a model that nobody has asked for yet is not known: 0.
        """
        cards = await context.cards()
        if speaks_anthropic(request):
            return JSONResponse(model_page(cards))
        body: dict[str, Any] = {"object": "list", "data": [model_body(one) for one in cards]}
        if "client_version" in request.query_params:  # Codex
            body["models"] = [codex_model(one) for one in cards]
        return JSONResponse(body)

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str, request: Request) -> JSONResponse:
        """The same for one name."""
        card = await context.card(model)
        return JSONResponse(model_info(card) if speaks_anthropic(request) else model_body(card))

    @router.post("/v1/embeddings")
    async def create_embedding() -> JSONResponse:
        """Refused: a chain of nodes that hold a language model's layers makes none."""
        message = "This server makes no embeddings; run an embedding model beside it."
        raise ApiError(400, message, code="unsupported_endpoint")

    return router


def model_body(card: ModelCard) -> dict[str, Any]:
    """A model as `/v1/models` shows it: OpenAI's fields, and those that other servers have made common."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "canopy",
        "context_length": card.context_length,
        "max_model_len": card.context_length,
        "health": {
            "is_complete": card.is_complete,
            "missing_layers": list(card.missing),
            "serve_line": card.serve_line,
        },
        "capabilities": {"chat": True, "chat_template": card.has_template, "tools": bool(card.tool_family)},
        "sampling": dict(card.sampling),
        "fingerprint": card.fingerprint,
    }


def model_info(card: ModelCard) -> dict[str, Any]:
    """A model as Anthropic's clients read it."""
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": written_time(card.created),
        "lifecycle": "active",
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
    }


def model_page(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """The only page of the list of models, for Anthropic's clients."""
    first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
    return {"data": [model_info(card) for card in cards], "has_more": False, "first_id": first, "last_id": last}


def codex_model(card: ModelCard) -> dict[str, Any]:
    """A model as Codex reads it, so that it knows the context and what the model takes.

    Source: `ModelInfo` in codex-rs/protocol/src/openai_models.rs of github.com/openai/codex.
    """
    return {
        "slug": card.id,
        "display_name": card.id,
        "description": None,
        "supported_reasoning_levels": [],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": max(card.context_length // 8, 1_000)},
        "supports_parallel_tool_calls": True,
        "context_window": card.context_length,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
