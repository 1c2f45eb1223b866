"""A local API and its callers: bodies, streams, keys, heads and grammars, while an honest caller asks it."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import suppress
from typing import Any, Final

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.attacks.connections import ENDED_SOCKET
from benchmarks.redteam.attacks.grammars import choices, conjunction, repeats
from benchmarks.redteam.local_api import ASKED, HONEST, OTHER, LocalApi, local_api

CHAT: Final = {"model": "demo-target", "messages": [{"role": "user", "content": "It was"}], "max_tokens": 4}
LASTS_S: Final = 12.0
"""An honest caller has several answers meanwhile."""
BOMB: Final = gzip.compress(b'{"model": "' + b"a" * (64 << 20) + b'"}', 9)
"""64 KiB that unpack to 64 MiB."""
FULL: Final = 200


@attack("api-slow-bodies", Kind.API, lasts_s=LASTS_S)
async def api_slow_bodies(fight: Fight) -> None:
    """100 requests to an API whose bodies come at one byte per second."""
    async with local_api(fight) as api:
        opened = []
        for number in range(100):
            with suppress(*ENDED_SOCKET):
                opened.append(await fight.kit.socket(api.address, fight.kit.strangers[number % 4]))
                await opened[-1].send(api.head("/v1/completions", length=4_096))
        async for _ in fight.pace(1.0):
            for one in opened:
                with suppress(*ENDED_SOCKET):
                    await one.send(b" ")


@attack("api-gzip-bombs", Kind.API, lasts_s=LASTS_S)
async def api_gzip_bombs(fight: Fight) -> None:
    """Four bodies a second to an API that unpack to a thousand times their size."""
    async with local_api(fight) as api:
        async for _ in fight.pace(4.0):
            if (await api.ask("/v1/completions", BOMB, "Content-Encoding: gzip")).status == FULL:
                fight.breach("the API takes a body of 64 MiB")


def huge_bodies() -> dict[str, dict[str, Any]]:
    """Requests with numbers and lists that no honest one has, by path and what is huge."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    nested: Any = {}
    for _ in range(300):
        nested = {"type": "object", "properties": {"a": nested}}
    deep = {"type": "function", "function": {"name": "deep", "parameters": nested}}
    return {
        "/v1/completions n": ASKED | {"n": 10**9},
        "/v1/completions best_of": ASKED | {"best_of": 2**63},
        "/v1/completions max_tokens": ASKED | {"max_tokens": 10**18},
        "/v1/completions stop": ASKED | {"stop": [f"stop {number}" for number in range(100_000)]},
        "/v1/completions a stop": ASKED | {"stop": "a" * 1_000_000},
        "/v1/completions prompts": ASKED | {"prompt": ["a"] * 200_000},
        "/v1/completions tokens": ASKED | {"prompt": [2**40] * 100_000},
        "/v1/completions logit_bias": ASKED | {"logit_bias": {str(number): 1 for number in range(200_000)}},
        "/v1/completions logprobs": ASKED | {"logprobs": 10**6},
        "/v1/chat/completions tools": CHAT | {"tools": [tool] * 20_000},
        "/v1/chat/completions a deep tool": CHAT | {"tools": [deep]},
        "/v1/chat/completions messages": CHAT | {"messages": CHAT["messages"] * 50_000},  # type: ignore[operator]
        "/v1/responses input": {"model": "demo-target", "input": "a" * 4_000_000, "max_output_tokens": 4},
        "/v1/messages stop_sequences": CHAT | {"stop_sequences": ["a b"] * 100_000},
    }


@attack("api-huge-lists", Kind.API, lasts_s=LASTS_S)
async def api_huge_lists(fight: Fight) -> None:
    """Two requests a second to an API with a billion choices, and 100,000 stop strings, tools, messages or prompts."""
    bodies = list(huge_bodies().items())
    async with local_api(fight) as api:

        async def ask(name: str, body: dict[str, Any]) -> None:
            answer = await api.ask(name.partition(" ")[0], body, limit_s=10.0)
            fight.note(f"{name.partition(' ')[2]}: {answer.status} {answer.reason[:60]}".rstrip())

        async with asyncio.TaskGroup() as asking:
            async for number in fight.pace(2.0):
                asking.create_task(ask(*bodies[number % len(bodies)]))


