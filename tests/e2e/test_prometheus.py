"""Debian's Prometheus with our configuration scrapes real pages; every query of the board and the rules gives data.

Everything that an alert is about is wrong in these samples (`tests.sample_metrics`), so no query is left out.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from node.life.metrics import serving_metrics
from swarm.base.tasks import TaskScope
from swarm.health.web.api import make_app
from swarm.status.http import MetricsPage, make_server
from tests.monitoring_files import PROMETHEUS, board_queries, rule_queries
from tests.net.brokers import free_port
from tests.sample_metrics import SampleHealth, SampleNode

PATIENCE_S = 60


def configuration(folder: Path, health: list[int], nodes: list[int]) -> Path:
    """Our own files, with other targets and a faster clock."""
    shutil.copytree(PROMETHEUS, folder / "config")
    config = folder / "config" / "prometheus.yml"
    config.write_text(config.read_text().replace("15s", "1s").replace("10s", "1s"))
    for name, ports in (("health", health), ("nodes", nodes)):
        targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
        (folder / "config" / "targets" / f"{name}.yml").write_text(json.dumps(targets))
    return config


@contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[str]:
    """The base of its API; it may not answer yet."""
    port = free_port()
    words = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            process.terminate()
            process.wait(20)


def get(url: str, **query: str) -> Any:  # noqa: ANN401
    """The data of an answer."""
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)["data"]


def has_data(api: str, query: str) -> bool:
    """Whether it gives a number that is one.

    Raises:
        HTTPError: the query makes no sense.
    """
    found = get(f"{api}/query", query=query)["result"]
    return any(not math.isnan(float(one["value"][1])) for one in found)


def wait_for_data(api: str, queries: dict[str, str]) -> dict[str, str]:
    """Ask until all have answers; those that have none in the end."""
    deadline = time.monotonic() + PATIENCE_S
    waiting = dict(queries)
    while waiting and time.monotonic() < deadline:
        try:
            waiting = {what: query for what, query in waiting.items() if not has_data(api, query)}
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it starts
                raise AssertionError(error.read()) from error
        except urllib.error.URLError:
            pass  # it starts
        time.sleep(0.5 if waiting else 0)
    return waiting


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    """An application on a free port."""
    server = make_server(app)
    with socket.create_server(("127.0.0.1", 0)) as taken:

        async def serve() -> None:
            await server.serve(sockets=[taken])

        async with TaskScope() as scope:
            task = scope.spawn(serve())
            yield taken.getsockname()[1]
            server.should_exit = True
            await asyncio.wait([task])


async def no_history(model: str, window: str) -> dict[str, Any]:
    raise KeyError(model)


@pytest.mark.needs_program("prometheus", "prometheus")
async def test_every_query_of_board_and_rules_gives_data(tmp_path: Path) -> None:
    health = SampleHealth(at=time.time())
    app = make_app(health.publisher, no_history)
    app.routes.append(MetricsPage(health.look, in_thread=False).route())
    taken = socket.create_server(("127.0.0.1", 0))
    nobody = free_port()
    queries = dict([*board_queries(), *rule_queries()])
    alerts = [what.removeprefix("rule ") for what in queries if what.startswith("rule Canopy")]
    queries |= {f"alert {name}": f'ALERTS{{alertname="{name}"}}' for name in alerts}
    with taken:
        async with serving(app) as port, serving_metrics(taken, SampleNode().figures, lambda _: None):
            config = configuration(tmp_path, [port, nobody], [taken.getsockname()[1], nobody])
            with prometheus(tmp_path, config) as api:
                silent = await asyncio.to_thread(wait_for_data, api, queries)
                assert not silent, (tmp_path / "log").read_text()
                targets = await asyncio.to_thread(get, f"{api}/targets")
                rules = await asyncio.to_thread(get, f"{api}/rules")
    troubles = {one["scrapeUrl"]: one["lastError"] for one in targets["activeTargets"]}
    assert len(troubles) == 3, "the dead port is scraped for two jobs"
    assert all(trouble == "" for url, trouble in troubles.items() if str(nobody) not in url), troubles
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
