"""Alerts over HTTP: `/api/v1/alerts` as JSON, `/alerts.rss` as a feed that may be asked for again and again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from swarm.health.alerts.feed import http_date, rss
from swarm.health.alerts.record import alerts_shown
from swarm.health.alerts.rules import Alert, Change
from swarm.health.tasks.recorder import HealthLoop

_CACHED: Final = {"cache-control": "public, max-age=30"}
MAX_NAME: Final = 200


def alert_routes(health_loop: HealthLoop) -> APIRouter:
    """The routes; the health loop has the data."""
    router = APIRouter()

    async def alerts(
        model: Annotated[str | None, Query(max_length=MAX_NAME, description="a model's name or fingerprint")] = None,
    ) -> Response:
        """The alerts that hold now, the worst first, and those that ended lately, the newest first."""
        shown = alerts_shown(health_loop.overview.alerts, health_loop.clock())
        if model is not None:
            _check_known(health_loop, model)
            for name in ("open", "ended"):
                shown[name] = [one for one in shown[name] if model in (one["model"], one["model_name"])]
        text = json.dumps(shown, separators=(",", ":"))
        return Response(text, headers={"cache-control": "no-store"}, media_type="application/json")

    async def feed(
        request: Request,
        model: Annotated[str | None, Query(max_length=MAX_NAME, description="a model's name or fingerprint")] = None,
    ) -> Response:
        """RSS 2.0: an item for whatever began, became worse or ended; answers If-None-Match and If-Modified-Since."""
        changes = list(health_loop.overview.alerts.changes)
        if model is not None:
            _check_known(health_loop, model)
            changes = [change for change in changes if _is_about(change.alert, model)]
        site = str(request.base_url)
        data = rss(changes, site, str(request.url), health_loop.overview.name, model)
        return _conditional(request, data, changes)

    for path, handler, summary in (
        ("/api/v1/alerts", alerts, "Alerts, open and ended"),
        ("/alerts.rss", feed, "Alerts as RSS"),
    ):
        router.add_api_route(path, handler, methods=["GET"], summary=summary, response_class=Response)
        router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, response_class=Response)
    return router


def _is_about(alert: Alert, model: str) -> bool:
    return model in (alert.finding.fingerprint, alert.finding.model)


def _check_known(health_loop: HealthLoop, model: str) -> None:
    book = health_loop.overview.alerts
    known = {name for one in health_loop.assessments for name in (one.model.name, one.model.fingerprint)}
    if model not in known and not any(_is_about(change.alert, model) for change in book.changes):
        raise HTTPException(404, "no model of that name or fingerprint is known")


def _conditional(request: Request, data: bytes, changes: Sequence[Change]) -> Response:
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**_CACHED, "etag": tag}
    if changes:
        headers["last-modified"] = http_date(changes[-1].at)
    if _is_unchanged(request, tag, changes):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type="application/rss+xml; charset=utf-8")


def _is_unchanged(request: Request, tag: str, changes: Sequence[Change]) -> bool:
    """Whether the client has this version already; a tag, if there is one, decides alone (RFC 9110, 13.2.2)."""
    tags = request.headers.get("if-none-match")
    if tags is not None:
        return tags.strip() == "*" or tag in [one.strip().removeprefix("W/") for one in tags.split(",")]
    since = request.headers.get("if-modified-since")
    if since is None or not changes:
        return False
    try:
        return int(changes[-1].at) <= parsedate_to_datetime(since).timestamp()
    except (ValueError, OverflowError):
        return False
