"""`/docs`: the API's reference as one page, from its OpenAPI; nothing on it comes from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from client.api.context import ApiContext

_HEAD: Final = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Canopy API</title></head><body><main>'
    "<h1>Canopy API</h1>"
)
_PATH: Final = "/openapi.json"


def routes(context: ApiContext) -> APIRouter:
    """The route."""
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
