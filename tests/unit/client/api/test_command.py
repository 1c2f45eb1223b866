"""`client api` up to the swarm: its options, its line, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

import httpx2
import pytest

from benchmarks.simulation.virtual_loop import VirtualLoop
from client import AsyncSwarm
from client.api.backend import ApiCaller, TextJob
from client.api.command import ServerOptions, listening, model_sources, serve_api, served_api
from client.api.queue import QueueLimits
from client.api.sessions import SessionLimits
from client.api.swarm_backend import BackendLimits, SwarmBackend
from client.api.swarm_directory import SwarmDirectory
from client.api.swarm_link import FIRST_TRY_S, SwarmSource
from client.api.swarm_models import ModelSources
from swarm.base.errors import ConfigError, RouteError
from swarm.base.ids import ModelIdentity
from swarm.base.tasks import TaskScope
from swarm.demo import TARGET
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.sample_records import sample_record

KEY = "sk-long-enough"


def nowhere() -> AbstractAsyncContextManager[AsyncSwarm]:
    raise RouteError("nobody serves it", [(0, 4)])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (ServerOptions(host="0.0.0.0"), r"--host 0\.0\.0\.0 without a key .* give --api-key .* or say --open-to-all"),
        (ServerOptions(host="192.0.2.1"), "without a key"),
        (ServerOptions(keys=("short",)), "--api-key"),
        (ServerOptions(keys=(KEY, "has a blank")), "--api-key"),
        (ServerOptions(port=70_000), "--port 70000"),
        (ServerOptions(limits=BackendLimits(QueueLimits(running=0))), "--running 0"),
        (ServerOptions(limits=BackendLimits(sessions=SessionLimits(kept=-1))), "--keep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_safe_is_refused(options: ServerOptions, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        options.check()


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (ServerOptions(), {"localhost", "127.0.0.1", "::1"}),
        (ServerOptions(hosts=("My.Box",)), {"localhost", "127.0.0.1", "::1", "my.box"}),
        (ServerOptions(host="0.0.0.0", keys=(KEY,)), set()),
        (ServerOptions(host="0.0.0.0", open_to_all=True), set()),
    ],
    ids=["loopback", "a name of its own", "with a key", "without"],
)
def test_names_are_checked_where_only_this_machine_calls(options: ServerOptions, hosts: set[str]) -> None:
    options.check()
    assert set(options.settings().hosts) == hosts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_says_where_it_is_and_ends_at_a_signal(number: signal.Signals) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        os.kill(os.getpid(), number)

    await serve_api(ModelSources([SwarmSource("demo", nowhere)]), ServerOptions(port=0), say)
    (line,) = said
    assert line.startswith("API at http://127.0.0.1:")
    assert line.endswith("/v1")


async def test_it_answers_while_nobody_serves_the_model() -> None:
    async def ask(url: str) -> int:
        async with httpx2.AsyncClient() as http:
            answer = await http.get(url.removesuffix("/v1") + "/health")
            os.kill(os.getpid(), signal.SIGINT)
            return answer.status_code

    asked: list[asyncio.Task[int]] = []
    async with asyncio.TaskGroup() as group:
        await serve_api(
            ModelSources([SwarmSource("demo", nowhere)]),
            ServerOptions(port=0),
            lambda line: asked.append(group.create_task(ask(line.removeprefix("API at ")))),
        )
    assert asked[0].result() == 503


def test_a_request_waits_for_the_first_try_and_no_longer() -> None:
    """On a virtual clock: at once where the try has failed, and after ten seconds where it goes on."""
    loop = VirtualLoop()

    async def refused_after_s(connect: Callable[[], AbstractAsyncContextManager[AsyncSwarm]]) -> tuple[str, int]:
        async with TaskScope() as scope:
            backend = SwarmBackend(SwarmSource("demo", connect), scope)
            scope.spawn(backend.link.keep())
            began = loop.time()
            with pytest.raises(RouteError) as caught:
                await anext(backend.run(TextJob("Hi", {}), ApiCaller("me")))
            return str(caught.value), round(loop.time() - began)

    @asynccontextmanager
    async def unanswered() -> AsyncIterator[AsyncSwarm]:
        await asyncio.sleep(3_600)
        yield cast("AsyncSwarm", None)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(refused_after_s(nowhere)) == ("nobody serves it", 0)
        assert runner.run(refused_after_s(unanswered)) == ("still looking for demo in the swarm", FIRST_TRY_S)


async def listing(*names: str) -> MemoryRegistry:
    """A directory in which one node serves each of these models."""
    network = MemoryNetwork()
    for number, name in enumerate(names):
        node = MemoryRegistry(network)
        model = ModelIdentity.of(name, f"{number:064x}", "c3" * 32, "d4" * 32, 12)
        await node.announce(sample_record(node.peer_id, model=model))
    return MemoryRegistry(network)


async def test_a_listed_model_is_not_loaded_unless_a_request_names_it() -> None:
    """Even the only one: its name is a stranger's word. The server starts, and its answers say what there is."""
    opened: list[str] = []

    def source(name: str) -> SwarmSource:
        def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
            opened.append(name)
            return nowhere()

        return SwarmSource(name, connect)

    registry = await listing("strangers/model")
    directory = SwarmDirectory({}, lambda _: registry)
    with listening("127.0.0.1", 0) as taken:
        sources = ModelSources((), directory, source)
        async with served_api(sources, ServerOptions(), taken) as url, httpx2.AsyncClient() as http:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            told = await http.post(f"{url}/v1/chat/completions", json=body)
            (card,) = (await http.get(f"{url}/v1/models")).json()["data"]
            shown = await http.get(f"{url}/v1/models/strangers/model")
            assert (await http.get(f"{url}/v1/models/other")).status_code == 404
            assert opened == []
            for name, status in (("other", 404), (str(TARGET), 404), ("strangers/model", 503)):
                asked = await http.post(f"{url}/v1/chat/completions", json={**body, "model": name})
                assert asked.status_code == status, name
    assert (told.status_code, told.json()["error"]["param"]) == (400, "model")
    assert "strangers/model" in told.json()["error"]["message"]
    assert (card["id"], card["context_length"], shown.json()) == ("strangers/model", 0, card)
    assert opened == ["strangers/model"]


def test_a_folder_is_called_by_its_name() -> None:
    directory = SwarmDirectory({"peers": ["/ip4/…"]})
    sources = model_sources([str(TARGET), "people/model-7b"], {}, directory, all_listed=False)
    assert [source.name for source in sources.named] == [TARGET.name, "people/model-7b"]
    assert sources.named[0].join == ("/ip4/…",)
    assert sources.listed is None
    with pytest.raises(ConfigError, match="two models are called"):
        model_sources(["a/b", "a/b"], {}, directory, all_listed=True)
