"""A health page's list of contributors gives them shares of a node, and a bad list changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

import node.life.contributors
from node.life.contributors import ContributorReader, shares_of
from node.model.config import ServeConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from tests.telemetry_messages import identity

A, B, C = (identity(number).peer_id for number in range(3))


def listed(**amounts: object) -> bytes:
    peers = {"a": A, "b": B, "c": C}
    rows = [{"peer": peers.get(name, name), "layer_tokens": amount} for name, amount in amounts.items()]
    return json.dumps({"v": 1, "contributors": rows}).encode()


def test_contributors_have_two_to_six_shares_by_their_part() -> None:
    assert shares_of(listed(a=1_000, b=500, c=1)) == {A: 6, B: 4, C: 2}
    assert shares_of(listed()) == {}


WRONG = [b"", b"[]", b"{}", b'{"contributors": 1}', listed(nobody=1), listed(a=-1), listed(a="many"), listed(a=True)]
WRONG += [b"[" * 200_000, b'{"contributors": ' + b"[" * 100_000, b"null", b"\xff\xfe\x00"]
WRONG += [b'{"contributors": [{"peer": %s, "layer_tokens": 5}]}' % peer for peer in (b"5", b"null", b'["a"]')]


@asynccontextmanager
async def page(answer: bytes, status: str = "200 OK") -> AsyncIterator[str]:
    """A server that answers whatever is asked with this."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_list_is_read_and_whatever_comes_in_its_place_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Mapping[PeerId, int]] = []
    async with page(listed(a=10, b=5)) as url:
        reader = ContributorReader(url, found.append)
        await reader.read()
    await reader.read()  # nobody answers any more
    for answer in (*WRONG, bytes(300 << 10)):
        async with page(answer) as url:
            await ContributorReader(url, found.append).read()
    async with page(listed(a=1), "302 Found") as url:
        await ContributorReader(url, found.append).read()
    assert found == [{A: 6, B: 4}]
    monkeypatch.setattr(node.life.contributors, "FORGET_S", -1.0)
    await reader.read()
    assert found[1:] == [{}], "an old list is forgotten"


@pytest.mark.parametrize("url", ["http://example.org", "ftp://example.org", "example.org", "https://", "http://[::1"])
def test_a_page_that_others_on_the_way_can_change_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--prefer-contributors"):
        _ = ServeConfig(prefer_contributors=url).contributors_url


def test_the_list_lies_below_the_page() -> None:
    for url in ("https://example.org/canopy", "https://example.org/canopy/"):
        found = ServeConfig(prefer_contributors=url).contributors_url
        assert found == "https://example.org/canopy/api/v1/contributors"
    assert ServeConfig().contributors_url is None
