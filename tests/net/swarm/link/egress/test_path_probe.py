"""Whether full packets reach a peer: what a peer, a black hole, a firewall and a stranger look like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swarm.link.egress import path_probe
from swarm.link.egress.path_probe import PathVerdict, probe_path

GREETING = b"\x13/multistream/1.0.0\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readexactly(len(GREETING)))
    for _ in range(4):
        low, high = await reader.readexactly(2)
        length = (low & 0x7F) + (high << 7)
        assert length < 1_024, "what multistream takes"
        assert (await reader.readexactly(length)).endswith(b"\n")
        writer.write(b"\x03na\n")
    await reader.read()
    writer.close()


async def black_hole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Nothing of what is long arrives."""
    writer.write(await reader.readexactly(len(GREETING)))
    while await reader.read(4_096):
        pass
    writer.close()


async def firewall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readexactly(len(GREETING)))
    await reader.read(1)
    writer.transport.abort()


async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def sleeper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (peer, PathVerdict.PASSES),
        (black_hole, PathVerdict.SMALL_ONLY),
        (firewall, PathVerdict.SILENT),
        (stranger, PathVerdict.SILENT),
        (sleeper, PathVerdict.SILENT),
    ],
)
async def test_what_a_path_is_like(answer: Answer, verdict: PathVerdict, monkeypatch: pytest.MonkeyPatch) -> None:
    if answer is not peer:
        monkeypatch.setattr(path_probe, "LARGE_S", 0.05)
    if answer is sleeper:
        monkeypatch.setattr(path_probe, "GREETING_S", 0.05)
    async with listening(answer) as address:
        assert await probe_path(address) is verdict


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:0"])
async def test_nobody_there(address: str) -> None:
    assert await probe_path(address) is PathVerdict.SILENT
