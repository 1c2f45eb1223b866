"""`swarm health`: puts the parts of the health service together. Owns their lifecycle, no rules.

broker ──▶ feed ──▶ guard ──▶ overview ◀── directory ◀── DHT
                                 │  ▲
        health loop: judge twice a second  prober ──▶ client.terminal.probe, a process of its own
                  │                 │
              publisher ──▶ HTTP   history (SQLite)
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

from rich.console import Console
from rich.text import Text

from swarm.base.errors import ConfigError
from swarm.base.tasks import TaskScope, unending
from swarm.directory.dht.addresses import check_join_address
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.health.alerts.rules import Change
from swarm.health.alerts.webhook import MAX_WEBHOOKS, Webhook, parse_receiver
from swarm.health.broker.supervisor import EmbeddedBroker
from swarm.health.metrics.exporter import health_metrics
from swarm.health.options import Health
from swarm.health.state.directory import Directory
from swarm.health.state.mqtt_feed import MqttFeed
from swarm.health.state.overview import Overview
from swarm.health.state.verdict import LinkState
from swarm.health.tasks.history import History, default_data_path
from swarm.health.tasks.prober import Prober, run_probe
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.tasks.recorder import HealthLoop
from swarm.health.web.api import alert_routes, make_app
from swarm.health.web.snapshot import check_folder, keep_snapshot, snapshot_of
from swarm.link.broker_address import parse_broker
from swarm.status.guard import TelemetryGuard
from swarm.status.http import Server, make_server
from swarm.status.messages import check_prefix

STUCK_READER_MS = 30_000
BACKLOG = 256


async def health(command: Health, console: Console) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: options are wrong, or do not go together.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    check(command)
    if command.url is not None and command.snapshot is not None:
        count = await snapshot_of(command.url, command.snapshot)
        console.print(Text(f"snapshot of {count} models in {command.snapshot}"))
        return
    async with HealthService(command) as service:
        host, port = service.http_address
        console.print(Text(f"health page at http://{host}:{port}/"))
        if service.broker is not None:
            console.print(
                Text(f"broker at {service.broker.address}; nodes publish with --mqtt {service.broker.address}")
            )
        await stop.wait()
        console.print(Text("leaving"))


def check(command: Health) -> None:
    """Refuse wrong options, before anything slow.

    Raises:
        ConfigError: names the option.
    """
    if command.url is not None:
        if command.snapshot is None or command.join:
            raise ConfigError("--url goes with --snapshot DIR alone: it copies the page of a service that runs already")
        return
    if command.snapshot is not None:
        check_folder(command.snapshot)
    if not command.join:
        raise ConfigError("which swarm? use an invite, or give a peer's address with --join")
    for address in command.join:
        check_join_address(address)
    check_prefix(command.prefix)
    if command.mqtt is not None and command.embedded_broker:
        raise ConfigError("--mqtt and --embedded-broker: choose one; a service listens to one broker")
    if command.probe_every < 0 or command.probe_budget < 0:
        raise ConfigError("--probe-every and --probe-budget cannot be negative; 0 probes never")
    if len(command.webhook) > MAX_WEBHOOKS:
        raise ConfigError(f"--webhook: {MAX_WEBHOOKS} at most")


class HealthService:
    """The running service: `async with HealthService(command) as service`."""

    def __init__(self, command: Health) -> None:
        self._command = command
        self._stack = AsyncExitStack()
        self._guard = TelemetryGuard(command.prefix, is_listed=lambda *who: self.overview.knowledge.is_listed(*who))
        self._broker_address = None if command.mqtt is None else parse_broker(command.mqtt, command.mqtt_ca)
        self.overview = Overview(command.join, command.prefix, round(time.time(), 3), self._guard.rejected)
        self._webhooks = [
            Webhook(parse_receiver(url, command.webhook_min, command.webhook_secret), self.overview.name)
            for url in command.webhook
        ]
        self.publisher = StatePublisher()
        self.broker: EmbeddedBroker | None = None
        self.http_address = ("", 0)

    async def __aenter__(self) -> HealthService:
        """Bind ports, open the history, start everything.

        Raises:
            ConfigError: a port is taken, or the file cannot be used.
        """
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.publisher.close()
        return await self._stack.__aexit__(kind, error, trace)

    async def _start(self, stack: AsyncExitStack) -> None:
        command, overview = self._command, self.overview
        listening = stack.enter_context(_listen(command.host, command.port))
        self.http_address = listening.getsockname()[:2]
        path = command.data or default_data_path(dict(os.environ))
        history = await stack.enter_async_context(History.open(path))
        health_loop = HealthLoop(overview, self.publisher, history, on_changes=self._offer_to_webhooks)
        await health_loop.load()
        stack.push_async_callback(health_loop.close)
        if command.embedded_broker:
            broker = EmbeddedBroker(command.broker_host, command.broker_port, command.prefix, command.broker_passwords)
            self.broker = await stack.enter_async_context(broker)
        overview.set_dht_state(LinkState.DOWN, time.time())
        health_loop.step()
        scope = await stack.enter_async_context(TaskScope())
        scope.spawn(health_loop.run(), "health loop")
        for webhook in self._webhooks:
            scope.spawn(unending(webhook.run, "a webhook"), "webhook")
        self._listen_to_nodes(scope)
        config = DhtConfig(join=command.join, client_mode=True, membership=command.membership)
        directory = Directory(
            lambda: DhtRegistry.open(config),
            overview.knowledge.apply_records,
            overview.set_dht_state,
            overview.knowledge.slots.choose,
        )
        scope.spawn(unending(directory.run, "the directory"), "directory")
        if command.probe_every and command.probe_budget:
            network = command.membership.network
            run = run_probe if network is None else partial(run_probe, network_key=network.secret)
            prober = Prober(overview, command, run, (time.time, time.monotonic))
            scope.spawn(unending(prober.run, "the prober"), "prober")
        if command.snapshot is not None:
            folder = command.snapshot
            scope.spawn(
                unending(
                    lambda: keep_snapshot(folder, lambda: self.publisher.state, health_loop.points), "the snapshot"
                ),
                "snapshot",
            )
        app = make_app(self.publisher, health_loop.points)
        app.include_router(alert_routes(health_loop))
        app.routes.append(health_metrics(health_loop, self._guard, command.probe_every).route())
        server = make_server(app)
        task = scope.spawn(_serve(server, listening), "http")
        stack.push_async_callback(_stop_server, server, task)

    def _offer_to_webhooks(self, changes: Sequence[Change]) -> None:
        for webhook in self._webhooks:
            webhook.offer(changes)

    def _listen_to_nodes(self, scope: TaskScope) -> None:
        overview, broker, broker_address = self.overview, self.broker, self._broker_address
        if broker is not None or broker_address is not None:
            overview.set_broker_state(LinkState.DOWN, time.time())
        feed = MqttFeed(
            self._guard,
            self._command.prefix,
            lambda one, now: overview.knowledge.apply_telemetry(one.peer, one.fingerprint, one.body, now),
            overview.set_broker_state,
        )
        if broker is not None:
            scope.spawn(unending(lambda: feed.run(broker.own_address), "the feed"), "feed")
            scope.spawn(broker.supervise(), "broker")
        elif broker_address is not None:
            scope.spawn(unending(lambda: feed.run(lambda: broker_address), "the feed"), "feed")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by connections: a reader that takes nothing is cut off
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_READER_MS)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"cannot serve the page on {host} port {port}: {error}; choose another --port") from error
    return listening


async def _serve(server: Server, listening: socket.socket) -> None:
    await server.serve(sockets=[listening])


async def _stop_server(server: Server, task: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait([task])
