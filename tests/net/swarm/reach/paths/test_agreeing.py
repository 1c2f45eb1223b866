"""What the two ends of a hole tell each other through a relay, and what they do where the other or the relay lies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Interface

import pytest

from node.life.reach.punch import MAX_AT_A_TIME, PunchAnswerer
from swarm.base.errors import RemoteProtocolError
from swarm.base.tasks import TaskScope
from swarm.directory.identity import Identity
from swarm.link.egress.streams import Streams
from swarm.reach.paths import hole as hole_module
from swarm.reach.paths.hole import OwnAddresses
from swarm.reach.paths.punch import PunchWay
from swarm.reach.paths.way import REMEMBERED_S, SOON_S, NoWay

PEER = Identity.ephemeral().peer_id
TOKEN = "ab" * 16
MEET = f"OK 8.8.8.8:41000\nMEET {TOKEN}".encode()
HOME = OwnAddresses((IPv4Interface("192.168.1.7/24"),))


@dataclass
class LyingRelay:
    """Says to each opening what it is told to say.

    Attributes:
        address: `host:port`.
        seen: its answer to SEEN.
        says: what it says to PUNCH and TAKE, whoever's words they are.
        ends: whether that is all that comes.
        heard: every line that it heard.
    """

    address: str = ""
    seen: str = "127.0.0.1:40000"
    says: bytes = b""
    ends: bool = False
    heard: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = (await reader.readline()).decode()
            self.heard.append(line.strip())
            is_seen = line.startswith("SEEN")
            writer.write(f"SEEN {self.seen}\n".encode() if is_seen else self.says)
            if self.ends and not is_seen:
                writer.write_eof()
            while line := (await reader.readline()).decode():
                self.heard.append(line.strip())
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def lying(relay: LyingRelay) -> AsyncIterator[LyingRelay]:
    """The block ends when everybody has gone."""
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        server = await asyncio.start_server(lambda *ends: group.create_task(relay.answer(*ends)), "127.0.0.1", 0)
        relay.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield relay
        finally:
            server.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_module, "MEET_S", 0.1)


@pytest.fixture
def knocked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where somebody knocked; nothing leaves this machine."""
    found: list[str] = []

    async def note(_hole: object, address: str, _pause_s: float, _greeting: object) -> None:
        found.append(address)

    monkeypatch.setattr(hole_module.Hole, "_knock", note)
    return found


def nobody(_relay: str, _streams: Streams, _dialler: str) -> None:
    raise AssertionError("nothing was opened")


async def test_a_dialler_tells_its_private_addresses_to_no_other_home(knocked: list[str]) -> None:
    """Nor does it knock at what a machine elsewhere calls its private addresses."""
    meet = f"MEET {TOKEN} 192.168.1.9:41000,8.8.8.8:41000"
    relay = LyingRelay(seen="8.8.4.4:40000", says=f"OK 8.8.8.8:41000\n{meet}\n".encode())
    async with lying(relay):
        with pytest.raises(NoWay) as caught:
            await PunchWay(lambda: HOME).open(PEER, relay.address)
    assert caught.value.again_s == REMEMBERED_S
    assert knocked == ["8.8.8.8:41000"]
    assert not [line for line in relay.heard if "192.168" in line]
    assert relay.heard[-1].startswith("NOW ")
    assert relay.heard[-1].endswith(" -")


async def test_in_one_home_they_are_told_and_tried(knocked: list[str]) -> None:
    relay = LyingRelay(
        seen="8.8.4.4:40000", says=f"OK 8.8.4.4:41000\nMEET {TOKEN} 192.168.1.9:41000,10.0.0.1:41000\n".encode()
    )
    async with lying(relay):
        with pytest.raises(NoWay):
            await PunchWay(lambda: HOME).open(PEER, relay.address)
    assert knocked == ["192.168.1.9:41000"]
    assert "192.168.1.7:" in relay.heard[-1]


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (b"", NoWay),
        (b"NO nobody of that name is here\n", NoWay),
        (b"OK 8.8.8.8:41000\n", NoWay),
        (b"OK\n", RemoteProtocolError),
        (b"OK name:1\n", RemoteProtocolError),
        (b"MEET " + b"a" * 5_000 + b"\n", RemoteProtocolError),
        (b"OK 8.8.8.8:41000\nMEET short 8.8.8.8:41000\n", RemoteProtocolError),
        (MEET + b" name:41000\n", RemoteProtocolError),
        (
            MEET + b" " + b",".join([b"8.8.8.8:41000"] * 7) + b"\n",
            RemoteProtocolError,
        ),
        (b"\x1b[2J\xff\n", RemoteProtocolError),
        (b"x" * 200_000, RemoteProtocolError),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, bytes) else value.__name__,
)
async def test_a_dialler_hears_nonsense(says: bytes, error: type[Exception], knocked: list[str]) -> None:
    relay = LyingRelay(seen="8.8.4.4:40000", says=says, ends=True)
    async with lying(relay):
        with pytest.raises(error) as caught:
            await PunchWay(lambda: HOME).open(PEER, relay.address)
    if isinstance(caught.value, NoWay):
        assert caught.value.again_s == SOON_S, "it did not come to an attempt"
    assert not knocked


