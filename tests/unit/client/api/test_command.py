"""`client api` up to the swarm: its options, its line, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager

import httpx2
import pytest

from client import AsyncSwarm
from client.api.command import ServerOptions, serve_api, swarm_source
from client.api.queue import QueueLimits
from client.api.sessions import SessionLimits
from client.api.swarm_backend import BackendLimits
from client.api.swarm_link import SwarmSource
from swarm.demo import TARGET
from swarm.errors import ConfigError, RouteError

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


def test_a_folder_is_called_by_its_name() -> None:
    assert swarm_source(str(TARGET), {}).name == TARGET.name
    assert swarm_source("people/model-7b", {"peers": ["/ip4/…"]}).join == ("/ip4/…",)
    assert swarm_source(None, {}).name == ""
