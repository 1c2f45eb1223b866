"""`/health`: whether the server lives, and whether the swarm could answer now."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from client.api.context import ApiContext
from swarm.runtime.version import VERSION


def routes(context: ApiContext) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["health"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while every layer is served, else 503; the body says what is missing and how to serve it."""
        card = await context.backend.card()
        state = "ok" if card.is_complete else "waiting for layers"
        return JSONResponse(
            {"status": state, "version": VERSION, "model": asdict(card)}, 200 if card.is_complete else 503
        )

    return router
