"""The API's reference as plain HTML, made from its OpenAPI description: no script, no style, nobody else's server."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any


def listing(openapi: dict[str, Any]) -> str:
    """One page that lists every path with its parameters."""
    info = openapi["info"]
    title = escape(info["title"])
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"</head><body><main><h1>{title}: API</h1>",
            f"<p>{escape(info.get('description', ''))}</p>",
            '<p>As <a href="/api/v1/openapi.json">OpenAPI</a> for programs. <a href="/">The page</a>.</p>',
            *(part for path, ways in openapi["paths"].items() for part in _path(path, ways.get("get", {}))),
            "</main></body></html>",
        ]
    )


def _path(path: str, way: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>GET {escape(path)}</code></h2>"
    yield f"<p><strong>{escape(way.get('summary', ''))}.</strong> {escape(way.get('description', ''))}</p>"
    parameters = way.get("parameters", [])
    if parameters:
        yield "<dl>"
        for one in parameters:
            need = "required" if one.get("required") else f"default {one['schema'].get('default')}"
            values = one["schema"].get("enum") or one["schema"].get("pattern") or ""
            shown = ", ".join(values) if isinstance(values, list) else values
            yield f"<dt><code>{escape(one['name'])}</code> ({escape(need)})</dt>"
            yield f"<dd>{escape(one.get('description', ''))} <code>{escape(shown)}</code></dd>"
        yield "</dl>"
