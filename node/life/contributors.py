"""Reads a health page's list of contributors, whose sessions the node then gives more turns than a stranger's.

`node serve --prefer-contributors URL` reads the list every ten minutes. Whatever that service does, the node serves on:
an answer that is none, too large or late changes nothing, and a list that was not renewed for an hour is forgotten.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import httpx2

from swarm.base.errors import RegistryError
from swarm.base.ids import PeerId
from swarm.base.logs import CountedLog, describe
from swarm.protocol.peer_keys import is_peer_id

READ_S: Final = 600.0
FORGET_S: Final = 3_600.0
ANSWER_S: Final = 30.0
MAX_ANSWER_BYTES: Final = 256 << 10
MAX_CONTRIBUTORS: Final = 1_000
LEAST_SHARES, MOST_SHARES = 2, 6
"""Of a contributor; a stranger has one, and whom the operator prefers has eight."""

logger = logging.getLogger(__name__)


def shares_of(answer: bytes) -> dict[PeerId, int]:
    """How many shares each contributor has: 2 to 6, by its part of what the first one contributed.

    Raises:
        ValueError: it is no list of contributors.
    """
    try:
        rows = json.loads(answer)["contributors"]
        found = {str(row["peer"]): row["layer_tokens"] for row in rows[:MAX_CONTRIBUTORS]}
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is no list of contributors ({type(error).__name__})") from None
    if not all(is_peer_id(peer) and type(tokens) is int and tokens > 0 for peer, tokens in found.items()):
        raise ValueError("it lists no peers")
    most = max(found.values(), default=1)
    return {
        PeerId(peer): LEAST_SHARES + (MOST_SHARES - LEAST_SHARES) * tokens // most for peer, tokens in found.items()
    }


class ContributorReader:
    """Keeps what a node knows of contributors."""

    def __init__(self, url: str, put: Callable[[Mapping[PeerId, int]], None]) -> None:
        """Prepare to read a list; nothing is asked for yet.

        Args:
            url: of the list, `https://…/api/v1/contributors`, of a service that the operator trusts.
            put: takes the shares of each contributor, 2 to 6.
        """
        self._url, self._put = url, put
        self._log = CountedLog(logger)
        self._read_s = time.monotonic()

    async def run(self) -> None:
        """Read the list now and then, for ever."""
        while True:
            await self.read()
            await asyncio.sleep(READ_S)

    async def read(self) -> None:
        """Read it once."""
        try:
            async with asyncio.timeout(ANSWER_S):
                shares = shares_of(await self._answer())
        except (RegistryError, httpx2.HTTPError, TimeoutError, ValueError) as error:
            self._log.say("contributors", f"the list of contributors at {self._url} is not read: {describe(error)}")
            if time.monotonic() - self._read_s > FORGET_S:
                self._put({})
            return
        self._read_s = time.monotonic()
        self._put(shares)

    async def _answer(self) -> bytes:
        found = bytearray()
        async with httpx2.AsyncClient() as client, client.stream("GET", self._url) as answer:
            if answer.status_code != httpx2.codes.OK:
                raise RegistryError(f"it answers {answer.status_code}")
            async for piece in answer.aiter_bytes():
                found += piece
                if len(found) > MAX_ANSWER_BYTES:
                    raise RegistryError("its answer does not end")
        return bytes(found)
