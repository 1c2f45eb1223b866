"""Which chain is believed to hold which beginning."""

from __future__ import annotations

import pytest

from client.library import known_prefixes
from client.library.known_prefixes import KnownPrefixes
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.protocol.messages import RouteHop

ONE, OTHER = ((RouteHop(PeerId(peer), Span(0, 4)),) for peer in "ab")


def names(text: str) -> list[bytes]:
    return [text[: end + 1].encode() for end in range(len(text))]


def test_the_longest_beginning_counts_and_the_newest_chain() -> None:
    known = KnownPrefixes()
    assert known.longest(names("abc")) == (0, ())
    known.note(names("abcd"), ONE)
    known.note(names("abxy"), OTHER)
    assert known.longest(names("abcz")) == (3, ONE)
    assert known.longest(names("abz")) == (2, OTHER)
    assert known.longest(names("z")) == (0, ())


def test_the_oldest_texts_and_of_a_text_the_last_blocks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prefixes, "MAX_NAMES", 5)
    known = KnownPrefixes()
    for text in ("abc", "xyz"):
        known.note(names(text), ONE)
    assert (known.longest(names("abc"))[0], known.longest(names("xyz"))[0], len(known)) == (2, 3, 5)