@attack("api-deep-bodies", Kind.API, lasts_s=LASTS_S)
async def api_deep_bodies(fight: Fight) -> None:
    """Ten bodies a second to an API that nest too deep, end midway, have odd numbers, or are no text."""
    odd = [
        b"[" * 200_000,
        b'{"messages":' * 20_000 + b"1" + b"}" * 20_000,
        json.dumps(CHAT).encode()[:-9],
        b'{"model": "demo-target", "prompt": "\\ud800", "max_tokens": 2}',
        b'{"model": "demo-target", "prompt": "a", "max_tokens": 1e400}',
        b'{"model": "demo-target", "prompt": "a", "max_tokens": 2, "temperature": NaN}',
        b'{"model": "demo-target", "prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
        b"\xff\xfe\x00",
        b"null",
    ]
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
    async with local_api(fight) as api:
        async for number in fight.pace(10.0):
            await api.ask(paths[number // len(odd) % len(paths)], odd[number % len(odd)])


@attack("api-unread-streams", Kind.API, lasts_s=LASTS_S)
async def api_unread_streams(fight: Fight) -> None:
    """40 streams of an API, each of 500 tokens, that are not read."""
    body = json.dumps(ASKED | {"prompt": "It was", "stream": True, "max_tokens": 500}).encode()
    async with local_api(fight) as api:
        async for number in fight.pace(20.0, 40):
            with suppress(*ENDED_SOCKET):
                one = await fight.kit.socket(api.address, fight.kit.strangers[number % 4])
                await one.send(api.head("/v1/completions", length=len(body)) + body)
                fight.tally.acts += 1
        await fight.stay()


@attack("api-guessed-prompts", Kind.API, lasts_s=LASTS_S)
async def api_guessed_prompts(fight: Fight) -> None:
    """A caller with another key guesses the honest caller's prompt, and looks whether it was computed before."""
    async with local_api(fight, beside=False) as api:
        own = (await api.asked_honestly()).cached_tokens
        fight.note(f"its own key finds {own} tokens kept")
        if not own:
            fight.breach("no session is kept for the honest caller, so a guess would tell nothing")
        fight.tally.acts += 1
        if found := (await api.ask("/v1/completions", ASKED)).cached_tokens:
            fight.breach(f"another key learns that {found} tokens of a prompt were asked before")


def keyless(api: LocalApi) -> dict[str, bytes]:
    """Requests that must not be answered, by what is tried."""
    key = f"Authorization: Bearer {OTHER}"
    tries = {
        path: api.head(path, key="")
        for path in (
            "/v1/models",
            "//v1/models",
            "/V1/models",
            "/%76%31/models",
            "/health/../v1/models",
            "/v1;/models",
            f"http://{api.address}/v1/models",
            "/v1/models?key=x",
            "/api/tags",
            "/metrics",
        )
    }
    for shown in ("honest", HONEST[:-1], HONEST + " x", HONEST.upper(), "", "\xff", f"{HONEST},{OTHER}x"):
        tries[f"the key {shown!r}"] = api.head("/v1/models", f"X-Api-Key: {shown}", key="")
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "[::1].evil.example",
        "localhost:x.example",
    ):
        tries[f"Host {host}"] = api.head("/v1/models", key=OTHER, host=host)
    for origin in ("https://evil.example", "null", "file://", f"http://{api.address}.evil.example"):
        tries[f"Origin {origin}"] = api.head("/v1/models", f"Origin: {origin}", key=OTHER)
    tries["a Host of two"] = api.head("/v1/models", "Host: evil.example", key=OTHER)
    tries["X-Forwarded-Host"] = api.head("/v1/models", "X-Forwarded-Host: localhost", key=OTHER, host="evil.example")
    tries["HTTP/1.0 and no Host"] = f"GET /v1/models HTTP/1.0\r\n{key}\r\n\r\n".encode()
    return tries


@attack("api-without-key", Kind.API, lasts_s=LASTS_S)
async def api_without_key(fight: Fight) -> None:
    """Twenty requests a second to an API without its key, or from other hosts' pages, by all paths and heads."""
    async with local_api(fight) as api:
        tries = list(keyless(api).items())
        async for number in fight.pace(20.0):
            name, data = tries[number % len(tries)]
            fight.tally.acts += 1
            answer = await api.send(data)
            if answer.status == FULL and "demo-target" in answer.body:
                fight.breach(f"the API answers to {name}: {answer.body[:80]}")


@attack("api-grammars", Kind.API, lasts_s=LASTS_S)
async def api_grammars(fight: Fight) -> None:
    """Two requests a second to an API with regular expressions, schemas and grammars that are dear to compile."""
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": repeats(0).text}}, "required": ["a"]}

    def body(number: int) -> dict[str, Any]:
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": pattern}}
        own = (
            {"guided_regex": repeats(number).text},
            {"guided_regex": choices(number).text},
            {"guided_grammar": conjunction(number).text},
            {"response_format": schema},
        )
        return CHAT | own[number % len(own)]

    async with local_api(fight) as api:

        async def ask(number: int) -> None:
            answer = await api.ask("/v1/chat/completions", body(number), limit_s=30.0)
            fight.note(f"{list(body(number))[-1]}: {answer.status} {answer.reason[:60]}".rstrip())

        async with asyncio.TaskGroup() as asking:
            async for number in fight.pace(2.0):
                asking.create_task(ask(number))
