"""One API over several models of one swarm: each opened when it is first asked for, each with its own exact text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from client.api.command import ServerOptions, listening, model_sources, served_api
from client.api.queue import QueueLimits
from client.api.swarm_backend import BackendLimits, ModelLimits
from client.api.swarm_directory import SwarmDirectory
from client.api.swarm_link import SwarmSource
from client.api.swarm_models import ModelSources
from swarm.demo import DRAFT, TARGET
from tests.in_process_swarm import InProcessSwarm, swarm_in
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.three_nodes import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "It was a dark night"
ASKED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5}


@dataclass(frozen=True, slots=True)
class TwoModels:
    """Two models, each served by two nodes, in one directory; and their texts by the library alone."""

    network: MemoryNetwork
    texts: dict[str, str]

    @asynccontextmanager
    async def api(self, models: Sequence[Path] = (), **limits: Any) -> AsyncIterator[httpx2.AsyncClient]:  # noqa: ANN401
        """A client of an API over both; without `models` it serves what is listed."""
        directory = SwarmDirectory({"calibration": None}, lambda _: MemoryRegistry(self.network))
        sources = model_sources([str(one) for one in models], {}, directory, all_listed=False)
        if not models:
            sources = ModelSources((), directory, lambda name: self.source(name, directory))
        options = ServerOptions(limits=BackendLimits(models=ModelLimits(**limits)))
        with listening("127.0.0.1", 0) as taken:
            async with (
                served_api(sources, options, taken) as url,
                httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
            ):
                yield http

    def source(self, name: str, directory: SwarmDirectory) -> SwarmSource:
        """Where a listed model is: its name is no hub id here, but a folder's."""
        return model_sources([str(TARGET.parent / name)], {}, directory, all_listed=False).named[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two() -> AsyncIterator[TwoModels]:
    network = MemoryNetwork()
    async with (
        swarm_in(network, TARGET, ["0-6", "6-12"], {}) as target,
        swarm_in(network, DRAFT, ["0-1", "1-2"], {}) as draft,
    ):
        texts = {one.model.name: await alone(one) for one in (target, draft)}
        assert len(set(texts.values())) == 2
        yield TwoModels(network, texts)


async def alone(swarm: InProcessSwarm) -> str:
    async with swarm.client() as client:
        return (await client.generate(PROMPT, max_new_tokens=12, temperature=0.8, seed=5)).text


async def ask(http: httpx2.AsyncClient, model: str) -> str:
    answer = await http.post("/v1/completions", json={**ASKED, "model": model})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def open_models(http: httpx2.AsyncClient) -> list[str]:
    return [model["name"] for model in (await http.get("/api/ps")).json()["models"]]


async def test_what_is_listed_is_served_and_opened_when_it_is_asked_for(two: TwoModels) -> None:
    async with two.api() as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert {one["id"] for one in listed} == set(two.texts)
        assert all(one["health"]["is_complete"] for one in listed)
        assert [one["context_length"] for one in listed] == [0, 0]
        assert await open_models(http) == []
        texts = await asyncio.gather(*(ask(http, name) for name in two.texts for _ in range(2)))
        assert texts == [text for text in two.texts.values() for _ in range(2)]
        assert sorted(await open_models(http)) == [f"{name}:latest" for name in sorted(two.texts)]
        listed = (await http.get("/v1/models")).json()["data"]
        assert all(one["context_length"] > 0 for one in listed)


async def test_each_dialect_takes_each_model(two: TwoModels) -> None:
    async with two.api([TARGET, DRAFT]) as http:
        named = (await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()["data"]
        tags = (await http.get("/api/tags")).json()["models"]
        assert [one["id"] for one in named] == [TARGET.name, DRAFT.name]
        assert [one["name"] for one in tags] == [f"{TARGET.name}:latest", f"{DRAFT.name}:latest"]
        hi = [{"role": "user", "content": "Hi"}]
        for name in (TARGET.name, DRAFT.name):
            body = {"model": name, "messages": hi, "max_tokens": 3}
            assert (await http.post("/v1/messages", json=body)).json()["model"] == name
            assert (await http.post("/v1/chat/completions", json=body)).json()["model"] == name
            answer = await http.post("/v1/responses", json={"model": name, "input": "Hi", "max_output_tokens": 16})
            assert answer.json()["model"] == name
            raw = {"model": f"{name}:latest", "prompt": PROMPT, "raw": True, "stream": False}
            options = {"num_predict": 12, "temperature": 0.8, "seed": 5, "top_k": 0, "top_p": 1.0}
            told = (await http.post("/api/generate", json={**raw, "options": options})).json()
            assert told["response"] == two.texts[name]
            counted = await http.post("/v1/messages/count_tokens", json={"model": name, "messages": hi})
            assert counted.json()["input_tokens"] > 0
        assert await ask(http, "") == two.texts[TARGET.name], "no name means the first"
        unknown = await http.post("/v1/completions", json={**ASKED, "model": "another"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert f"`{TARGET.name}`, `{DRAFT.name}`" in unknown.json()["error"]["message"]


async def test_one_that_was_used_least_recently_makes_room(two: TwoModels) -> None:
    async with two.api(open=1) as http:
        for name in (TARGET.name, DRAFT.name, TARGET.name):
            assert await ask(http, name) == two.texts[name]
            assert await open_models(http) == [f"{name}:latest"]
        hi = {"prompt": PROMPT, "max_tokens": 400, "model": TARGET.name, "stream": True, "canopy": {"nodes": 0}}
        async with http.stream("POST", "/v1/completions", json=hi) as answer:
            await anext(answer.aiter_lines())
            refused = await http.post("/v1/completions", json={**ASKED, "model": DRAFT.name})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "1 models are in use" in refused.json()["error"]["message"]


async def test_one_that_nobody_asks_for_is_given_up(two: TwoModels) -> None:
    async with two.api([TARGET, DRAFT], idle_s=0.2) as http:
        assert await ask(http, DRAFT.name) == two.texts[DRAFT.name]

        async def given_up() -> bool:
            return await open_models(http) == [f"{TARGET.name}:latest"]  # the first one stays

        await until(given_up)
        card = (await http.get(f"/v1/models/{DRAFT.name}")).json()
        assert card["context_length"] > 0, "what was read of it stays known"
        assert card["health"]["is_complete"]
        assert await ask(http, DRAFT.name) == two.texts[DRAFT.name]


async def test_callers_have_their_turns_whichever_model_they_ask_for(two: TwoModels) -> None:
    """Eight requests of one key for one model wait; another key's, for the other model, is second in the round."""
    directory = SwarmDirectory({"calibration": None}, lambda _: MemoryRegistry(two.network))
    sources = model_sources([str(TARGET), str(DRAFT)], {}, directory, all_listed=False)
    keys = ("sk-the-first", "sk-the-other")
    options = ServerOptions(limits=BackendLimits(QueueLimits(running=1)), keys=keys)
    ended: list[str] = []

    async def one(http: httpx2.AsyncClient, key: str, model: str) -> None:
        body = {**ASKED, "model": model}
        answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.json()["choices"][0]["text"] == two.texts[model]
        ended.append(key)

    with listening("127.0.0.1", 0) as taken:
        async with (
            served_api(sources, options, taken) as url,
            httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
        ):
            for model in (TARGET.name, DRAFT.name):
                await one(http, keys[0], model)
            ended.clear()
            most_waiting = 0.0
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(one(http, keys[0], TARGET.name))
                await asyncio.sleep(0.05)
                last = group.create_task(one(http, keys[1], DRAFT.name))
                while not last.done():
                    shown = await http.get("/metrics", headers={"authorization": f"Bearer {keys[0]}"})
                    waiting = re.search(r"^canopy_api_waiting (\S+)", shown.text, re.MULTILINE)
                    most_waiting = max(most_waiting, float(waiting[1]) if waiting else 0.0)
    assert most_waiting >= 4, "both models' requests wait in one queue"
    assert ended.index(keys[1]) <= 3
    assert len(ended) == 9


async def test_metrics_are_of_each_model(two: TwoModels) -> None:
    async with two.api([TARGET, DRAFT]) as http:
        await ask(http, DRAFT.name)
        page = (await http.get("/metrics")).text
        assert f'canopy_api_generated_tokens_total{{model="{DRAFT.name}"}} 12.0' in page
        assert f'canopy_api_generated_tokens_total{{model="{TARGET.name}"}} 0.0' in page
