"""A relay's promises over real connections: who is led where, what is refused, and that nobody is in another's way."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import tracemalloc
from contextlib import AsyncExitStack, suppress

import pytest

from swarm.base.quota import HoldingLimit, RateLimit
from swarm.directory.address_proof import check_who, who_question
from swarm.directory.identity import Identity
from swarm.link.network_key import NetworkKey
from swarm.reach.relay import server
from swarm.reach.relay.openings import prove_presence
from swarm.reach.relay.visits import RelayLimits, Visit, Visits
from tests.net.relay_kit import Standing, accepted, claim, connect, echo, open_relay, serving, standing

STRANGER, OTHER = "127.0.0.66", "127.0.0.67"
TOKEN = "0f" * 16


@pytest.fixture
def counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses count as strangers', which have a sixteenth as much."""
    monkeypatch.setattr("swarm.reach.relay.visits.is_private", lambda key: False)


async def test_bytes_go_both_ways_and_each_end_learns_whence_the_other_comes() -> None:
    async with open_relay() as relay, standing(relay) as here:
        assert here.seen.startswith("127.0.0.1:")
        async with relay.dial(connect(here.identity.peer_id)) as (reader, writer):
            own = "{}:{}".format(*writer.get_extra_info("sockname"))
            verb, token, address = await here.told.get()
            assert (verb, address) == ("OPEN", own)
            async with relay.dial(f"TAKE {token}\nearly".encode()) as (back, forth):
                assert await accepted(reader)
                assert await reader.readexactly(5) == b"early", "what came with TAKE is the circuit's"
                writer.write(b"to the machine")
                assert await back.readexactly(14) == b"to the machine"
                forth.write(b"and back")
                assert await reader.readexactly(8) == b"and back"
                assert (await relay.ask(b"LOAD\n")).startswith(b"LOAD 1 128 0.0 ")
                assert await relay.ask(f"TAKE {token}\n".encode()) == b"", "a token is good once"
                forth.write(b"still")
                assert await reader.readexactly(5) == b"still"
        assert relay.server.load.machines == 1


async def test_one_end_may_have_said_all_before_the_other() -> None:
    async with (
        open_relay() as relay,
        serving(relay, echo) as here,
        relay.dial(connect(here.identity.peer_id)) as (reader, writer),
    ):
        assert await accepted(reader)
        sent = secrets.token_bytes(300_000)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent


async def test_a_visit_that_ends_before_it_began_gives_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Visits.admit

    def admit_and_end(visits: Visits, visit: Visit) -> bool:
        asyncio.get_running_loop().call_soon(visit.end)  # before its task has its first turn
        return admit(visits, visit)

    limits = RelayLimits(connections=HoldingLimit(1, 1))
    async with open_relay(limits=limits) as relay:
        with monkeypatch.context() as patched:
            patched.setattr(Visits, "admit", admit_and_end)
            assert await relay.ask(b"LOAD\n") == b""
        assert await relay.ask(b"LOAD\n")


@pytest.mark.parametrize("which", ["dialler", "machine"])
async def test_a_reset_of_either_end_resets_the_other(which: str) -> None:
    async with open_relay() as relay, standing(relay) as here:
        async with relay.dial(connect(here.identity.peer_id)) as dialler:
            _, token, _ = await here.told.get()
            async with relay.dial(f"TAKE {token}\n".encode()) as machine:
                assert await accepted(dialler[0])
                broken, left = (dialler, machine) if which == "dialler" else (machine, dialler)
                sock = broken[1].get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                broken[1].transport.abort()
                with pytest.raises(ConnectionResetError):
                    await left[0].read()
        assert relay.server.load.circuits == 0


