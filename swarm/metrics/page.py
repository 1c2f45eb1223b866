"""`/metrics` over HTTP: a collector's metrics as Prometheus text or OpenMetrics. Owns no metrics.

Scrapes within a second of each other get the same answer, encoded once: a flood of scrapes costs no more than one.
Values are read in the event loop, where they are written; encoding them may be left to a thread.
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
CACHE_S: Final = 1.0
_OPENMETRICS: Final = "application/openmetrics-text"
_ACCEPTS: Final = {True: f"{_OPENMETRICS}; version=1.0.0", False: "text/plain; version=0.0.4"}


class Collector(Protocol):
    """Metrics at one moment."""

    def collect(self) -> Iterable[Metric]:
        """All families with their samples."""


@dataclass(frozen=True, slots=True)
class _Scrape:
    """An encoded answer; `text` and the same gzipped."""

    made_s: float
    media_type: str
    text: bytes
    gzipped: bytes


class MetricsPage:
    """Answers scrapes from metrics that it reads anew at most once per `CACHE_S`."""

    def __init__(
        self, read: Callable[[], Collector], *, in_thread: bool, timer: Callable[[], float] = time.monotonic
    ) -> None:
        """A page over the metrics that `read` gives.

        Args:
            read: called in the event loop; its collector may be used in a thread.
            in_thread: whether to encode in a thread, for pages that take long.
            timer: monotonic seconds.
        """
        self._read, self._in_thread, self._timer = read, in_thread, timer
        self._process = (ProcessCollector(registry=None), PlatformCollector(registry=None))
        self._answers: dict[bool, _Scrape] = {}  # by whether it is OpenMetrics
        self._lock = asyncio.Lock()

    def route(self) -> Route:
        """The page's route, for GET and HEAD."""
        return Route(PATH, self.answer, methods=["GET"], include_in_schema=False)

    async def answer(self, request: Request) -> Response:
        """All metrics, in the form that the request accepts."""
        is_openmetrics = _OPENMETRICS in request.headers.get("accept", "")
        async with self._lock:
            answer = self._answers.get(is_openmetrics)
            if answer is None or not 0 <= self._timer() - answer.made_s < CACHE_S:
                answer = self._answers[is_openmetrics] = await self._encode_now(is_openmetrics)
        headers = {"cache-control": "no-store", "vary": "accept, accept-encoding", "content-type": answer.media_type}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(answer.gzipped, headers={**headers, "content-encoding": "gzip"})
        return Response(answer.text, headers=headers)

    async def _encode_now(self, is_openmetrics: bool) -> _Scrape:
        made_s, metrics = self._timer(), self._read()
        if self._in_thread:
            return await asyncio.to_thread(self._encode, made_s, metrics, is_openmetrics)
        return self._encode(made_s, metrics, is_openmetrics)

    def _encode(self, made_s: float, metrics: Collector, is_openmetrics: bool) -> _Scrape:
        encode, media_type = choose_encoder(_ACCEPTS[is_openmetrics])
        text = encode(_CollectorChain((metrics, *self._process)))
        return _Scrape(made_s, media_type, text, gzip.compress(text, compresslevel=1))


class _CollectorChain:
    """Several collectors as one."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        """The families of all, one collector after the other."""
        for collector in self._collectors:
            yield from collector.collect()
