"""Clients of the API: some that ask again and again, one that goes away in the middle. Every answer is checked."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx2

from client.library.aio import AsyncSwarm
from swarm.discovery.node_record import NodeRecord
from swarm.protocol import wire
from swarm.protocol.messages import NodeInfo
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import Dialer

MAX_TOLD = 20
"""Errors that are kept word by word."""
MAX_RETRIES = 100
LONG_TOKENS = 2_000
"""What a client asks for that goes away: the session's window is larger than any other's."""
POLL_S = 0.05
ANSWER_S = 10.0
"""Of a node that is asked what it holds."""
PATIENCE_S = 120.0
"""For how long a client that will go away waits for its turn, and then for what it held to be free."""


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request whose answer is known.

    Attributes:
        body: JSON values, without `stream`.
    """

    path: str
    body: dict[str, Any]
    expected: str


@dataclass(slots=True)
class LoadCounts:
    """What all clients met.

    Attributes:
        streamed: of these, those that were streamed.
        wrong: answers with another text, as `expected / got`.
        refused: answers 429 with Retry-After, which was obeyed.
    """

    right: int = 0
    streamed: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    def add_error(self, text: str) -> None:
        """Something that must not be."""
        self.errors.append(text[:300] if len(self.errors) < MAX_TOLD else "")


@dataclass(slots=True)
class SteadyClient:
    """One that asks again and again.

    Attributes:
        requests: what it asks for, in turn; every second one is streamed.
        tokens: it got so far, by answers that were finished.
    """

    http: httpx2.AsyncClient
    requests: Sequence[KnownRequest]
    counts: LoadCounts
    tokens: int = 0
    answers: int = 0

    async def ask_on(self) -> None:
        turn = 0
        while True:
            request = self.requests[turn % len(self.requests)]
            await self._ask(request, stream=(turn + turn // len(self.requests)) % 2 == 0)
            turn += 1

    async def _ask(self, request: KnownRequest, *, stream: bool) -> None:
        body = {**request.body, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
        for _ in range(MAX_RETRIES):
            try:
                async with self.http.stream("POST", request.path, json=body) as response:
                    if response.status_code == httpx2.codes.TOO_MANY_REQUESTS:
                        wait_s = response.headers.get("retry-after")
                    else:
                        await self._take(response, request, stream=stream)
                        return
            except httpx2.HTTPError as error:
                self.counts.add_error(repr(error))
                return
            if wait_s is None:
                self.counts.add_error("429 without Retry-After")
                return
            self.counts.refused += 1
            await asyncio.sleep(float(wait_s))
        self.counts.add_error(f"refused {MAX_RETRIES} times")

    async def _take(self, response: httpx2.Response, request: KnownRequest, *, stream: bool) -> None:
        if response.status_code != httpx2.codes.OK:
            self.counts.add_error(f"{response.status_code} {(await response.aread()).decode(errors='replace')}")
            return
        text, tokens = await read_answer(response, stream=stream)
        if tokens is None:
            self.counts.add_error(text)
        elif text != request.expected:
            self.counts.wrong.append(f"{request.expected!r} / {text!r}" if len(self.counts.wrong) < MAX_TOLD else "")
        else:
            self.counts.right += 1
            self.counts.streamed += stream
            self.tokens += tokens
            self.answers += 1


async def read_answer(response: httpx2.Response, *, stream: bool) -> tuple[str, int | None]:
    """An answer's text and its tokens; without tokens the text is what went wrong."""
    if not stream:
        body = json.loads(await response.aread())
        return _text(body["choices"][0]), body["usage"]["completion_tokens"]
    text, tokens, is_done = "", None, False
    async for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            is_done = True
            continue
        body = json.loads(event.data)
        if "error" in body:
            return f"in mid-stream: {event.data}", None
        text += "".join(map(_text, body["choices"]))
        if body.get("usage"):
            tokens = body["usage"]["completion_tokens"]
    return (text, tokens) if is_done else ("a stream that ended silently", None)


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or choice
    return message.get("content") or message.get("text") or ""


@dataclass(frozen=True, slots=True)
class NodeWatch:
    """Asks the nodes of a swarm what they hold.

    Attributes:
        records: of the nodes, in the order of their layers.
    """

    dialer: Dialer
    records: tuple[NodeRecord, ...]

    @classmethod
    async def of(cls, swarm: AsyncSwarm) -> NodeWatch:
        """Of all nodes that a client of the swarm finds now."""
        records = (await swarm.coverage()).records
        return cls(swarm.opener.dialer, tuple(sorted(records, key=lambda one: one.span.start)))

    async def infos(self) -> list[NodeInfo]:
        """What every node says of itself."""
        return list(await asyncio.gather(*map(self._ask, self.records)))

    async def _ask(self, record: NodeRecord) -> NodeInfo:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.dialer.channel(record.endpoint).unary_unary(
            wire.INFO
        )
        return wire.decode_info(await call(b"", timeout=ANSWER_S))


@dataclass(slots=True)
class LeavingClient:
    """One that asks for a long answer, waits until every node holds its session, and goes away.

    Its session is told from others by its size: a node says how much KV all sessions hold together, and how many there
    are.

    Attributes:
        http: with a key of its own.
        freed_ms: from each leaving until no node held its session.
    """

    http: httpx2.AsyncClient
    watch: NodeWatch
    counts: LoadCounts
    freed_ms: list[float] = field(default_factory=list)
    _answered: str = ""

    async def leave_on(self, pause_s: float) -> None:
        """Again and again, streamed and not streamed in turn."""
        turn = 0
        while True:
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self.leave(stream=turn % 2 == 0)
            except TimeoutError:
                self.counts.add_error(f"a client that leaves got no turn, or was not freed, in {PATIENCE_S:.0f} s")
            turn += 1

    async def leave(self, *, stream: bool) -> None:
        """Ask, wait until every node holds the session, go away, and wait until none does."""
        usual = [_used(one) / one.sessions if one.sessions else math.inf for one in await self.watch.infos()]
        if math.inf in usual:
            return  # nobody is served now, so that no size is usual
        self._answered = ""
        body = {"prompt": "It was a dark night", "max_tokens": LONG_TOKENS, "temperature": 1, "seed": 1}
        async with TaskScope() as scope:
            scope.spawn(self._send({**body, "stream": stream, "canopy": {"nodes": 0}}))
            while not all(await self._held(usual)):
                if self._answered:
                    self.counts.add_error(f"a client that leaves was answered: {self._answered}")
                    return
                await asyncio.sleep(POLL_S)
            began = time.perf_counter()
        while any(await self._held(usual)):  # noqa: ASYNC110 - a node's room has no event
            await asyncio.sleep(POLL_S)
        self.freed_ms.append((time.perf_counter() - began) * 1e3)

    async def _send(self, body: dict[str, Any]) -> None:
        while True:
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx2.codes.TOO_MANY_REQUESTS:
                    said = (await response.aread())[-200:].decode(errors="replace")
                    self._answered = f"{response.status_code} {said}"
                    return
            self.counts.refused += 1
            await asyncio.sleep(float(response.headers["retry-after"]))

    async def _held(self, usual: Sequence[float]) -> list[bool]:
        infos = await self.watch.infos()
        return [_used(one) - one.sessions * each > LONG_TOKENS / 2 for one, each in zip(infos, usual, strict=True)]


def _used(one: NodeInfo) -> int:
    return one.kv_tokens_total - one.kv_tokens_free
