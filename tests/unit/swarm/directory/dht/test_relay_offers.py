"""What a peer answers about its relay, and what is made of a stranger's answer."""

from __future__ import annotations

import msgpack
import pytest

from swarm.base.ids import PeerId
from swarm.directory.dht.relay_offers import ASKS_ALL, RelayDesk, parse_offer

PEER = PeerId("QmAsker")


@pytest.mark.parametrize("address", ["192.0.2.7:31338", "[2001:db8::7]:1", "relay.example.org:31338"])
def test_an_offer_is_read_as_it_was_written(address: str) -> None:
    desk = RelayDesk(lambda: 0.0)
    assert parse_offer(desk.answer(PEER)) == ()
    desk.addresses = (address,)
    assert parse_offer(desk.answer(PEER)) == parse_offer(desk.answer(PEER, ASKS_ALL)) == (address,)


def test_who_asks_for_all_gets_both_families_and_an_older_release_the_best() -> None:
    desk = RelayDesk(lambda: 0.0)
    desk.addresses = ("192.0.2.7:31338", "[2001:db8::7]:31338")
    assert parse_offer(desk.answer(PEER, ASKS_ALL)) == desk.addresses
    assert msgpack.unpackb(desk.answer(PEER)) == "192.0.2.7:31338"
    assert msgpack.unpackb(desk.answer(PEER, b"a later question")) == "192.0.2.7:31338"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff",
        msgpack.packb(7),
        msgpack.packb(["192.0.2.7:1", 7]),
        msgpack.packb(["192.0.2.7:1", "peer.via.192.0.2.7:1"]),
        msgpack.packb(["192.0.2.7:1"] * 3),
        msgpack.packb({"192.0.2.7:1": 1}),
        msgpack.packb("no address"),
        msgpack.packb("0.0.0.0:1"),
        msgpack.packb("192.0.2.7:1\n"),
        msgpack.packb("peer.via.192.0.2.7:1"),
        msgpack.packb("a" * 300 + ":1"),
        msgpack.packb(b"\xff\xff"),
        b"\xa3\xff\xff\xff",
    ],
)
def test_a_strangers_nonsense_offers_nothing(answer: bytes) -> None:
    assert parse_offer(answer) == ()


def test_who_asks_too_often_is_told_of_nothing() -> None:
    now = [0.0]
    desk = RelayDesk(lambda: now[0])
    desk.addresses = ("192.0.2.7:1",)
    answers = [parse_offer(desk.answer(PEER)) for _ in range(25)]
    assert answers == [("192.0.2.7:1",)] * 20 + [()] * 5
    strangers = [parse_offer(desk.answer(PeerId(f"peer{number}"))) for number in range(250)]
    assert strangers.count(()) == 70, "200 at once in all"
    now[0] += 4
    assert parse_offer(desk.answer(PEER)) == ("192.0.2.7:1",)
