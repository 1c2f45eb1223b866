"""`/metrics` over HTTP: a registry's figures as text or OpenMetrics. Owns no figures.

Whoever asks within a second of another gets the same answer, made once: a flood of scrapes costs no more than one. How
the figures stand is read in the event loop, where they are written; writing them out may be left to a thread.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH: Final = "/metrics"
KEPT_S: Final = 1.0
_OPEN: Final = "application/openmetrics-text"
_ACCEPTS: Final = {True: f"{_OPEN}; version=1.0.0", False: "text/plain; version=0.0.4"}


class Collector(Protocol):
    """Figures at one moment."""

    def collect(self) -> Iterable[Metric]:
        """Write them out."""


@dataclass(frozen=True, slots=True)
class _Scrape:
    made_s: float
    media_type: str
    text: bytes
    packed: bytes


class MetricsPage:
    """Answers scrapes. look: called in the event loop, gives the figures as they stand and may be read in a thread."""

    def __init__(
        self, look: Callable[[], Collector], *, in_thread: bool, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._look, self._in_thread, self._timer = look, in_thread, timer
        self._process = (ProcessCollector(registry=None), PlatformCollector(registry=None))
        self._answers: dict[bool, _Scrape] = {}
        self._one_by_one = asyncio.Lock()

    def route(self) -> Route:
        """Where it is served, for GET and HEAD."""
        return Route(PATH, self.answer, methods=["GET"], include_in_schema=False)

    async def answer(self, request: Request) -> Response:
        """Everything, in the form that the reader asks for."""
        wants_open = _OPEN in request.headers.get("accept", "")
        async with self._one_by_one:
            answer = self._answers.get(wants_open)
            if answer is None or not 0 <= self._timer() - answer.made_s < KEPT_S:
                answer = self._answers[wants_open] = await self._make(wants_open)
        headers = {"cache-control": "no-store", "vary": "accept, accept-encoding", "content-type": answer.media_type}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(answer.packed, headers={**headers, "content-encoding": "gzip"})
        return Response(answer.text, headers=headers)

    async def _make(self, wants_open: bool) -> _Scrape:
        made_s, seen = self._timer(), self._look()
        if self._in_thread:
            return await asyncio.to_thread(self._write, made_s, seen, wants_open)
        return self._write(made_s, seen, wants_open)

    def _write(self, made_s: float, seen: Collector, wants_open: bool) -> _Scrape:
        encode, media_type = choose_encoder(_ACCEPTS[wants_open])
        text = encode(_Together((seen, *self._process)))
        return _Scrape(made_s, media_type, text, gzip.compress(text, compresslevel=1))


class _Together:
    """Several collectors as one."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        """All that they have."""
        for collector in self._collectors:
            yield from collector.collect()
