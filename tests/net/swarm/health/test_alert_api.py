"""Alerts over HTTP: JSON, per model; and a restart of the service's keeper."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.health.alerts.rules import AlertTransition, Change
from swarm.health.state.overview import Overview
from swarm.health.tasks.history import History
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.tasks.recorder import HealthLoop
from swarm.health.web.api import alert_routes, make_app
from swarm.status.http import HEADERS, make_server
from swarm.status.messages import ServedModel
from tests.net.swarm.health.test_service import ask
from tests.telemetry_messages import FINGERPRINT, NOW, status

NAME = "org/demo <1>"
PEER = PeerId("QmNode")


class Keeper:
    """A health loop whose clock stands until a test sets it."""

    def __init__(self, history: History) -> None:
        self.now = NOW
        self.reported: list[Change] = []
        overview = Overview(["/ip4/x"], "canopy", NOW)
        self.health_loop = HealthLoop(overview, StatePublisher(), history, lambda: self.now, self.reported.extend)

    def hear(self, span: Span) -> None:
        body = status(at=self.now, span=span, model=ServedModel(NAME, FINGERPRINT, 12))
        self.health_loop.overview.knowledge.apply_telemetry(PEER, FINGERPRINT, body, self.now)
        self.health_loop.overview.knowledge.slots.enter(FINGERPRINT, True, self.now)

    def be(self, seconds: int, span: Span) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.hear(span)
            self.health_loop.step()


@asynccontextmanager
async def served(health_loop: HealthLoop, page: Path) -> AsyncIterator[int]:
    app = make_app(health_loop.publisher, health_loop.points, page)
    app.include_router(alert_routes(health_loop))
    server = make_server(app)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        async def serve() -> None:
            await server.serve(sockets=[listening])

        async with TaskScope() as scope:
            task = scope.spawn(serve())
            yield listening.getsockname()[1]
            server.should_exit = True
            await asyncio.wait([task])


async def test_alerts_as_json(tmp_path: Path) -> None:
    async with History.open(tmp_path / "h") as history:
        keeper = Keeper(history)
        keeper.be(5, Span(0, 4))
        async with served(keeper.health_loop, tmp_path) as port:
            shown = json.loads((await ask(port, "/api/v1/alerts")).body)
            (alert,) = shown["open"]
            assert (alert["kind"], alert["severity"], alert["model"], alert["model_name"]) == (
                *("gap", "critical", FINGERPRINT),
                NAME,
            )
            assert alert["fix"].startswith("node serve")
            answer = await ask(port, "/api/v1/alerts")
            assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"].lower()

            keeper.be(30, Span(0, 12))
            ended = json.loads((await ask(port, "/api/v1/alerts?model=org/demo%20%3C1%3E")).body)["ended"]
            assert [one["occurrence"] for one in ended] == [alert["occurrence"]]
            assert ended[0]["ended_at"] > ended[0]["since"]
            assert (await ask(port, "/api/v1/alerts?model=nobody")).status == 404
            assert (await ask(port, f"/api/v1/alerts?model={'x' * 300}")).status == 422
            head = await ask(port, "/api/v1/alerts", "HEAD")
            assert (head.status, head.body) == (200, b"")
            assert (await ask(port, "/api/v1/alerts", "POST")).status == 405
            assert "/api/v1/alerts" in json.loads((await ask(port, "/api/v1/openapi.json")).body)["paths"]
            assert b"/api/v1/alerts" in (await ask(port, "/api/v1/docs")).body


async def test_a_restart_reports_no_change_twice(tmp_path: Path) -> None:
    async with History.open(tmp_path / "h") as history:
        keeper = Keeper(history)
        await keeper.health_loop.load()
        keeper.be(5, Span(0, 4))
        assert [change.step for change in keeper.reported] == [AlertTransition.BEGAN]
        await keeper.health_loop._write()  # without `close`: an alert is stored as soon as it is reported
    async with History.open(tmp_path / "h") as history:
        again = Keeper(history)
        again.now = keeper.now + 60
        await again.health_loop.load()
        again.health_loop.step()
        assert len(again.health_loop.overview.alerts.open()) == 1, "it is held while the model is not known yet"
        again.be(5, Span(0, 4))
        assert again.reported == []
        again.be(25, Span(0, 12))
        (ended,) = again.reported
        assert (ended.step, ended.alert.occurrence) == (AlertTransition.ENDED, keeper.reported[0].alert.occurrence)
