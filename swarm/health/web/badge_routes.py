"""The badge over HTTP: small, cacheable, and an SVG even where there is no such model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from swarm.health.web.badge import MAX_LABEL, badge

MAX_AGE_S: Final = 30
MAX_NAME: Final = 300
SUFFIX: Final = ".svg"


def badge_router(state: Callable[[], Mapping[str, Any]]) -> APIRouter:
    """`/badge/<name or fingerprint>.svg`; names of the hub hold a slash. `state` gives the newest one."""
    router = APIRouter()

    @router.head("/badge/{model:path}", include_in_schema=False)
    @router.get("/badge/{model:path}", summary="A model's verdict as a small SVG")
    async def picture(
        request: Request,
        model: str,
        label: Annotated[str | None, Query(max_length=MAX_LABEL, description="instead of the model's name")] = None,
    ) -> Response:
        """By the model's name, which may hold a slash, or its fingerprint, and `.svg`; an unknown one is a 404."""
        wanted = model.removesuffix(SUFFIX)
        if wanted == model or not wanted or len(wanted) > MAX_NAME:
            raise HTTPException(404, "a badge is at /badge/MODEL.svg")
        made = badge(state(), wanted, label)
        body = made.svg.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        headers = {"cache-control": f"public, max-age={MAX_AGE_S}", "etag": tag}
        if made.is_known and tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, 200 if made.is_known else 404, headers, "image/svg+xml")

    return router
