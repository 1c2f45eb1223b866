"""The health service over HTTP: state, history, a live stream, badges, the page and the API's reference.

Read-only; owns no data of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from swarm.health.alerts.rules import alerts_shown
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.tasks.recorder import HealthLoop
from swarm.health.web.badge import MAX_LABEL, badge
from swarm.status.http import Guarded

PAGE: Final = Path(__file__).parent / "page"
WindowName = Literal["1h", "24h", "30d"]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
Points = Callable[[str, WindowName], Awaitable[dict[str, Any]]]

MAX_AGE_S: Final = 30
"""How long a badge may be cached."""
MAX_NAME: Final = 300
SUFFIX: Final = ".svg"
_NO_STORE: Final = {"cache-control": "no-store"}


def make_app(publisher: StatePublisher, points: Points, page: Path = PAGE) -> FastAPI:
    """All routes but those of alerts and metrics, as an ASGI application."""
    app = FastAPI(
        title="Canopy swarm health",
        version="1",
        description="What a swarm's nodes say and what probes of it find. Read-only; times are Unix seconds.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    _add_api(app, publisher, points)
    _add_badges(app, publisher)
    _add_page(app, page)
    app.add_middleware(Guarded)
    return app


class PageFiles(StaticFiles):
    """The page's files, revalidated each time, so that a new version is seen at once; unchanged ones are a 304."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:  # noqa: ANN401 - starlette's own
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def _add_api(app: FastAPI, publisher: StatePublisher, points: Points) -> None:
    @_read(app, "/api/v1/state", "Everything that is known now")
    async def state(request: Request) -> Response:
        """Verdicts, nodes, layers, probes, alerts, events and contributors, at most half a second old."""
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers = {**_NO_STORE, "content-encoding": "gzip", "vary": "accept-encoding"}
            return Response(publisher.packed, headers=headers, media_type="application/json")
        return Response(publisher.json, headers={**_NO_STORE, "vary": "accept-encoding"}, media_type="application/json")

    @_read(app, "/api/v1/contributors", "Who contributed most")
    async def contributors(request: Request) -> Response:
        """The contributors of the state alone, for nodes that prefer them."""
        return _json({"v": 1, "contributors": publisher.state.get("contributors", [])})

    @_read(app, "/api/v1/history", "How a model fared")
    async def history(
        model: Annotated[str, Query(pattern="^[0-9a-f]{8,128}$", description="the model's fingerprint")],
        window: Annotated[WindowName, Query(description="how far back")] = "24h",
    ) -> Response:
        """A point every 5 s for an hour, every minute for a day, every 15 minutes for 30 days.

        `seconds` of a point: how long each verdict held, of the time that was recorded. `verdict` is the worst of them.
        """
        try:
            return _json(await points(model, window))
        except KeyError as error:
            raise HTTPException(404, "no model of that fingerprint was seen") from error

    @_read(app, "/api/v1/stream", "The state, live")
    async def stream(request: Request) -> Response:
        """Server-sent events: `state` with everything, at most twice a second; slow readers get the newest only."""
        if request.method == "HEAD":
            return Response(headers=_NO_STORE, media_type="text/event-stream")
        if not publisher.has_room:
            raise HTTPException(503, "too many readers; poll /api/v1/state", {"retry-after": "30"})
        headers = {**_NO_STORE, "x-accel-buffering": "no"}
        return StreamingResponse(publisher.frames(), headers=headers, media_type="text/event-stream")

    @_read(app, "/api/v1/docs")
    async def docs() -> Response:
        return HTMLResponse(reference_html(app.openapi()))


def _add_badges(app: FastAPI, publisher: StatePublisher) -> None:
    @_read(app, "/badge/{model:path}", "A model's verdict as a small SVG")
    async def picture(
        request: Request,
        model: str,
        label: Annotated[str | None, Query(max_length=MAX_LABEL, description="instead of the model's name")] = None,
    ) -> Response:
        """By the model's name, which may hold a slash, or its fingerprint, and `.svg`; an unknown one is a 404."""
        name = model.removesuffix(SUFFIX)
        if name == model or not name or len(name) > MAX_NAME:
            raise HTTPException(404, "a badge is at /badge/MODEL.svg")
        drawn = badge(publisher.state, name, label)
        body = drawn.svg.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        headers = {"cache-control": f"public, max-age={MAX_AGE_S}", "etag": tag}
        if drawn.is_known and tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, 200 if drawn.is_known else 404, headers, "image/svg+xml")