async def test_nobody_is_led_to_who_is_not_here_and_the_relay_is_no_open_proxy() -> None:
    async with open_relay() as relay:
        for peer in (Identity.ephemeral().peer_id, relay.owner.peer_id):
            assert (await relay.ask(connect(peer))).startswith(b"HTTP/1.1 404 ")
            assert await relay.ask(f"PUNCH {peer} 192.0.2.1:5\n".encode()) == b"NO nobody of that name is here\n"
            assert (await relay.ask(f"CALL {peer} 127.0.0.1:5 {TOKEN}\n".encode())).startswith(b"NO ")
        assert await relay.ask(b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n") == b""
        assert await relay.ask(f"CONNECT localhost:{relay.port} HTTP/1.1\r\n\r\n".encode()) == b""


@pytest.mark.parametrize(
    "opening",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"A" * 600,
        b"HERE Qm\n",
        b"TAKE " + b"0" * 32 + b"\n",
        b"CONNECT Qm\x1b[2J:1 HTTP/1.1\r\n\r\n",
        connect(Identity.ephemeral().peer_id)[:-2] + b"A: b\r\n" * 800,
    ],
)
async def test_odd_openings_are_closed_at_once_and_logged_plainly(
    opening: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_relay() as relay:
        async with relay.dial(opening) as (reader, writer):
            writer.write_eof()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        assert all(record.getMessage().isprintable() for record in caplog.records)
        assert relay.server.load.circuits == 0


async def test_a_slow_opening_ends_in_time_and_so_does_an_endless_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "OPENING_S", 0.2)
    async with open_relay() as relay:
        assert await relay.ask(b"CONN") == b""
        assert await relay.ask(f"HERE {Identity.ephemeral().peer_id}\n".encode()) != b"", "asked to prove, and closed"
        async with relay.dial(connect(relay.owner.peer_id)[:-2]) as (reader, _):
            assert await reader.read() == b""


async def test_a_name_belongs_to_who_proves_it_and_the_newest_counts() -> None:
    me, squatter = Identity.ephemeral(), Identity.ephemeral()
    async with open_relay() as relay, standing(relay, me) as first:
        async with relay.dial(f"HERE {me.peer_id}\n".encode()) as (reader, writer):
            _, _, nonce = (await reader.readline()).decode().split()
            key, signature = prove_presence(squatter, relay.owner.peer_id, bytes.fromhex(nonce))
            writer.write(f"PROOF {key} {signature}\n".encode())
            assert (await reader.readline()).startswith(b"NO ")
        assert not first.gone.is_set(), "a squatter does not push out whom it plays"
        async with standing(relay, me) as second:
            await asyncio.wait_for(first.gone.wait(), 10)
            assert relay.server.load.machines == 1
            async with relay.dial(connect(me.peer_id)):
                assert (await second.told.get())[0] == "OPEN"
            assert first.told.empty()


async def test_a_proof_cannot_be_used_again() -> None:
    me = Identity.ephemeral()
    async with open_relay() as relay, relay.dial(f"HERE {me.peer_id}\n".encode()) as (reader, writer):
        _, _, nonce = (await reader.readline()).decode().split()
        proof = "PROOF {} {}\n".format(*prove_presence(me, relay.owner.peer_id, bytes.fromhex(nonce))).encode()
        writer.write(proof)
        assert (await reader.readline()).startswith(b"OK 127.0.0.1:")
        async with relay.dial(f"HERE {me.peer_id}\n".encode() + proof) as (again, _):
            await again.readline()
            assert (await again.readline()).startswith(b"NO ")


async def test_a_private_swarms_relay_carries_members_only() -> None:
    key, other = NetworkKey(bytes(range(32))), NetworkKey(bytes(32))
    async with open_relay() as relay:
        relay.server.keep_to(key.presence)
        for members, answer in ((b"", "NO"), (other.presence, "NO"), (key.presence, "OK")):
            me = Identity.ephemeral()
            async with relay.dial(f"HERE {me.peer_id}\n".encode()) as (reader, writer):
                _, _, nonce = (await reader.readline()).decode().split()
                proof = prove_presence(me, relay.owner.peer_id, bytes.fromhex(nonce) + members)
                writer.write("PROOF {} {}\n".format(*proof).encode())
                assert (await reader.readline()).decode().startswith(f"{answer} ")


