"""The chat page at `/`: plain files that the wheel brings, and nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles

from client.api.context import ApiContext

PAGE: Final = Path(__file__).parent / "page"
_METHODS: Final = ["GET", "HEAD"]


class ChatFiles(StaticFiles):
    """The page's files, revalidated each time, so that a new version is seen at once; unchanged ones are a 304."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:  # noqa: ANN401 - starlette's own
        """One file."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def routes(context: ApiContext) -> APIRouter:
    """The page and its files."""
    router = APIRouter(include_in_schema=False)
    files = ChatFiles(directory=PAGE)

    @router.api_route("/", methods=_METHODS)
    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @router.api_route("/page/{name:path}", methods=_METHODS)
    async def file(request: Request, name: str) -> Response:
        return await files.get_response(name, request.scope)

    return router
