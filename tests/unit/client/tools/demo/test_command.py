"""What `client demo` is told, up to the point where it would start a swarm."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import client.cli
from client.tools.demo import command
from client.tools.demo.command import Demo


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays of demos that would have run."""
    started: list[float] = []

    async def demo(_: Demo, delay_ms: float, __: Any) -> None:  # noqa: ANN401
        started.append(delay_ms)

    monkeypatch.setattr(command, "_demo", demo)
    monkeypatch.delenv("DELAY_MS", raising=False)
    return started


def test_the_option_comes_before_the_environment_and_that_before_the_default(
    monkeypatch: pytest.MonkeyPatch, delays: list[float]
) -> None:
    assert client.cli.run(Demo()) == 0
    monkeypatch.setenv("DELAY_MS", "10")
    assert client.cli.run(Demo()) == 0
    assert client.cli.run(Demo(delay_ms=0)) == 0
    assert delays == [command.DELAY_MS, 10, 0]


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_a_delay_that_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch, delays: list[float], capfd: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv("DELAY_MS", text)
    assert client.cli.run(Demo()) == 1
    assert capfd.readouterr().err == f"client: DELAY_MS {text}: give milliseconds from 0 to 10000\n"
    assert not delays


@pytest.mark.parametrize("tokens", [0, 1_025])
def test_a_length_that_cannot_be_is_one_line(
    delays: list[float], capfd: pytest.CaptureFixture[str], tokens: int
) -> None:
    assert client.cli.run(Demo(tokens=tokens)) == 1
    assert capfd.readouterr().err == f"client: --tokens {tokens}: give 1 to 1024\n"
    assert not delays


def test_whoever_is_told_to_stop_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(command, "_demo", stopped)
    assert client.cli.run(Demo()) == 143
