"""The red team's tools: what an attack opens stays open until the attack is over."""

from __future__ import annotations

import asyncio
import gc

from benchmarks.redteam.ground import Ground, NodeMark
from benchmarks.redteam.kit import Kit
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span


async def test_a_connection_that_an_attack_lets_go_stays_open_until_its_end() -> None:
    """Else 1,400 idle connections would be closed by the garbage collector, and nothing be attacked."""
    ended = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        try:
            await reader.read()
        except OSError:
            pass
        finally:
            writer.close()
            ended.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    node = NodeMark(address, PeerId("Qm"), Span(0, 1), "", "")
    ground = Ground(
        "",
        (node,),
        ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 12),
        192,
        4_096,
        "cpu-float32",
        "",
        "",
        "",
    )
    async with server, asyncio.timeout(10):
        async with Kit(ground) as kit:
            reader = (await kit.socket(address)).reader  # its writer is let go
            gc.collect()
            assert await reader.readexactly(1) == b"x"
            assert not ended.is_set()
        await ended.wait()
