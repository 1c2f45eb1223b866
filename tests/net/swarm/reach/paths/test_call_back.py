"""Calls are taken once, by their tokens; whoever else finds the port gets nothing and holds nothing up."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack, suppress

import pytest

from swarm.link.egress.streams import connect
from swarm.link.endpoint import LinkPath
from swarm.reach.paths import call_back
from swarm.reach.paths.call_back import CallBackListener, CallBackWay, ExpectedCalls
from swarm.reach.paths.way import REMEMBERED_S, SOON_S, NoWay
from swarm.reach.relay.openings import Verb
from tests.net.relayed_machine import relaying, standing


async def test_a_machine_calls_and_bytes_flow() -> None:
    calls = ExpectedCalls()
    async with CallBackListener.listen(calls, "127.0.0.1") as port, relaying() as relay, standing(relay) as machine:
        opened = await CallBackWay(calls, lambda: f"127.0.0.1:{port}").open(machine.peer, relay.address)
        assert opened.path is LinkPath.CALLED_BACK
        opened.streams.abort()
    assert relay.openings == [Verb.CALL]


async def test_a_token_is_good_once_and_then_for_nobody() -> None:
    calls = ExpectedCalls()
    async with CallBackListener.listen(calls, "127.0.0.1") as port, AsyncExitStack() as stack:
        token, arriving = calls.expect()
        first = await connect(f"127.0.0.1:{port}")
        stack.callback(first.abort)
        await first.say("TAKE", token)
        await asyncio.wait([arriving])
        second = await connect(f"127.0.0.1:{port}")
        stack.callback(second.abort)
        await second.say("TAKE", token)
        assert await second.reader.read() == b""
        claimed = calls.claim(token)
        stack.callback(claimed.abort)
        await claimed.say("yours")
        assert await first.hear() == ["yours"]


@pytest.mark.parametrize(
    "said",
    [b"", b"\n", b"TAKE\n", b"TAKE " + b"a" * 32 + b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70_000, b"x" * 70_000],
    ids=len,
)
async def test_strangers_are_sent_away(said: bytes) -> None:
    calls = ExpectedCalls()
    async with CallBackListener.listen(calls, "127.0.0.1") as port, asyncio.timeout(5):
        token, arriving = calls.expect()
        stranger = await connect(f"127.0.0.1:{port}")
        stranger.writer.write(said)
        stranger.writer.write_eof()
        with suppress(OSError):
            assert await stranger.reader.read() == b""
        stranger.abort()
        assert not arriving.done()
        calls.forget(token)


async def test_slow_lines_hold_no_place_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_back, "OPENING_S", 0.1)
    monkeypatch.setattr(call_back, "MAX_OPENINGS", 2)
    calls = ExpectedCalls()
    async with CallBackListener.listen(calls, "127.0.0.1") as port, AsyncExitStack() as stack, asyncio.timeout(5):
        slow = [await connect(f"127.0.0.1:{port}") for _ in range(3)]
        for one in slow:
            stack.callback(one.abort)
            one.writer.write(b"T")
        for one in slow:
            with suppress(OSError):
                assert await one.reader.read() == b""
        token, arriving = calls.expect()
        late = await connect(f"127.0.0.1:{port}")
        stack.callback(late.abort)
        await late.say("TAKE", token)
        await asyncio.wait([arriving])
        calls.forget(token)
        assert await late.reader.read() == b"", "nobody wanted it any more"


async def test_who_cannot_be_called_asks_a_few_machines_and_then_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall before the port, say: each machine that calls in vain costs time."""
    monkeypatch.setattr(call_back, "CALLED_S", 0.02)
    calls = ExpectedCalls()
    way = CallBackWay(calls, lambda: "127.0.0.1:9")
    async with relaying() as relay, standing(relay) as machine:
        machine.calls = False
        for _ in range(call_back.MAX_IN_VAIN + 3):
            with pytest.raises(NoWay) as caught:
                await way.open(machine.peer, relay.address)
            assert caught.value.again_s == REMEMBERED_S
    assert relay.openings == [Verb.CALL] * call_back.MAX_IN_VAIN
    assert not calls._waiting


async def test_a_machine_that_nobody_can_dial_now_asks_nobody() -> None:
    with pytest.raises(NoWay) as caught:
        await CallBackWay(ExpectedCalls(), lambda: None).open(secrets.token_hex(8), "127.0.0.1:9")  # type: ignore[arg-type]
    assert caught.value.again_s == SOON_S


async def test_a_relay_that_knows_no_such_machine_says_so_at_once() -> None:
    async with relaying() as relay, standing(relay) as machine:
        relay.machine = None
        with pytest.raises(NoWay, match="relay refuses") as caught:
            await CallBackWay(ExpectedCalls(), lambda: "127.0.0.1:9").open(machine.peer, relay.address)
        assert caught.value.again_s == SOON_S


async def test_few_calls_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_back, "MAX_EXPECTED", 2)
    calls = ExpectedCalls()
    tokens = [calls.expect()[0] for _ in range(2)]
    with pytest.raises(NoWay):
        calls.expect()
    for token in tokens:
        calls.forget(token)
    assert calls.expect()
