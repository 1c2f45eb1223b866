"""A node stays listed whatever fails in between: only a second machine with its identity ends the announcing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

import node.life.announcer
from node.life.announcer import SAY_AGAIN, Announcer
from node.life.span_host import max_connections
from swarm.base.errors import IdentityError, RegistryError

ROUNDS = 5


async def test_no_failure_but_a_second_machine_ends_the_announcing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    announced: list[str] = []

    async def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async def announce(*_: object) -> None:
        announced.append("")
        await fail()

    async def check_still_alone(*_: object) -> None:
        if len(announced) == ROUNDS:
            raise IdentityError("another machine")
        await fail()

    monkeypatch.setattr(node.life.announcer, "ANNOUNCE_S", 0)
    monkeypatch.setattr(node.life.announcer, "check_still_alone", check_still_alone)
    resources = SimpleNamespace(dialer=SimpleNamespace(tidy=fail), rebalance=None, registry=None, left_behind=None)
    announcer = Announcer(cast("Any", resources), cast("Any", None))
    announcer.announced = cast("Any", "a record")
    monkeypatch.setattr(announcer, "announce", announce)
    monkeypatch.setattr(announcer, "_measure_delays", fail)
    async with asyncio.timeout(10):
        with pytest.raises(IdentityError):
            await announcer.keep_announcing()
    assert len(announced) == ROUNDS
    assert caplog.messages == ["not announced this time: OSError: [Errno 24] Too many open files"]


async def test_a_new_address_is_announced_until_the_directory_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def announce(*_: object) -> None:
        tried.append("")
        if len(tried) < SAY_AGAIN:
            raise RegistryError("the DHT did not answer")

    monkeypatch.setattr(node.life.announcer, "SAY_AGAIN_S", 0)
    announcer = Announcer(cast("Any", SimpleNamespace(rebalance=None)), cast("Any", None))
    monkeypatch.setattr(announcer, "announce", announce)
    await announcer.say_again()
    assert not tried, "it was not announced at all yet"
    announcer.announced = cast("Any", "a record")
    await announcer.say_again()
    assert len(tried) == SAY_AGAIN
    await announcer.say_again()
    assert len(tried) == SAY_AGAIN + 1


@pytest.mark.parametrize(("files", "connections"), [(1_024, 512), (4_096, 3_584), (1 << 20, 4_096), (256, 128)])
def test_connections_of_others_leave_files_to_the_node(files: int, connections: int) -> None:
    assert max_connections(files) == connections
