"""`/metrics` over real sockets: of the health service, of a node that serves, and what a flood of scrapes costs."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from starlette.applications import Starlette

from node.life.metrics import listening, serving_metrics
from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.demo import TARGET
from swarm.directory.dht.registry import DhtRegistry
from swarm.health.options import Health
from swarm.health.service import HealthService
from swarm.status.http import HEADERS, Guarded, MetricsPage, make_server
from tests.devices import DEVICE
from tests.in_process_swarm import in_process_swarm
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.swarm.health.test_service import Answer, ask
from tests.sample_metrics import SampleHealth, SampleNode
from tests.telemetry_messages import identity
from tools.reference import openapi

OPEN = "accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"


async def scrape(port: int, *headers: str) -> dict[str, float]:
    """The unlabelled samples of a page, and the sums of the others."""
    answer = await ask(port, "/metrics", "GET", *headers)
    assert answer.status == 200, answer
    read = read_openmetrics if media_type(answer).startswith("application") else read_text
    found: dict[str, float] = {}
    for family in read(answer.body.decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@asynccontextmanager
async def served(page: MetricsPage) -> AsyncIterator[int]:
    """One page on a free port."""
    server = make_server(Guarded(Starlette(routes=[page.route()])))
    with socket.create_server(("127.0.0.1", 0)) as taken:

        async def serve() -> None:
            await server.serve(sockets=[taken])

        async with TaskScope() as scope:
            task = scope.spawn(serve())
            yield taken.getsockname()[1]
            server.should_exit = True
            await asyncio.wait([task])


def media_type(answer: Answer) -> str:
    return answer.headers["content-type"].partition(";")[0]


@pytest.mark.parametrize("in_thread", [True, False])
async def test_a_scrape_gets_the_form_that_it_asks_for(in_thread: bool) -> None:
    page = MetricsPage(SampleHealth().look, in_thread=in_thread)
    async with served(page) as port:
        plain = await ask(port, "/metrics")
        assert (plain.status, media_type(plain)) == (200, "text/plain")
        names = {family.name for family in read_text(plain.body.decode())}
        assert {"canopy_model_verdict", "process_resident_memory_bytes", "python_info"} <= names
        opened = await ask(port, "/metrics", "GET", OPEN)
        assert media_type(opened) == "application/openmetrics-text"
        families = read_openmetrics(opened.body.decode())  # type: ignore[no-untyped-call]
        assert {"canopy_model_verdict", "process_cpu_seconds"} <= {family.name for family in families}
        packed = await ask(port, "/metrics", "GET", "accept-encoding: gzip")
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.body).startswith(b"# HELP canopy_health_info")
        odd = await ask(port, "/metrics", "GET", "accept: application/openmetrics-text; version=banana; escaping=x")
        assert odd.status == 200
        head = await ask(port, "/metrics", "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert (await ask(port, "/metrics", "POST")).status == 405
        for name, value in HEADERS.items():
            assert plain.headers[name] == value.lower()


async def test_a_flood_of_scrapes_costs_no_more_than_one() -> None:
    health, now = SampleHealth(), [100.0]
    page = MetricsPage(health.look, in_thread=True, timer=lambda: now[0])
    before = health.looks
    async with served(page) as port:
        answers = await asyncio.gather(*(ask(port, "/metrics") for _ in range(20)))
        assert health.looks == before + 1
        assert len({answer.body for answer in answers}) == 1
        now[0] += 1.5
        await ask(port, "/metrics")
        assert health.looks == before + 2


async def test_the_health_service_serves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DhtRegistry, "open", lambda _: MemoryRegistry(MemoryNetwork()))
    join = f"/ip4/127.0.0.1/tcp/1/p2p/{identity(0).peer_id}"
    command = Health((join,), port=0, data=tmp_path / "health.sqlite3", probe_every=0)
    async with HealthService(command) as service:
        port = service.http_address[1]
        found = await scrape(port)
        assert (found["canopy_health_stream_readers"], found["canopy_health_probe_interval_seconds"]) == (0, 0)
        assert (found["canopy_health_info"], found["canopy_health_source_state"]) == (1, 2)
        assert "/metrics" not in (described := json.loads((await ask(port, "/api/v1/openapi.json")).body))["paths"]
        assert described == openapi(), "the documentation describes another API"


async def test_a_node_serves_them_while_it_serves() -> None:
    said: list[str] = []
    config = ServeConfig(
        "0-4", str(TARGET), host="127.0.0.1", threads=1, drain=0.0, metrics_port=0, device=DEVICE, dtype="float32"
    )
    async with in_process_swarm(TARGET, ["4-12"]) as here, here.client() as client:
        async with Node(config, said.append, MemoryRegistry(here.network)) as node:
            (line,) = [line for line in said if "/metrics" in line]
            port = int(line.rpartition(":")[2].removesuffix("/metrics"))
            found = await scrape(port)
            assert (found["canopy_node_layers"], found["canopy_node_sweeps_total"]) == (4, 0)
            await client.generate("It was", max_new_tokens=4)
            found = await scrape(port, OPEN)  # another form, so made anew
            sweeps = found["canopy_node_sweeps_total"]
            assert sweeps == node.sessions.counters.sweeps > 0
            assert found["canopy_node_queue_seconds_count"] == found["canopy_node_compute_seconds_count"] == sweeps
            assert found["canopy_node_forward_seconds_count"] >= sweeps - 1, "a sweep may only commit"
            assert 0 < found["canopy_node_forward_seconds_sum"] <= found["canopy_node_busy_seconds_total"]
            assert found["canopy_node_received_bytes_total"] > 0
        with pytest.raises(ConnectionRefusedError):
            await ask(port, "/metrics")


async def test_a_taken_port_is_told_before_anything_slow() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServeConfig("0-4", "/nowhere", host="127.0.0.1", metrics_port=port)
        with pytest.raises(ConfigError, match=rf"^--metrics-port {port} of 127\.0\.0\.1 cannot be opened .* another$"):
            await Node(config, lambda _: None, MemoryRegistry(MemoryNetwork())).__aenter__()
    with (
        pytest.raises(ConfigError, match=r"--metrics-port 9 of 192\.0\.2\.1 cannot be opened"),
        listening("192.0.2.1", 9),
    ):
        pass
    with pytest.raises(ConfigError, match="--metrics-port 70000"):
        replace(config, metrics_port=70_000).check()


async def test_without_a_port_nothing_listens() -> None:
    said: list[str] = []
    with listening("127.0.0.1", None) as taken:
        async with serving_metrics(taken, SampleNode().figures, said.append):
            assert said == []
    assert PeerId("QmFirst") == SampleNode().figures.peer
