"""`swarm top`: asks first, so that a wrong address gives one clear line; then watches, or prints once."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx2
from rich.console import Console
from rich.text import Text

from swarm.base.errors import ConfigError, RegistryError, UnknownModel
from swarm.base.tasks import TaskScope
from swarm.directory.dht.addresses import check_join_address
from swarm.health.remote.client import TIMEOUT, service_url
from swarm.health.remote.state import State
from swarm.health.top.feed import LatestState, ask, follow, poll_dht
from swarm.health.top.live import FollowStates, watch
from swarm.health.top.options import DEFAULT_URL, Top
from swarm.health.top.screen import choose, plural, screen

SCREEN_WIDTH = 100
"""Columns of the one screen that `--once` prints where no terminal looks."""
FIRST_S = 30.0


async def top(command: Top, console: Console) -> None:
    """Watch until the user quits, or print one screen.

    Raises:
        ConfigError: options are wrong, or do not go together.
        RegistryError: nobody answers there.
    """
    if command.join and command.url is not None:
        raise ConfigError("--url and --join: choose one; with --join the DHT alone is asked")
    if command.join:
        for address in command.join:
            check_join_address(address)
        source = partial(poll_dht, command.join, command.membership)
        await _show(command, source, await _first(source), console)
        return
    url = service_url(command.url or DEFAULT_URL)
    async with httpx2.AsyncClient(timeout=TIMEOUT) as client:
        await _show(command, partial(follow, client, url), await ask(client, url), console)


async def _show(command: Top, source: FollowStates, state: State, console: Console) -> None:
    if command.model is not None and choose(state, command.model) is None:
        names = ", ".join(f"{model.name} ({model.fingerprint[:12]})" for model in state.models[:8]) or "none"
        raise UnknownModel(f"nobody serves {command.model!r} there; it has: {names}")
    if command.once:
        _print(state, command.model, console)
        return
    if not console.is_terminal:
        raise ConfigError("swarm top draws on a terminal; for a script or a file use --once")
    await watch(source, state, command.model, console)


async def _first(source: FollowStates) -> State:
    """The first state that a source brings."""
    came = asyncio.Event()
    watched = LatestState(came.set)
    async with TaskScope() as scope:
        scope.spawn(source(watched), "first look")
        try:
            async with asyncio.timeout(FIRST_S):
                await came.wait()
        except TimeoutError:
            raise RegistryError(f"the DHT did not answer within {FIRST_S:.0f} s") from None
    if watched.state is None:
        raise RegistryError(watched.trouble or "the DHT does not answer")
    return watched.state


def _print(state: State, selected: str | None, console: Console) -> None:
    width = console.width if console.is_terminal else SCREEN_WIDTH
    model = choose(state, selected)
    if model is None:
        console.print(Text(f"nobody serves a model here yet ({plural(len(state.alerts), 'alert')})"))
        return
    for one in screen(state, model, width):
        text = Text(one.plain.rstrip()) if not console.is_terminal else one
        console.print(text, soft_wrap=True, crop=False, overflow="ignore", no_wrap=True)
