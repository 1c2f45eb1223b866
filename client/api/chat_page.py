"""The chat page at `/`: plain files that the wheel brings, and nothing from elsewhere.

They are read once: no request opens a file, and no name in a request becomes a path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from client.api.context import ApiContext

PAGE: Final = Path(__file__).parent / "page"
_METHODS: Final = ["GET", "HEAD"]
_MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".md": "text/plain",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


@dataclass(frozen=True, slots=True)
class ChatFile:
    """One file of the page.

    Attributes:
        body: of the answer.
        media_type: by its name.
        tag: of its content, for revalidation.
    """

    body: bytes
    media_type: str
    tag: str

    def answer(self, request: Request) -> Response:
        """The file, or a 304 where the browser has it; asked each time, so that a new version is seen at once."""
        headers = {"cache-control": "no-cache", "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def read_files() -> dict[str, ChatFile]:
    """The page's files by their name in `/page/`."""
    found = {}
    for path in sorted(PAGE.rglob("*.*")):
        body = path.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        found[path.relative_to(PAGE).as_posix()] = ChatFile(body, _MEDIA_TYPES[path.suffix], tag)
    return found


def routes(context: ApiContext) -> APIRouter:
    """The page and its files."""
    router = APIRouter(include_in_schema=False)
    files = read_files()

    @router.api_route("/", methods=_METHODS)
    async def index(request: Request) -> Response:
        return files["index.html"].answer(request)

    @router.api_route("/favicon.ico", methods=_METHODS)
    async def icon(request: Request) -> Response:
        """Browsers ask for it wherever no page names another one."""
        return files["favicon.svg"].answer(request)

    @router.api_route("/page/{name:path}", methods=_METHODS)
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "no such file")
        return files[name].answer(request)

    return router
