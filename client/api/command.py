"""`client api`: serves a swarm's model over HTTP until it is told to end. Owns the server's life and its line."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from prometheus_client.metrics_core import Metric

from client.api.app import build_app
from client.api.context import ApiContext, ApiSettings, RequestCounts
from client.api.swarm_backend import BackendLimits, SwarmBackend
from client.api.swarm_directory import SwarmDirectory
from client.api.swarm_link import SwarmSource
from client.api.swarm_models import ModelSources, SwarmModels
from client.base.options import ConnectOptions
from swarm.base.errors import ConfigError
from swarm.base.ids import without_ending
from swarm.base.tasks import TaskScope
from swarm.base.version import VERSION
from swarm.link.egress.streams import bracketed
from swarm.status.http import ConnectionLimits, MetricsPage, make_server
from swarm.status.metric_set import MetricFamily, MetricKind, MetricSet

ABOUT = MetricFamily("canopy_api_info", "The API.", ("version",), MetricKind.INFO)
FOUND = MetricFamily("canopy_api_model_found", "1 while the model is open and found in the swarm.", ("model",))
REQUESTS = MetricFamily(
    "canopy_api_requests_total", "Answers, by dialect and HTTP status.", ("dialect", "status"), MetricKind.COUNTER
)
RUNS = MetricFamily("canopy_api_runs_total", "Runs, by how they ended.", ("model", "end"), MetricKind.COUNTER)
PROMPT = MetricFamily("canopy_api_prompt_tokens_total", "Tokens of prompts.", ("model",), MetricKind.COUNTER)
REUSED = MetricFamily(
    "canopy_api_reused_prompt_tokens_total",
    "Of these, tokens that a kept session held.",
    ("model",),
    MetricKind.COUNTER,
)
TOKENS = MetricFamily(
    "canopy_api_generated_tokens_total", "Tokens that were generated.", ("model",), MetricKind.COUNTER
)
ACCEPTED = MetricFamily(
    "canopy_api_accepted_draft_tokens_total", "Of these, tokens that had been drafted.", ("model",), MetricKind.COUNTER
)
FIRST = MetricFamily(
    "canopy_api_first_token_seconds",
    "From a run's turn to its first token.",
    ("model",),
    kind=MetricKind.HISTOGRAM,
)
RUNNING = MetricFamily("canopy_api_running", "Runs now.")
WAITING = MetricFamily("canopy_api_waiting", "Requests that wait for their turn.")
REFUSED = MetricFamily(
    "canopy_api_queue_refused_total", "Requests for which the queue had no room.", kind=MetricKind.COUNTER
)
KEPT = MetricFamily(
    "canopy_api_kept_sessions", "Idle sessions that are kept for prompts with the same beginning.", ("model",)
)

FIGURES: Final = (
    *(ABOUT, FOUND, REQUESTS, RUNS, PROMPT, REUSED, TOKENS, ACCEPTED, FIRST, RUNNING, WAITING, REFUSED, KEPT),
)


@dataclass(frozen=True, slots=True)
class ApiFigures:
    """The API's metrics; `collect` reads them as they are now."""

    models: SwarmModels
    requests: RequestCounts

    def collect(self) -> Iterable[Metric]:
        sheet, queue = MetricSet(FIGURES), self.models.queue
        sheet.set_info(ABOUT, {"version": VERSION})
        for (dialect, status), number in sorted(self.requests.by_status.items()):
            sheet.set(REQUESTS, number, dialect, str(status))
        for model in self.models.known:
            _set_model(sheet, model.name, model.backend)
        sheet.set(RUNNING, queue.running)
        sheet.set(WAITING, queue.waiting)
        sheet.set(REFUSED, queue.refused)
        return sheet.collect()


def _set_model(sheet: MetricSet, name: str, backend: SwarmBackend) -> None:
    counts, sessions = backend.counts, backend.link.sessions
    sheet.set(FOUND, float(sessions is not None), name)
    for end, number in (("finished", counts.finished), ("left", counts.left), ("failed", counts.failed)):
        sheet.set(RUNS, number, name, end)
    sheet.set(PROMPT, counts.prompt_tokens, name)
    sheet.set(REUSED, counts.reused_tokens, name)
    sheet.set(TOKENS, counts.tokens, name)
    sheet.set(ACCEPTED, counts.accepted_tokens, name)
    sheet.set_histogram(FIRST, counts.first_token, name)
    sheet.set(KEPT, 0 if sessions is None else sessions.idle, name)


def metrics_routes(models: SwarmModels) -> Callable[[ApiContext], APIRouter]:
    def routes(context: ApiContext) -> APIRouter:
        router = APIRouter()
        page = MetricsPage(lambda: ApiFigures(models, context.requests), in_thread=False)
        router.routes.append(page.route())
        return router

    return routes


