"""Writes snapshots: one of a running service, or one a minute of this one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import httpx2

from swarm.errors import ConfigError, RegistryError, RemoteProtocolError
from swarm.health.remote.client import STATE, TIMEOUT, ask_bytes, service_url
from swarm.health.remote.state import copyable, read_state
from swarm.health.web.snapshot import PageSnapshot, ReadHistory, check_folder, write
from swarm.runtime.strict_json import strict_json

logger = logging.getLogger(__name__)

EVERY_S: Final = 60.0
POLL_S: Final = 1.0
UP: Final = frozenset({"ok", "connected"})


async def snapshot_of(address: str, directory: Path) -> int:
    """Write a running service's page into a folder; returns how many models it shows.

    Raises:
        ConfigError: the address or the folder cannot be used.
        RegistryError: nobody answers there, or no health service.
    """
    url = service_url(address)
    check_folder(directory)
    async with httpx2.AsyncClient(timeout=TIMEOUT) as client:
        text = await ask_bytes(client, url, STATE)
        try:
            datetime.fromtimestamp(read_state(text).at, UTC)
        except (RemoteProtocolError, OverflowError, ValueError, OSError) as error:
            raise RegistryError(f"{url} is no health service of this version: {error}") from error

        async def points(fingerprint: str, window: str) -> Mapping[str, Any]:
            query = urlencode({"model": fingerprint, "window": window})
            return _points(await ask_bytes(client, url, f"api/v1/history?{query}"), url)

        state = json.loads(text)
        for model in state["models"]:  # a visitor may copy them, and they are another machine's words
            model["fixes"] = copyable(model["fixes"])
        snapshot = await PageSnapshot.take(state, points)
    await asyncio.to_thread(write, directory, snapshot)
    return len(snapshot.state["models"])


def _points(text: bytes, url: httpx2.URL) -> Mapping[str, Any]:
    try:
        found = strict_json(text)
    except ValueError as error:
        raise RegistryError(f"{url} is no health service: its history is no JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("points"), list):
        raise RegistryError(f"{url} is no health service: its history has no points")
    return found


async def keep_snapshot(
    directory: Path,
    state: Callable[[], Mapping[str, Any]],
    points: ReadHistory,
    pauses_s: tuple[float, float] = (EVERY_S, POLL_S),
) -> None:
    """Write one a minute, for ever; a failure is logged once, and tried again.

    Before the broker or the DHT has answered nothing is known, and an old snapshot is better than an empty one.

    Args:
        directory: the folder.
        state: gives the newest state.
        points: gives the history.
        pauses_s: between snapshots; between checks whether anything is known yet.
    """
    every_s, poll_s = pauses_s
    is_known = is_reported = False
    while True:
        is_known = is_known or any(link["state"] in UP for link in state().get("sources", {}).values())
        if not is_known:
            await asyncio.sleep(poll_s)
            continue
        try:
            snapshot = await PageSnapshot.take(state(), points)
            await asyncio.to_thread(write, directory, snapshot)
            is_reported = False
        except ConfigError as error:
            if not is_reported:
                logger.warning("%s; the snapshot there is old", error)
                is_reported = True
        await asyncio.sleep(every_s)