async def test_a_machine_tells_no_private_address_to_another_home(knocked: list[str]) -> None:
    relay = LyingRelay(seen="8.8.4.4:40000", says=f"NOW {TOKEN} 192.168.1.9:41000,10.0.0.1:41000\n".encode())
    async with lying(relay):
        assert not await PunchAnswerer(nobody, lambda: HOME).answer(
            relay.address, TOKEN, ("8.8.8.8:41000", "192.168.1.1:41000", "8.8.8.8:22")
        )
    assert knocked == ["8.8.8.8:41000"]
    assert not [line for line in relay.heard if "192.168" in line]


async def test_a_machine_in_the_same_home_does(knocked: list[str]) -> None:
    relay = LyingRelay(seen="8.8.4.4:40000", says=f"NOW {TOKEN} 192.168.1.9:41000\n".encode())
    async with lying(relay):
        assert not await PunchAnswerer(nobody, lambda: HOME).answer(relay.address, TOKEN, ("8.8.4.4:41000",))
    assert knocked == ["192.168.1.9:41000", "8.8.4.4:41000"]
    assert [line for line in relay.heard if line.startswith("MEET ") and "192.168.1.7:" in line]


@pytest.mark.parametrize("says", [b"", b"THEN\n", b"NOW\n", b"NOW x -\n", b"x" * 200_000], ids=len)
async def test_a_machine_hears_nonsense(says: bytes, knocked: list[str]) -> None:
    relay = LyingRelay(seen="8.8.4.4:40000", says=says + b"\n", ends=True)
    async with lying(relay):
        assert not await PunchAnswerer(nobody, lambda: HOME).answer(relay.address, TOKEN, ("8.8.8.8:41000",))
    assert not knocked


async def test_a_relay_may_not_have_a_machine_knock_without_end(caplog: pytest.LogCaptureFixture) -> None:
    """Nor may all relays together; a clock that stands still gives nothing back."""
    refused = LyingRelay(seen="8.8.4.4:40000", says=b"NO\n", ends=True)
    answerer = PunchAnswerer(nobody, lambda: HOME, clock=lambda: 0.0)
    async with lying(refused):
        for _ in range(20):
            await answerer.answer(refused.address, TOKEN, ("8.8.8.8:41000",))
    assert refused.heard.count("SEEN") == 16
    assert "more holes than are made" in caplog.text
    for number in range(40):
        await answerer.answer(f"127.0.0.1:{number + 1}", TOKEN, ("8.8.8.8:41000",))
    assert answerer._quota.wait_s("holes", "another relay") > 0


async def test_few_holes_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = 0, asyncio.Event()

    async def wait(*_arguments: object) -> Streams:
        nonlocal begun
        begun += 1
        await may_end.wait()
        raise TimeoutError

    monkeypatch.setattr(PunchAnswerer, "_open", wait)
    answerer = PunchAnswerer(nobody, lambda: HOME)
    async with TaskScope() as scope:

        async def ask(number: int) -> None:
            assert not await answerer.answer(f"8.8.8.8:{number}", TOKEN, ("8.8.8.8:41000",))

        asking = [scope.spawn(ask(number + 1)) for number in range(2 * MAX_AT_A_TIME)]
        await asyncio.wait(asking[MAX_AT_A_TIME:])
        assert begun == MAX_AT_A_TIME
        may_end.set()
        await asyncio.wait(asking)
