"""Whom a node dials on a client's word: who is listed, where it may, and few new ones a minute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, cast

import pytest

import node.life.successors
import swarm.directory.sealing
from node.life.successors import Successors, Tried
from node.session.admission import DIALLED, LIMITS, SUCCESSORS, Admission
from swarm.base.errors import RegistryError, Unreachable
from swarm.base.layers import Span
from swarm.directory.dialable import DialPolicy
from swarm.directory.identity import Identity
from swarm.directory.node_record import RECORDS, NodeRecord, seal, unseal
from swarm.link.endpoint import Endpoint
from swarm.protocol import peer_keys
from swarm.protocol.messages import RouteHop
from tests.sample_records import MODEL, sample_record

SPAN = Span(4, 8)
PEERS = [Identity.ephemeral() for _ in range(3)]


def sealed(signer: Identity, address: str = "10.0.0.1:5", sequence: int = 1) -> bytes:
    record = sample_record(signer.peer_id, span=SPAN, address=address, sequence=sequence)
    return seal(record, signer)


class FakeDirectory:
    """Lists some records; counts how often it is asked for a new answer."""

    def __init__(self, records: Iterable[bytes] = ()) -> None:
        self.listed = [unseal(data, time.time()) for data in records]
        self.cached: list[NodeRecord] = []
        self.asked = 0
        self.error: Exception | None = None

    async def records(self, _fingerprint: str, _layers: int, *, within_s: float) -> list[NodeRecord]:
        if within_s < 10:
            self.asked += 1
            if self.error is not None:
                raise self.error
            await asyncio.sleep(0)
            self.cached = self.listed
        return self.cached


class FakeDialer:
    """Notes the addresses."""

    is_member = False

    def __init__(self) -> None:
        self.dialled: list[str] = []

    def channel(self, endpoint: Endpoint, _stuck: object) -> Any:  # noqa: ANN401
        self.dialled.append(endpoint.address)

    def was_cold(self, _endpoint: Endpoint) -> bool:
        return False


def make(directory: FakeDirectory, *, only_public: bool = False) -> tuple[Successors, FakeDialer]:
    dialer, quota = FakeDialer(), Admission().quota
    policy = DialPolicy(only_public)
    return Successors(cast("Any", directory), cast("Any", dialer), policy, MODEL, quota), dialer


def hop(machine: Identity) -> RouteHop:
    return RouteHop(machine.peer_id, SPAN)


async def test_a_signed_record_alone_is_no_reason_to_dial() -> None:
    directory = FakeDirectory([sealed(PEERS[0])])
    successors, dialer = make(directory)
    with pytest.raises(Unreachable):
        await successors.dial(hop(PEERS[1]), [sealed(PEERS[1], "10.0.0.9:22")], Tried("s"))
    assert dialer.dialled == []
    await successors.dial(hop(PEERS[0]), [], Tried("s"))
    assert dialer.dialled == ["10.0.0.1:5"]


async def test_where_the_directory_had_the_machine_lately_it_is_not_asked() -> None:
    """A repair may not wait for it; nor does the directory's being away keep one from going on."""
    directory = FakeDirectory([sealed(PEERS[0])])
    successors, dialer = make(directory)
    successors.note_listed(directory.listed)
    directory.error = RegistryError("it is gone")
    await successors.dial(hop(PEERS[0]), [sealed(PEERS[0], "10.0.0.2:5", 2)], Tried("s"))
    assert (directory.asked, dialer.dialled) == (0, ["10.0.0.2:5"])
    with pytest.raises(Unreachable):
        await successors.dial(hop(PEERS[1]), [sealed(PEERS[1])], Tried("s"))