async def test_a_silent_machine_is_gone_and_so_is_one_that_babbles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PING_S", 0.05)
    monkeypatch.setattr(server, "DEAD_S", 0.3)
    async with open_relay() as relay:
        async with relay.dial() as ends:
            assert (await claim(relay, ends, Identity.ephemeral()))[0] == "OK"
            said = await asyncio.wait_for(ends[0].read(), 10)
            assert set(said.splitlines()) == {b"PING"}
        async with relay.dial() as ends:
            assert (await claim(relay, ends, Identity.ephemeral()))[0] == "OK"
            ends[1].write(b"PONG\n" * 100)
            with suppress(ConnectionResetError):
                await asyncio.wait_for(ends[0].read(), 10)
        async with standing(relay) as here:
            for _ in range(9):  # for longer than a silent one may stay
                await asyncio.wait_for(here.pings.get(), 10)
            assert not here.gone.is_set()
        assert relay.server.load.machines <= 1


async def test_a_machine_that_does_not_take_is_told_of_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TAKE_S", 0.1)
    async with open_relay() as relay, standing(relay) as here:
        assert (await relay.ask(connect(here.identity.peer_id))).startswith(b"HTTP/1.1 504 ")
        _, token, _ = await here.told.get()
        assert await relay.ask(f"TAKE {token}\n".encode()) == b"", "too late"
        assert (await relay.ask(f"PUNCH {here.identity.peer_id} 127.0.0.1:5\n".encode())).startswith(b"NO ")
        assert relay.server.load.circuits == 0


async def test_a_hole_is_agreed_on_over_a_small_and_short_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MEETING_BYTES", 1_000)
    async with open_relay() as relay, standing(relay) as here:
        addresses = "127.0.0.1:5,192.0.2.7:6"
        async with relay.dial(f"PUNCH {here.identity.peer_id} {addresses}\n".encode()) as (reader, writer):
            verb, token, told = await here.told.get()
            assert (verb, told) == ("PUNCH", addresses), "the machine decides what to make of them"
            async with relay.dial(f"TAKE {token}\n".encode()) as (back, forth):
                host, port = forth.get_extra_info("sockname")
                assert await reader.readline() == f"OK {host}:{port}\n".encode(), "whence the machine comes"
                forth.write(b"198.51.100.1:7\n")
                assert await reader.readline() == b"198.51.100.1:7\n"
                writer.write(bytes(2_000))
                with suppress(ConnectionResetError):
                    assert len(await back.read()) <= 2_000
                assert relay.server.load.circuits == 0


async def test_whoever_wants_a_hole_or_a_call_comes_from_where_it_says() -> None:
    """So a machine is sent to nobody but who asks, and knows whether that is somebody in its own home."""
    async with open_relay() as relay, standing(relay) as here:
        for said in ("192.0.2.1:5", "192.0.2.1:5,127.0.0.1:6", "[::1]:5"):
            assert (await relay.ask(f"PUNCH {here.identity.peer_id} {said}\n".encode())).startswith(b"NO ")
        assert here.told.empty()


async def test_a_meeting_ends_whatever_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.02)
    now = [0.0]
    async with (
        open_relay(clock=lambda: now[0]) as relay,
        standing(relay) as here,
        relay.dial(f"PUNCH {here.identity.peer_id} 127.0.0.1:5\n".encode()) as (reader, _),
    ):
        _, token, _ = await here.told.get()
        async with relay.dial(f"TAKE {token}\n".encode()):
            assert (await reader.readline()).startswith(b"OK ")
            now[0] = 31.0
            assert await reader.read() == b""


async def test_an_idle_circuit_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.02)
    now = [0.0]
    async with (
        open_relay(clock=lambda: now[0]) as relay,
        serving(relay, echo) as here,
        relay.dial(connect(here.identity.peer_id)) as (reader, writer),
    ):
        assert await accepted(reader)
        now[0] = 59.0
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        now[0] = 118.0
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        now[0] = 179.0
        assert await reader.read() == b""


async def test_a_machine_is_asked_to_call_nobody_but_who_asks() -> None:
    async with open_relay() as relay, standing(relay) as here:
        peer = here.identity.peer_id
        assert await relay.ask(f"CALL {peer} {STRANGER}:5 {TOKEN}\n".encode(), STRANGER) == b"OK\n"
        assert await here.told.get() == ["CALL", TOKEN, f"{STRANGER}:5"]
        for victim in ("192.0.2.1:5", f"{OTHER}:5", "[::1]:5"):
            assert (await relay.ask(f"CALL {peer} {victim} {TOKEN}\n".encode(), STRANGER)).startswith(b"NO ")
        assert here.told.empty()


