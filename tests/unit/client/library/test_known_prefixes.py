"""Which chain is believed to hold which beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.library import known_prefixes
from client.library.known_prefixes import SECRET_BYTES, KnownPrefixes, user_secret
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


def test_a_users_programs_have_one_secret_that_others_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "canopy" / "prefix-secret"
    assert user_secret() == user_secret() == path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not caplog.messages
    path.write_bytes(b"short")
    assert len(user_secret()) == SECRET_BYTES
    assert user_secret() != user_secret()
    assert str(path) in caplog.text
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    assert len(user_secret()) == SECRET_BYTES
