"""`/metrics` of the API: requests, runs, tokens and the queue, for Prometheus. Owns no counter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter
from prometheus_client.metrics_core import Metric

from client.api.context import ApiContext, RequestCounts
from client.api.swarm_backend import SwarmBackend
from swarm.metrics.metric_set import MetricFamily, MetricKind, MetricSet
from swarm.metrics.page import MetricsPage
from swarm.runtime.version import VERSION

ABOUT = MetricFamily("canopy_api_info", "The API and its model.", ("version", "model"), MetricKind.INFO)
FOUND = MetricFamily("canopy_api_model_found", "1 while the model is found in the swarm.")
REQUESTS = MetricFamily(
    "canopy_api_requests_total", "Answers, by dialect and HTTP status.", ("dialect", "status"), MetricKind.COUNTER
)
RUNS = MetricFamily("canopy_api_runs_total", "Runs, by how they ended.", ("end",), MetricKind.COUNTER)
PROMPT = MetricFamily("canopy_api_prompt_tokens_total", "Tokens of prompts.", kind=MetricKind.COUNTER)
REUSED = MetricFamily(
    "canopy_api_reused_prompt_tokens_total", "Of these, tokens that a kept session held.", kind=MetricKind.COUNTER
)
TOKENS = MetricFamily("canopy_api_generated_tokens_total", "Tokens that were generated.", kind=MetricKind.COUNTER)
ACCEPTED = MetricFamily(
    "canopy_api_accepted_draft_tokens_total", "Of these, tokens that had been drafted.", kind=MetricKind.COUNTER
)
FIRST = MetricFamily(
    "canopy_api_first_token_seconds",
    "From a run's turn to its first token.",
    kind=MetricKind.HISTOGRAM,
)
RUNNING = MetricFamily("canopy_api_running", "Runs now.")
WAITING = MetricFamily("canopy_api_waiting", "Requests that wait for their turn.")
REFUSED = MetricFamily(
    "canopy_api_queue_refused_total", "Requests for which the queue had no room.", kind=MetricKind.COUNTER
)
KEPT = MetricFamily("canopy_api_kept_sessions", "Idle sessions that are kept for prompts with the same beginning.")

FIGURES: Final = (
    *(ABOUT, FOUND, REQUESTS, RUNS, PROMPT, REUSED, TOKENS, ACCEPTED, FIRST, RUNNING, WAITING, REFUSED, KEPT),
)


@dataclass(frozen=True, slots=True)
class ApiFigures:
    """The API's metrics; `collect` reads them as they are now."""

    backend: SwarmBackend
    requests: RequestCounts

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        sheet, counts, queue = MetricSet(FIGURES), self.backend.counts, self.backend.queue
        sessions = self.backend.link.sessions
        sheet.set_info(ABOUT, {"version": VERSION, "model": self.backend.link.name})
        sheet.set(FOUND, float(sessions is not None))
        for (dialect, status), number in sorted(self.requests.by_status.items()):
            sheet.set(REQUESTS, number, dialect, str(status))
        for end, number in (("finished", counts.finished), ("left", counts.left), ("failed", counts.failed)):
            sheet.set(RUNS, number, end)
        sheet.set(PROMPT, counts.prompt_tokens)
        sheet.set(REUSED, counts.reused_tokens)
        sheet.set(TOKENS, counts.tokens)
        sheet.set(ACCEPTED, counts.accepted_tokens)
        sheet.set_histogram(FIRST, counts.first_token)
        sheet.set(RUNNING, queue.running)
        sheet.set(WAITING, queue.waiting)
        sheet.set(REFUSED, queue.refused)
        sheet.set(KEPT, 0 if sessions is None else sessions.idle)
        return sheet.collect()


def metrics_routes(backend: SwarmBackend) -> Callable[[ApiContext], APIRouter]:
    """The routes of a backend's metrics, for `build_app`."""

    def routes(context: ApiContext) -> APIRouter:
        router = APIRouter()
        page = MetricsPage(lambda: ApiFigures(backend, context.requests), in_thread=False)
        router.routes.append(page.route())
        return router

    return routes