async def test_a_flood_of_unknown_machines_shares_few_questions() -> None:
    directory = FakeDirectory()
    successors, _ = make(directory)

    async def fails(number: int) -> None:
        with pytest.raises(Unreachable):
            await successors.dial(RouteHop(PEERS[0].peer_id, SPAN), [], Tried(str(number)))

    ask = directory.records
    at = -10.0

    async def cached(fingerprint: str, layers: int, *, within_s: float) -> list[NodeRecord]:
        nonlocal at
        loop = asyncio.get_running_loop()
        if loop.time() - at < within_s:
            return directory.cached
        found = await ask(fingerprint, layers, within_s=0.0)
        at = loop.time()
        return found

    directory.records = cached  # type: ignore[method-assign, assignment]
    await asyncio.gather(*(fails(number) for number in range(200)))
    assert directory.asked <= 3


async def test_a_directory_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.life.successors, "ASK_S", 0.01)
    directory = FakeDirectory()

    async def hang(*_: object, **__: object) -> list[NodeRecord]:
        await asyncio.Event().wait()
        return []

    directory.records = hang  # type: ignore[method-assign]
    successors, _ = make(directory)
    with pytest.raises(Unreachable):
        await successors.dial(hop(PEERS[0]), [], Tried("s"))


async def test_no_private_address_is_called_from_a_public_one() -> None:
    directory = FakeDirectory([sealed(PEERS[0], "169.254.169.254:80"), sealed(PEERS[1], "8.8.8.8:5")])
    successors, dialer = make(directory, only_public=True)
    with pytest.raises(Unreachable):
        await successors.dial(hop(PEERS[0]), [], Tried("s"))
    await successors.dial(hop(PEERS[1]), [], Tried("s"))
    assert dialer.dialled == ["8.8.8.8:5"]


async def test_a_session_tries_few_new_machines_and_comes_back_to_known_ones_freely() -> None:
    directory = FakeDirectory([sealed(PEERS[0])])
    successors, dialer = make(directory)
    tried, burst = Tried("s"), int(LIMITS.rates[SUCCESSORS].burst)
    for _ in range(3 * burst):
        await successors.dial(hop(PEERS[0]), [], tried)
    for number in range(burst):
        with pytest.raises(Unreachable) as caught:
            await successors.dial(RouteHop(cast("Any", f"stranger {number}"), SPAN), [], tried)
    assert "too many" in str(caught.value)
    asked = directory.asked
    with pytest.raises(Unreachable, match="too many"):
        await successors.dial(hop(PEERS[1]), [], tried)
    assert directory.asked == asked
    await successors.dial(hop(PEERS[0]), [], tried)
    assert len(dialer.dialled) == 3 * burst + 1


async def test_many_sessions_of_one_owner_try_no_more_than_one_may() -> None:
    directory = FakeDirectory([sealed(PEERS[0])])
    successors, dialer = make(directory)
    for owner, most in (("9.9.9.9", int(LIMITS.rates[DIALLED].burst)), ("8.8.8.8", 1)):
        dialer.dialled.clear()
        for _ in range(most):
            await successors.dial(hop(PEERS[0]), [], Tried(owner))
        assert len(dialer.dialled) == most
    with pytest.raises(Unreachable, match="too many"):
        await successors.dial(hop(PEERS[0]), [], Tried("9.9.9.9"))


async def test_of_many_records_only_the_successors_is_verified_and_that_once(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = FakeDirectory([sealed(PEERS[0])])
    successors, dialer = make(directory)
    successors.note_listed(directory.listed)
    verified = list[str]()

    def counted(peer: Any, *arguments: Any) -> bool:  # noqa: ANN401
        verified.append(peer)
        return peer_keys.verify(peer, *arguments)

    monkeypatch.setattr(swarm.directory.sealing, "verify", counted)
    records = [sealed(PEERS[1]), sealed(PEERS[2]), sealed(PEERS[0], "10.0.0.3:5", 3), b"garbage"]
    verified.clear()
    RECORDS._opened.cache_clear()
    for _ in range(5):
        await successors.dial(hop(PEERS[0]), records, Tried("s"))
    assert dialer.dialled == ["10.0.0.3:5"] * 5
    assert verified == [PEERS[0].peer_id]
