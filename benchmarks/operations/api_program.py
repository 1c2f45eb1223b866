"""`client api` as a program of its own over a swarm that is up, and what may be asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from client.demo.programs import RunningProgram, start_program
from swarm.demo import DRAFT, TARGET
from swarm.errors import RegistryError

COMPLETE_S = 60.0
"""A model whose layers are not all found by then will not be."""


@dataclass(frozen=True, slots=True)
class ApiProgram:
    """The API as it runs.

    Attributes:
        url: its base, without a slash at its end.
    """

    url: str
    running: RunningProgram

    def http(self, key: str) -> httpx2.AsyncClient:
        """A client with this key and connections of its own, as many as it needs."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=None, trust_env=False)


@asynccontextmanager
async def api_program(peer: str, folder: Path, keys: Sequence[str], *options: str) -> AsyncIterator[ApiProgram]:
    """Start it with the demo's draft; the block begins when it finds every layer.

    Args:
        peer: address of the swarm's bootstrap peer.
        folder: for its log and what it learns about the draft.
        options: more of `client api`.

    Raises:
        RegistryError: it did not start, or does not find the model.
    """
    command = ["client.cli", "api", str(TARGET), "--join", peer, "--draft", str(DRAFT), "--threads", "1"]
    command += ["--port", "0", *(word for key in keys for word in ("--api-key", key)), *options]
    async with start_program("api", command, folder, ["env", f"XDG_CACHE_HOME={folder}"]) as running:
        url = (await running.wait_for(r"http://\S+/v1")).removesuffix("/v1")
        program = ApiProgram(url, running)
        async with program.http(keys[0]) as http:
            await _complete(http)
        yield program


async def _complete(http: httpx2.AsyncClient) -> None:
    for _ in range(int(COMPLETE_S / 0.2)):
        models = (await http.get("/v1/models")).json()["data"]
        if models and models[0]["health"]["is_complete"]:
            return
        await asyncio.sleep(0.2)
    raise RegistryError(f"the API did not find every layer in {COMPLETE_S:.0f} s")
