"""Two ends of a hole find each other, and nobody else: by their tokens, within bounds, and with nothing left open."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import IPv4Interface, IPv6Address

import pytest

from swarm.base.errors import RemoteProtocolError
from swarm.link.egress.streams import Streams, connect
from swarm.link.endpoint import LinkPath
from swarm.reach.paths import hole as hole_module
from swarm.reach.paths.hole import Hole, HoleTokens, OwnAddresses, Targets
from tests.net.relayed_machine import relaying

NOWHERE = OwnAddresses()
TOKENS = HoleTokens(waits="1" * 32, chooses="2" * 32)


@asynccontextmanager
async def two_holes(host: str = "127.0.0.1") -> AsyncIterator[tuple[Hole, Hole]]:
    """The end that chooses, and the one that waits."""
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(relaying(host))
        ends = [await stack.enter_async_context(Hole.at(relay.address, lambda: NOWHERE)) for _ in range(2)]
        yield ends[0], ends[1]


def far(*addresses: str) -> Targets:
    return Targets((), addresses)


async def said_and_heard(one: Streams, other: Streams) -> None:
    await one.say("through", "the", "hole")
    assert await other.hear() == ["through", "the", "hole"]
    for end in (one, other):
        end.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_both_ends_have_the_same_connection(host: str) -> None:
    async with two_holes(host) as (chooses, waits):
        (one, path), (other, _) = await asyncio.gather(
            chooses.meet(far(waits.place.seen), TOKENS, chooses=True),
            waits.meet(far(chooses.place.seen), TOKENS, chooses=False),
        )
        assert path is LinkPath.PUNCHED
        await said_and_heard(one, other)


@pytest.mark.parametrize("knocking", ["the one that chooses", "the one that waits"])
async def test_one_that_knocks_is_enough_in_a_lan(knocking: str) -> None:
    """Two attempts hardly ever meet in flight there; who listens is met."""
    async with two_holes() as (chooses, waits):
        is_first = knocking == "the one that chooses"
        (one, _), (other, _) = await asyncio.gather(
            chooses.meet(far(waits.place.seen) if is_first else Targets(), TOKENS, chooses=True),
            waits.meet(Targets() if is_first else far(chooses.place.seen), TOKENS, chooses=False),
        )
        await said_and_heard(one, other)


@pytest.mark.parametrize(
    "said", [b"", b"3" * 32 + b"\n", b"1" * 32 + b" ", b"2" * 10_000, b"GET / HTTP/1.1\r\n\r\n"], ids=len
)
async def test_whoever_knows_no_token_is_not_taken_and_hears_none(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that listens where the other end should be, or a stranger who finds the port."""
    monkeypatch.setattr(hole_module, "MEET_S", 0.3)
    heard = bytearray()

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        with suppress(OSError):
            heard.extend(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    async with server, two_holes() as (chooses, _):
        with pytest.raises(TimeoutError):
            await chooses.meet(far(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), TOKENS, chooses=True)
    assert not heard, "nothing is said to whoever has not proven itself"


async def test_strangers_in_the_way_do_not_keep_the_right_one_out() -> None:
    async with two_holes() as (chooses, waits), AsyncExitStack() as stack:
        meeting = asyncio.gather(
            chooses.meet(Targets(), TOKENS, chooses=True),
            waits.meet(far(chooses.place.seen), TOKENS, chooses=False),
        )
        for _ in range(3):
            with suppress(OSError):
                stranger = await connect(chooses.place.seen)
                stack.callback(stranger.abort)
                await stranger.say(secrets.token_hex(16))
        (one, _), (other, _) = await meeting
        await said_and_heard(one, other)


async def test_a_wrong_token_of_the_machine_is_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_module, "MEET_S", 0.3)
    async with two_holes() as (chooses, waits):
        wrong = HoleTokens(waits="3" * 32, chooses=TOKENS.chooses)
        results = await asyncio.gather(
            chooses.meet(far(waits.place.seen), TOKENS, chooses=True),
            waits.meet(far(chooses.place.seen), wrong, chooses=False),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [TimeoutError, TimeoutError]


async def test_global_addresses_of_ipv6_are_told_too() -> None:
    """There no router changes a port, so nobody has to see it."""
    own = OwnAddresses(global_v6=tuple(IPv6Address(f"2606:4700::{number}") for number in (1, 2, 3)))
    async with relaying() as relay, Hole.at(relay.address, lambda: own) as hole:
        port = hole.place.seen.rpartition(":")[2]
        assert hole.public == (hole.place.seen, f"[2606:4700::1]:{port}", f"[2606:4700::2]:{port}")


async def test_the_lan_is_tried_first_and_named() -> None:
    home = OwnAddresses((IPv4Interface("127.0.0.1/8"),))
    async with (
        relaying() as relay,
        Hole.at(relay.address, lambda: home) as one,
        Hole.at(relay.address, lambda: home) as other,
    ):
        assert one.private == (f"127.0.0.1:{one.place.seen.rpartition(':')[2]}",)
        (taken, path), (given, _) = await asyncio.gather(
            one.meet(Targets(other.private, ("127.0.0.2:1",)), TOKENS, chooses=True),
            other.meet(Targets(one.private), TOKENS, chooses=False),
        )
        assert path is LinkPath.LAN
        await said_and_heard(taken, given)


@pytest.mark.parametrize(
    "answer", [b"", b"SEEN\n", b"SEEN name:1\n", b"SEEN 1.2.3.4:5,1.2.3.4:6\n", b"x" * 600 + b"\n"]
)
async def test_a_relay_that_does_not_say_what_it_sees(answer: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    async with server:
        with pytest.raises(RemoteProtocolError):
            async with Hole.at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"):
                pass


async def test_a_silent_relay_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_module, "SEEN_S", 0.1)
    waiting = asyncio.Event()

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        waiting.set()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    async with server:
        with pytest.raises(TimeoutError):
            async with Hole.at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"):
                pass
        async with asyncio.timeout(5):
            await waiting.wait()  # its connection was closed


async def test_a_port_that_is_given_up_is_free_again() -> None:
    async with relaying() as relay:
        async with Hole.at(relay.address, lambda: NOWHERE) as hole:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await hole.meet(Targets(), TOKENS, chooses=True)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", int(hole.place.seen.rpartition(":")[2]))
        server.close()