async def test_seen_tells_the_address_and_holds_the_connection() -> None:
    async with open_relay() as relay, relay.dial(b"SEEN\r\n", STRANGER) as (reader, writer):
        assert await reader.readline() == "SEEN {}:{}\n".format(*writer.get_extra_info("sockname")).encode()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.1)


async def test_it_proves_whose_it_is_and_not_too_often(counted_alike: None) -> None:
    nonce = secrets.token_bytes(16)
    async with open_relay() as relay:
        answers = [await relay.ask(who_question(nonce)) for _ in range(7)]
        assert all(check_who(relay.owner.peer_id, nonce, answer) for answer in answers[:6])
        assert answers[6] == b""
        assert not check_who(Identity.ephemeral().peer_id, nonce, answers[0])
        assert not check_who(relay.owner.peer_id, bytes(16), answers[0])


async def test_slow_openings_of_one_address_shut_nobody_out(counted_alike: None) -> None:
    limits = RelayLimits(openings=HoldingLimit(4, 4))
    async with open_relay(limits=limits) as relay, AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(relay.dial(b"CONN", STRANGER))
        async with relay.dial(b"", STRANGER) as (reader, _):
            with suppress(ConnectionResetError):
                assert await reader.read() == b"", "a fifth of the same address is refused"
        assert (await relay.ask(b"LOAD\n", OTHER)).startswith(b"LOAD 0 "), "the heaviest gives way"


async def test_a_flood_of_connections_costs_its_address_alone(counted_alike: None) -> None:
    limits = RelayLimits(new=RateLimit(0.001, 5.0, 100.0, 100.0))
    async with open_relay(limits=limits) as relay:
        answers = []
        for _ in range(8):
            with suppress(ConnectionResetError):
                answers.append(await relay.ask(b"LOAD\n", STRANGER))
        assert sum(answer.startswith(b"LOAD") for answer in answers) == 5
        assert (await relay.ask(b"LOAD\n", OTHER)).startswith(b"LOAD")


async def test_names_are_shared_among_addresses(counted_alike: None) -> None:
    limits = RelayLimits(names=HoldingLimit(2, 3))
    async with open_relay(limits=limits) as relay, AsyncExitStack() as stack:

        async def stand(source: str) -> Standing:
            return await stack.enter_async_context(standing(relay, source=source))

        _, newest = await stand(STRANGER), await stand(STRANGER)
        async with relay.dial(source=STRANGER) as ends:
            assert (await claim(relay, ends, Identity.ephemeral()))[0] == "NO"
        await stand(OTHER)
        await stand("127.0.0.68")
        await asyncio.wait_for(newest.gone.wait(), 10)
        assert relay.server.load.machines == 3, "one of the stranger's two gave way"
        async with relay.dial(source="127.0.0.69") as ends:
            assert (await claim(relay, ends, Identity.ephemeral()))[0] == "NO", "all have one: nobody gives way"


async def test_hoarded_circuits_give_way_to_who_has_none(counted_alike: None) -> None:
    limits = RelayLimits(circuits=HoldingLimit(3, 4), machine_circuits=3)
    async with open_relay(limits=limits) as relay, AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving(relay, echo))
        two = await stack.enter_async_context(serving(relay, echo))

        async def dial(peer: str, source: str) -> tuple[bytes, asyncio.StreamReader]:
            reader, _ = await stack.enter_async_context(relay.dial(connect(peer), source))
            return await reader.readuntil(b"\r\n\r\n"), reader

        hoarded = [await dial(one.identity.peer_id, STRANGER) for _ in range(3)]
        assert all(head.startswith(b"HTTP/1.1 200 ") for head, _ in hoarded)
        assert (await dial(two.identity.peer_id, STRANGER))[0].startswith(b"HTTP/1.1 429 "), "its own limit"
        assert (await dial(one.identity.peer_id, OTHER))[0].startswith(b"HTTP/1.1 200 "), "the machine was full"
        assert await hoarded[2][1].read() == b"", "the newest of the hoarder's went"
        assert (await dial(two.identity.peer_id, OTHER))[0].startswith(b"HTTP/1.1 200 ")
        assert (await dial(two.identity.peer_id, OTHER))[0].startswith(b"HTTP/1.1 429 "), "nobody has more than it"
        assert relay.server.load.circuits == 4


