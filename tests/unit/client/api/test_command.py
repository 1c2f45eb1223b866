"""`client api` up to the swarm: its options, its line, its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import cast

import httpx2
import pytest

from benchmarks.simulation.virtual_loop import VirtualLoop
from client import AsyncSwarm
from client.api.backend import ApiCaller, TextJob
from client.api.command import ServerOptions, listening, serve_api, served_api, swarm_source, which_model
from client.api.queue import QueueLimits
from client.api.sessions import SessionLimits
from client.api.swarm_backend import BackendLimits, SwarmBackend
from client.api.swarm_link import FIRST_TRY_S, SwarmSource
from swarm.base.errors import ConfigError, RouteError
from swarm.base.tasks import TaskScope
from swarm.demo import TARGET

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

    await serve_api(SwarmSource("demo", nowhere), ServerOptions(port=0), say)
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
            SwarmSource("demo", nowhere),
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


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "nobody serves a model in this swarm yet"),
        (("people/a",), "this swarm serves people/a; name the one that you trust: client api people/a$"),
        (("b", "a b"), "serves a b, b; .* client api 'a b'$"),
        ([f"m{number:02}" for number in range(11)], "m07 and 3 more; .* client api m00$"),
    ],
)
def test_without_a_name_it_says_what_to_type(names: Sequence[str], says: str) -> None:
    assert re.search(says, str(which_model(names)))


async def test_a_listed_model_is_not_loaded_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the only one: its name is a stranger's word. The server starts, and its answers say what to type."""

    class Listing:
        async def models(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name="strangers/model")]

    class Served:
        def __init__(self, registry: Listing) -> None:
            pass

        async def served(self, listed: list[SimpleNamespace]) -> list[SimpleNamespace]:
            return listed

    monkeypatch.setattr("client.api.command.DhtRegistry.open", lambda config: nullcontext(Listing()))
    monkeypatch.setattr("client.api.command.ServedModels", Served)
    monkeypatch.setattr("client.api.command.AsyncSwarm.connect", lambda *_, **__: pytest.fail("it was loaded"))
    source = swarm_source(None, {"peers": ["/x"]})
    with listening("127.0.0.1", 0) as taken:
        async with served_api(source, ServerOptions(), taken) as url, httpx2.AsyncClient() as http:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            told = await http.post(f"{url}/v1/chat/completions", json=body)
            assert (await http.get(f"{url}/v1/models")).json()["data"] == []
    assert (told.status_code, told.headers["retry-after"]) == (503, "30")
    assert "client api strangers/model" in told.json()["error"]["message"]


def test_a_folder_is_called_by_its_name() -> None:
    assert swarm_source(str(TARGET), {}).name == TARGET.name
    assert swarm_source("people/model-7b", {"peers": ["/ip4/…"]}).join == ("/ip4/…",)
    assert swarm_source(None, {}).name == ""
