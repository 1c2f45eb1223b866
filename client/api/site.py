"""Routes that belong to no dialect: `/health`, the API's description, and the chat page at `/`.

The page is plain files that the wheel brings, and nothing from elsewhere. They are read once: no request opens a file,
and no name in a request becomes a path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from client.api.backend import NO_CARD
from client.api.context import ApiContext
from swarm.base.version import VERSION


def health_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while every layer of some model is served, else 503; `models` says what is missing and how to serve it.

        `model` is the first of them of which every layer is served, else the first.
        """
        cards = await context.models.cards()
        card = next((one for one in cards if one.is_complete), cards[0] if cards else NO_CARD)
        state = "ok" if card.is_complete else "waiting for layers"
        body = {"status": state, "version": VERSION, "model": asdict(card), "models": list(map(asdict, cards))}
        return JSONResponse(body, 200 if card.is_complete else 503)

    return router


_HEAD: Final = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Canopy API</title></head><body><main>'
    "<h1>Canopy API</h1>"
)
_PATH: Final = "/openapi.json"


def reference_routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def reference(request: Request) -> HTMLResponse:
        return HTMLResponse(reference_html(request.app.openapi()))

    return router


def reference_html(openapi: Mapping[str, Any]) -> str:
    """The page of an OpenAPI document: each operation with its first words and the fields of its body."""
    return "".join([_HEAD, f"<p>{escape(openapi['info']['description'])} ", *_body(openapi), "</main></body></html>"])


def _body(openapi: Mapping[str, Any]) -> Iterator[str]:
    yield f'For programs: <a href="{_PATH}">OpenAPI</a>.</p>'
    schemas = openapi.get("components", {}).get("schemas", {})
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', operation.get('summary', '')))}</p>"
            yield from _fields(operation, schemas)


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    schema = schemas.get(name, {})
    if not schema.get("properties"):
        return
    needed = set(schema.get("required", ()))
    yield "<table><thead><tr><th>field</th><th>type</th></tr></thead><tbody>"
    for field, about in schema["properties"].items():
        mark = " (required)" if field in needed else ""
        yield f"<tr><td><code>{escape(field)}</code>{mark}</td><td>{escape(_kind(about))}</td></tr>"
    yield "</tbody></table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """A field's type in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind for one in schema["anyOf"] if (kind := _kind(one)) != "null"))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any"))
    return f"list of {_kind(schema['items'])}" if kind == "array" and "items" in schema else kind


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
    """One file of the page."""

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
    found = {}
    for path in sorted(PAGE.rglob("*.*")):
        body = path.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        found[path.relative_to(PAGE).as_posix()] = ChatFile(body, _MEDIA_TYPES[path.suffix], tag)
    return found


def page_routes(context: ApiContext) -> APIRouter:
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
