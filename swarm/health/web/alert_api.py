"""Alerts over HTTP: `/api/v1/alerts` as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import Response

from swarm.health.alerts.record import alerts_shown
from swarm.health.tasks.recorder import HealthLoop

MAX_NAME: Final = 200


def alert_routes(health_loop: HealthLoop) -> APIRouter:
    """The routes; the health loop has the data."""
    router = APIRouter()

    async def alerts(
        model: Annotated[str | None, Query(max_length=MAX_NAME, description="a model's name or fingerprint")] = None,
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
