"""What `swarm.alive` takes for dead: ports that are shut, mute, or another program's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from swarm import alive
from tests.net.brokers import free_port, scripted_broker

KINDS = sorted(alive.CHECKS)


@pytest.fixture
def mute() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_port_is_not_enough(mute: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "DEADLINE_S", 0.2)
    assert alive.main([kind, str(mute)]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_shut_port_is_dead(kind: str) -> None:
    assert alive.main([kind, str(free_port())]) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_another_program_is_not_taken_for_ours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "DEADLINE_S", 0.5)
    async with scripted_broker(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}") as other:
        assert await asyncio.to_thread(alive.main, [kind, str(other.port)]) == 1


@pytest.mark.parametrize("asked", [[], ["node"], ["node", "x"], ["planet", "1"], ["node", "1", "host", "more"]])
def test_it_says_how_it_is_asked(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert alive.main(asked) == 2
    assert "usage" in capsys.readouterr().err