def _add_page(app: FastAPI, page: Path) -> None:
    @_read(app, "/")
    async def index() -> Response:
        return FileResponse(page / "index.html", headers={"cache-control": "no-cache"})

    app.mount("/page", PageFiles(directory=page, check_dir=False))


def _read(app: FastAPI, path: str, summary: str | None = None) -> Callable[[Handler], Handler]:
    """Answer GET and HEAD; what has a summary is part of the API's description."""

    def add(handler: Handler) -> Handler:
        app.get(path, summary=summary, include_in_schema=summary is not None)(handler)
        app.head(path, include_in_schema=False)(handler)
        return handler

    return add


def _json(values: dict[str, Any]) -> Response:
    return Response(json.dumps(values, separators=(",", ":")), headers=_NO_STORE, media_type="application/json")


def reference_html(openapi: dict[str, Any]) -> str:
    """The API's reference as plain HTML, from its OpenAPI description: no script, no style, nothing from elsewhere."""
    info = openapi["info"]
    title = escape(info["title"])
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"</head><body><main><h1>{title}: API</h1>",
            f"<p>{escape(info.get('description', ''))}</p>",
            '<p>As <a href="/api/v1/openapi.json">OpenAPI</a> for programs. <a href="/">The page</a>.</p>',
            *(
                line
                for path, operations in openapi["paths"].items()
                for line in _path_html(path, operations.get("get", {}))
            ),
            "</main></body></html>",
        ]
    )


def _path_html(path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>GET {escape(path)}</code></h2>"
    yield f"<p><strong>{escape(operation.get('summary', ''))}.</strong> {escape(operation.get('description', ''))}</p>"
    parameters = operation.get("parameters", [])
    if parameters:
        yield "<dl>"
        for parameter in parameters:
            use = "required" if parameter.get("required") else f"default {parameter['schema'].get('default')}"
            values = parameter["schema"].get("enum") or parameter["schema"].get("pattern") or ""
            shown = ", ".join(values) if isinstance(values, list) else values
            yield f"<dt><code>{escape(parameter['name'])}</code> ({escape(use)})</dt>"
            yield f"<dd>{escape(parameter.get('description', ''))} <code>{escape(shown)}</code></dd>"
        yield "</dl>"


MAX_ASKED: Final = 200
"""Characters of a name in a question about alerts."""


def alert_routes(health_loop: HealthLoop) -> APIRouter:
    """The routes; the health loop has the data."""
    router = APIRouter()

    async def alerts(
        model: Annotated[str | None, Query(max_length=MAX_ASKED, description="a model's name or fingerprint")] = None,
    ) -> Response:
        """The alerts that hold now, the worst first, and those that ended lately, the newest first."""
        book = health_loop.overview.alerts
        shown = alerts_shown(book, health_loop.clock())
        if model is not None:
            known = {name for one in health_loop.assessments for name in (one.model.name, one.model.fingerprint)}
            told = (change.alert.finding for change in book.changes)
            if model not in known and not any(model in (one.fingerprint, one.model) for one in told):
                raise HTTPException(404, "no model of that name or fingerprint is known")
            for name in ("open", "ended"):
                shown[name] = [one for one in shown[name] if model in (one["model"], one["model_name"])]
        text = json.dumps(shown, separators=(",", ":"))
        return Response(text, headers={"cache-control": "no-store"}, media_type="application/json")

    path = "/api/v1/alerts"
    router.add_api_route(path, alerts, methods=["GET"], summary="Alerts, open and ended", response_class=Response)
    router.add_api_route(path, alerts, methods=["HEAD"], include_in_schema=False, response_class=Response)
    return router
