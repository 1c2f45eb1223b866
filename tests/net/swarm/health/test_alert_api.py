"""Alerts over HTTP: JSON, the feed and its conditional requests, per model; and a restart of the service's keeper."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from xml.etree import ElementTree as Xml

from swarm.health.alerts.rules import AlertTransition, Change
from swarm.health.state.overview import Overview
from swarm.health.tasks.history import History
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.tasks.recorder import HealthLoop
from swarm.health.web.alert_api import alert_routes
from swarm.health.web.api import make_app
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.metrics.http import HEADERS, make_server
from swarm.runtime.tasks import TaskScope
from swarm.telemetry.messages import ServedModel
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


async def test_alerts_as_json_and_as_a_feed(tmp_path: Path) -> None:
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
            feed = await ask(port, "/alerts.rss", "GET", "x-forwarded-proto: https")
            assert feed.headers["content-type"].startswith("application/rss+xml")
            assert feed.headers["content-security-policy"] == HEADERS["content-security-policy"].lower()
            (channel,) = Xml.fromstring(feed.body)
            assert channel.findtext("link") == "https://here/"
            assert [item.findtext("title") for item in channel.findall("item")] == [alert["text"]]
            await check_conditions(port, feed.headers)

            keeper.be(30, Span(0, 12))
            ended = json.loads((await ask(port, "/api/v1/alerts?model=org/demo%20%3C1%3E")).body)["ended"]
            assert [one["occurrence"] for one in ended] == [alert["occurrence"]]
            assert ended[0]["ended_at"] > ended[0]["since"]
            for model in (FINGERPRINT, "org/demo%20%3C1%3E"):
                (channel,) = Xml.fromstring((await ask(port, f"/alerts.rss?model={model}")).body)
                assert len(channel.findall("item")) == 2
            for path in ("/alerts.rss?model=nobody", "/api/v1/alerts?model=nobody"):
                assert (await ask(port, path)).status == 404
            assert (await ask(port, f"/alerts.rss?model={'x' * 300}")).status == 422
            head = await ask(port, "/alerts.rss", "HEAD")
            assert (head.status, head.body) == (200, b"")
            assert (await ask(port, "/alerts.rss", "POST")).status == 405
            paths = json.loads((await ask(port, "/api/v1/openapi.json")).body)["paths"]
            assert {"/api/v1/alerts", "/alerts.rss"} <= set(paths)
            assert b"/alerts.rss" in (await ask(port, "/api/v1/docs")).body


async def check_conditions(port: int, first: dict[str, str]) -> None:
    tag, date = first["etag"], first["last-modified"].upper().replace("JAN", "Jan").replace("FRI", "Fri")
    wanted: Sequence[tuple[str, int]] = (
        (f"if-none-match: {tag}", 304),
        (f'if-none-match: "other", W/{tag}', 304),
        ('if-none-match: "other"', 200),
        (f"if-modified-since: {date}", 304),
        ("if-modified-since: Thu, 01 Jan 1970 00:00:00 GMT", 200),
        ("if-modified-since: nonsense", 200),
    )
    for header, code in wanted:
        answer = await ask(port, "/alerts.rss", "GET", "x-forwarded-proto: https", header)
        assert (answer.status, bool(answer.body)) == (code, code == 200), header


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
