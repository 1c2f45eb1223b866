"""Peers of the directory that surround its keys, and members who ask it too much."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.eclipse import nearest
from benchmarks.redteam.sealing import quick_identities
from swarm.base.errors import RegistryError
from swarm.directory.registry import block_keys, models_key
from swarm.link.certificate import ServerCertificate
from swarm.link.endpoint import Endpoint

READY_S = 80.0
SOME, MANY = 14, 50
TRIED = 1_200
"""Identities among which those nearest to the keys are found; honest peers are a handful."""


async def surround(fight: Fight, count: int) -> None:
    """Let so many peers join whose ids were searched beside the honest model's keys, then keep nothing."""
    model = fight.ground.model
    keys = [models_key(model.fingerprint), *block_keys(model.fingerprint, 0, model.num_layers)]
    folder = Path(fight.ground.folder) / f"eclipse {secrets.token_hex(4)}"
    folder.mkdir()

    def grind() -> list[str]:
        chosen = nearest(quick_identities(TRIED), keys, count)
        paths = [folder / f"{who.peer_id}.key" for who in chosen]
        for who, path in zip(chosen, paths, strict=True):
            who.save(path)
        return [str(path) for path in paths]

    paths = await asyncio.to_thread(grind)
    command = (sys.executable, "-m", "benchmarks.redteam.eclipse", fight.ground.join, *paths)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            line = await process.stdout.readline()
        assert line == b"ready\n", "the peers did not join"
        fight.tally.identities += TRIED
        await fight.go()
        process.stdin.write(b"\n")
        await fight.stay()
    finally:
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(8.0):
                fight.note((await process.stdout.read()).decode().strip())
                await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@attack("eclipse-14", Kind.DIRECTORY, stains=True, lasts_s=70.0)
async def eclipse_14(fight: Fight) -> None:
    """14 peers of the directory with ids beside the honest model's keys, who keep nothing."""
    await surround(fight, SOME)


@attack("eclipse-50", Kind.DIRECTORY, stains=True, lasts_s=70.0)
async def eclipse_50(fight: Fight) -> None:
    """50 peers of the directory with ids beside the honest model's keys, who keep nothing."""
    await surround(fight, MANY)


@attack("fetch-flood", Kind.DIRECTORY)
async def fetch_flood(fight: Fight) -> None:
    """A member asks for 40 keys a second, most of which nobody has."""
    registry = await fight.kit.directory()
    await fight.go()

    async def ask() -> None:
        with suppress(RegistryError):
            await registry.records(secrets.token_hex(32), 64, within_s=0.0)

    async for _ in fight.pace(10.0):
        fight.tally.acts += 1
        fight.kit.scope.spawn(ask())


@attack("dial-back-flood", Kind.DIRECTORY)
async def dial_back_flood(fight: Fight) -> None:
    """A member asks others to call addresses that are not its own, ten times a second."""
    registry = await fight.kit.directory()
    called = 0

    def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal called
        called += 1
        writer.close()

    victim = await asyncio.start_server(count, "127.0.0.1", 0)
    certificate = ServerCertificate.fresh(registry.peer_id).der
    endpoint = Endpoint(registry.peer_id, f"127.0.0.1:{victim.sockets[0].getsockname()[1]}", certificate)
    await fight.go()

    async def ask() -> None:
        with suppress(RegistryError):
            if await registry.dial_back(endpoint, secrets.token_bytes(16)):
                fight.breach("an address that does not answer counts as reached")

    try:
        async for _ in fight.pace(10.0):
            fight.tally.acts += 1
            fight.kit.scope.spawn(ask())
    finally:
        victim.close()
        fight.note(f"others called the victim {called} times for {fight.tally.acts} requests")
        if called > max(fight.tally.acts, 60):
            fight.breach("a request makes others call more than once")
