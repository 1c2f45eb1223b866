"""The health service over HTTP: state, history, a live stream, the page. Read-only; owns no knowledge of its own."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from swarm.health.tasks.publisher import StatePublisher
from swarm.health.web.badge_routes import badge_router
from swarm.health.web.docs_page import listing
from swarm.metrics.http import Guarded

PAGE: Final = Path(__file__).parent / "page"
Window = Literal["1h", "24h", "30d"]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
Points = Callable[[str, Window], Awaitable[dict[str, Any]]]

_FRESH: Final = {"cache-control": "no-store"}


def make_app(publisher: StatePublisher, points: Points, page: Path = PAGE) -> FastAPI:
    """The whole of it as an ASGI application.

    Args:
        publisher: holds the state.
        points: history of a model for a window, as JSON values; raises KeyError where there is none.
        page: folder of the page's files.
    """
    app = FastAPI(
        title="Canopy swarm health",
        version="1",
        description="What a swarm's nodes say and what probes of it find. Read-only; times are Unix seconds.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    _add_api(app, publisher, points)
    app.include_router(badge_router(lambda: publisher.state))
    _add_page(app, page)
    app.add_middleware(Guarded)
    return app


class Files(StaticFiles):
    """The page's files, asked for again each time, so that a new version is seen at once; unchanged ones are a 304."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:  # noqa: ANN401 - starlette's own
        """One file."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def _add_api(app: FastAPI, publisher: StatePublisher, points: Points) -> None:
    @_read(app, "/api/v1/state", "Everything that is known now")
    async def state(request: Request) -> Response:
        """Verdicts, nodes, layers, probes, alerts, events and contributors, at most half a second old."""
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers = {**_FRESH, "content-encoding": "gzip", "vary": "accept-encoding"}
            return Response(publisher.packed, headers=headers, media_type="application/json")
        return Response(publisher.json, headers={**_FRESH, "vary": "accept-encoding"}, media_type="application/json")

    @_read(app, "/api/v1/history", "How a model fared")
    async def history(
        model: Annotated[str, Query(pattern="^[0-9a-f]{8,128}$", description="the model's fingerprint")],
        window: Annotated[Window, Query(description="how far back")] = "24h",
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
            return Response(headers=_FRESH, media_type="text/event-stream")
        if not publisher.has_room:
            raise HTTPException(503, "too many readers; poll /api/v1/state", {"retry-after": "30"})
        headers = {**_FRESH, "x-accel-buffering": "no"}
        return StreamingResponse(publisher.frames(), headers=headers, media_type="text/event-stream")

    @_read(app, "/api/v1/docs")
    async def docs() -> Response:
        return HTMLResponse(listing(app.openapi()))


def _add_page(app: FastAPI, page: Path) -> None:
    @_read(app, "/")
    async def index() -> Response:
        return FileResponse(page / "index.html", headers={"cache-control": "no-cache"})

    app.mount("/page", Files(directory=page, check_dir=False))


def _read(app: FastAPI, path: str, summary: str | None = None) -> Callable[[Handler], Handler]:
    """Answer GET and HEAD; what has a summary is part of the API's description."""

    def add(handler: Handler) -> Handler:
        app.get(path, summary=summary, include_in_schema=summary is not None)(handler)
        app.head(path, include_in_schema=False)(handler)
        return handler

    return add


def _json(values: dict[str, Any]) -> Response:
    return Response(json.dumps(values, separators=(",", ":")), headers=_FRESH, media_type="application/json")