async def test_what_one_machine_is_told_is_limited() -> None:
    limits = RelayLimits(summons=RateLimit(0.001, 2.0, 100.0, 100.0))
    async with open_relay(limits=limits) as relay, standing(relay) as here, standing(relay) as other:
        for _ in range(2):
            assert await relay.ask(f"CALL {here.identity.peer_id} 127.0.0.1:5 {TOKEN}\n".encode()) == b"OK\n"
        assert (await relay.ask(connect(here.identity.peer_id))).startswith(b"HTTP/1.1 429 ")
        assert await relay.ask(f"CALL {other.identity.peer_id} 127.0.0.1:5 {TOKEN}\n".encode()) == b"OK\n"


async def test_no_dialler_uses_up_what_a_machine_is_told() -> None:
    """Neither by asking without end, nor by asking for what is refused."""
    limits = RelayLimits(summons=RateLimit(0.001, 8.0, 100.0, 100.0), own_summons=RateLimit(0.001, 4.0, 100.0, 100.0))
    async with open_relay(limits=limits) as relay, standing(relay) as here:
        for _ in range(20):
            call = f"CALL {here.identity.peer_id} 192.0.2.1:5 {TOKEN}\n".encode()
            assert (await relay.ask(call, STRANGER)).startswith(b"NO a machine is led to nobody but who asks")
        told = [
            await relay.ask(f"CALL {here.identity.peer_id} {STRANGER}:5 {TOKEN}\n".encode(), STRANGER)
            for _ in range(20)
        ]
        assert told.count(b"OK\n") == 4
        assert told[-1] == b"NO you want that machine too often\n"
        assert await relay.ask(f"CALL {here.identity.peer_id} 127.0.0.1:5 {TOKEN}\n".encode()) == b"OK\n"


async def test_a_machine_that_reads_nothing_does_not_fill_the_relay() -> None:
    """It takes from a sender no more than it can pass on: what the system's buffers hold, and one of its own."""
    async with (
        open_relay() as relay,
        standing(relay) as here,
        relay.dial(connect(here.identity.peer_id)) as (reader, writer),
    ):
        _, token, _ = await here.told.get()
        async with relay.dial(f"TAKE {token}\n".encode()) as (back, _):
            assert await accepted(reader)
            back._transport.pause_reading()  # type: ignore[attr-defined]
            sent, piece = 0, bytes(1 << 16)
            writer.transport.set_write_buffer_limits(high=1 << 16)
            with suppress(TimeoutError):
                while sent < 64 << 20:
                    writer.write(piece)
                    await asyncio.wait_for(writer.drain(), 0.3)
                    sent += len(piece)
            assert sent < 40 << 20, "the sender was held up"
            back._transport.resume_reading()  # type: ignore[attr-defined]
            got = 0
            while got < sent:
                got += len(await back.read(1 << 20))


async def test_64_mib_go_through_whole_with_bounded_memory() -> None:
    pattern, size = secrets.token_bytes(1 << 20), 64 << 20
    async with (
        open_relay() as relay,
        standing(relay) as here,
        relay.dial(connect(here.identity.peer_id)) as (reader, writer),
    ):
        _, token, _ = await here.told.get()
        async with relay.dial(f"TAKE {token}\n".encode()) as (back, _), asyncio.TaskGroup() as tasks:
            assert await accepted(reader)
            tracemalloc.start()

            async def send() -> None:
                for _ in range(size // len(pattern)):
                    writer.write(pattern)
                    await writer.drain()
                writer.write_eof()

            tasks.create_task(send())
            position = 0
            while data := await back.read(1 << 18):
                start = position % len(pattern)
                whole = pattern[start : start + len(data)]
                assert data[: len(whole)] == whole
                assert data[len(whole) :] == pattern[: len(data) - len(whole)]
                position += len(data)
            assert position == size
            relays = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/swarm/reach/relay/*")])
            tracemalloc.stop()
            assert sum(trace.size for trace in relays.traces) < 1 << 20