BACKLOG: Final = 256
MIN_KEY: Final = 8
"""Characters of an API key, at least: a shorter one is guessed."""
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the API listens, and to whom.

    Attributes:
        port: TCP port; 0 takes any free one.
        keys: API keys of which a caller must show one.
        open_to_all: whether others than this machine may call without one.
        hosts: further names that a `Host` header may have.
        origins: of web pages that may call.
        aliases: further names of the first model.
        any_model: whether every name of no model is taken for it.
        limits: of the queue, of kept sessions and of open models.
    """

    host: str = "127.0.0.1"
    port: int = 8_000
    keys: tuple[str, ...] = ()
    open_to_all: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    any_model: bool = False
    limits: BackendLimits = field(default_factory=BackendLimits)

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check(self) -> None:
        """Refuse what cannot be right or is not safe.

        Raises:
            ConfigError: names the option.
        """
        if any(len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key for key in self.keys):
            raise ConfigError(f"--api-key: give {MIN_KEY} or more printable ASCII characters without spaces")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port {self.port}: is no TCP port")
        if not self.keys and not self.open_to_all and not self.is_loopback:
            raise ConfigError(
                f"--host {self.host} without a key lets everybody who reaches it use your swarm: give --api-key (or "
                "CANOPY_API_KEY), or say --open-to-all"
            )
        if any(not name.strip() or not name.isprintable() for name in self.aliases):
            raise ConfigError("--alias: give a name that can be printed")
        queue, sessions = self.limits.queue, self.limits.sessions
        for name, value in (("--running", queue.running), ("--waiting", queue.waiting)):
            if value < 1:
                raise ConfigError(f"{name} {value}: give 1 or more")
        if sessions.kept < 0 or sessions.idle_s < 0:
            raise ConfigError("--keep and --keep-idle cannot be negative")
        if self.limits.models.open < 1 or self.limits.models.idle_s <= 0:
            raise ConfigError("--open-models and --model-idle: give more than 0")

    def settings(self) -> ApiSettings:
        """What the application keeps to; on loopback only this machine's names are answered to (DNS rebinding)."""
        names = (*LOOPBACK_NAMES, self.host, *self.hosts)
        hosts = tuple(name.lower() for name in names) if self.is_loopback else ()
        return ApiSettings(self.keys, hosts, origins=self.origins, aliases=self.aliases, any_model=self.any_model)


def listening(host: str, port: int) -> socket.socket:
    """Take the port, before anything slow.

    Raises:
        ConfigError: it is taken, or the address is not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host} port {port} ({reason}); choose another with --port") from error


async def serve_api(sources: ModelSources, options: ServerOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        say: shows a line to the user.

    Raises:
        ConfigError: an option is wrong, a port is taken, or the model cannot be used.
    """
    options.check()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with listening(options.host, options.port) as taken:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        try:
            async with served_api(sources, options, taken) as url:
                say(f"API at {url}/v1")
                await stop.wait()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


@asynccontextmanager
async def served_api(sources: ModelSources, options: ServerOptions, taken: socket.socket) -> AsyncIterator[str]:
    """Serve on a socket that listens, for as long as the block lasts; the value is the base URL.

    Raises:
        ConfigError: the first model cannot be used; the block is cancelled.
    """
    async with TaskScope() as scope:
        models = SwarmModels(sources, scope, options.limits)
        if sources.directory is not None:
            scope.spawn(sources.directory.keep(), "directory")
        scope.spawn(models.keep(), "models")
        settings = options.settings()
        app = build_app(models, settings, [metrics_routes(models)])
        server = make_server(app, ConnectionLimits(stalled_s=settings.stalled_s))

        async def serve() -> None:
            await server.serve(sockets=[taken])

        task = scope.spawn(serve(), "server")
        host, port = taken.getsockname()[:2]
        try:
            yield f"http://{bracketed(host)}:{port}"
        finally:
            settings.leaving.set()
            server.should_exit = True
            await asyncio.wait([task])


def model_sources(
    models: Sequence[str], options: ConnectOptions, directory: SwarmDirectory, *, all_listed: bool
) -> ModelSources:
    """Where the models of a server are.

    Args:
        models: that were named, the first one's name first; `fingerprint` and `revision` of the options are its own.
        options: of every connection; a draft MODEL=DRAFT drafts for that model alone.
        directory: of the swarm.
        all_listed: whether whatever it lists is served too.

    Raises:
        ConfigError: two models have one name.
    """
    names = [_name(model) for model in models]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two models are called {twice[0]}: requests could not tell them apart; rename one folder")
    given = options.get("draft") or ()
    drafts = [given] if isinstance(given, str | Path) else list(given)

    def source(name: str, model: str, further: Mapping[str, object]) -> SwarmSource:
        return SwarmSource(name, partial(directory.connect, model, _drafts_of(name, drafts), **further), directory.join)

    named = [
        source(name, model, {} if number == 0 else directory.forgetful())
        for number, (name, model) in enumerate(zip(names, models, strict=True))
    ]
    listed = (lambda name: source(name, name, directory.forgetful())) if all_listed else None
    return ModelSources(named, directory, listed)


def _name(model: str) -> str:
    path = Path(model)
    return without_ending(path.resolve().name if path.is_dir() else path.name) if path.exists() else model


def _drafts_of(model: str, drafts: Sequence[str | Path]) -> list[str]:
    """What drafts for a model: drafts of no model's own, and its own."""
    own = f"{model}="
    return [
        draft.removeprefix(own)
        for draft in map(str, drafts)
        if "=" not in draft or draft.startswith(own) or Path(draft).exists()
    ]
