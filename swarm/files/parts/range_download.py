"""Byte ranges of one file of the hub into its part file: each answer is checked, each piece noted when it is on disk.

    wanted, less what is here ──▶ requests of a GiB at most ──▶ written in place ──▶ noted every 32 MiB

Requests are huggingface_hub's, with its token and its waits where the hub is busy. A broken answer is taken up where it
broke.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import constants
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported where mypy does not look
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
    httpx,
)

from swarm.protocol.manifest import SHA256

if TYPE_CHECKING:
    from swarm.files.parts.byte_ranges import ByteRange, ByteRanges
    from swarm.files.parts.part_file import HubOrigin, PartFile

PIECE_BYTES: Final = 32 << 20
"""Bytes that are noted at a time: a program that is killed loses no more."""
REQUEST_BYTES: Final = 1 << 30
"""Of one request, at most: addresses of file servers are valid for some time only."""
TRIES: Final = 5
"""In a row, of which none brings a byte."""
WAIT_S: Final = 1.0

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_BUSY: Final = (408, 429)


class NoRanges(Exception):
    """The server does not send parts of this file, or not so that they can be trusted. Says why."""


class AnotherFile(Exception):
    """The server has another file under this name than the one whose part this is."""


class RangeDownload:
    """Fetches ranges of one file into its part; used once, by the program that has the part's lock."""

    def __init__(self, url: str, part: PartFile, report: Callable[[int], None] = lambda _: None) -> None:
        """Fetch nothing yet.

        Args:
            url: of the file, at a commit.
            report: called with the bytes that have arrived.
        """
        self._url, self._part, self._report = url, part, report
        self._arrived = 0
        self._etag = ""

    def fetch(self, wanted: ByteRanges, origin: HubOrigin) -> None:
        """Fetch those of these bytes that are not here.

        Args:
            origin: what the file is called on the hub.

        Raises:
            NoRanges: the server sends whole files alone.
            AnotherFile: it has another file now.
            OSError, httpx.HTTPError: bytes cannot be fetched or stored; what has arrived stays.
        """
        self._part.prepare(origin)
        with self._part.data.open("r+b", buffering=0) as data:
            for start, end in wanted.without(self._part.here()):
                for first in range(start, end, REQUEST_BYTES):
                    self._fetch(data, first, min(end, first + REQUEST_BYTES))

    def _fetch(self, data: io.FileIO, start: int, end: int) -> None:
        tries = TRIES
        while start < end:
            before = self._arrived
            failure: Exception = ConnectionError("the answer ends too early")
            try:
                self._stream(data, start, end)
            except httpx.TransportError as error:
                failure = error
            start += self._arrived - before
            tries = TRIES if self._arrived > before else tries - 1
            if start < end and not tries:
                raise failure
            if self._arrived == before:
                time.sleep(WAIT_S)

    def _stream(self, data: io.FileIO, start: int, end: int) -> None:
        """Write what one answer brings; what has come when it breaks is noted too."""
        headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        noted = at = start
        data.seek(start)
        try:
            with http_stream_backoff(
                "GET",
                self._url,
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(),
                retry_on_status_codes=_BUSY,
            ) as response:
                hf_raise_for_status(response)
                self._check(response, (start, end))
                for arrived in response.iter_bytes(constants.DOWNLOAD_CHUNK_SIZE):
                    piece = arrived[: end - at]
                    _write(data, piece)
                    at += len(piece)
                    self._arrived += len(piece)
                    if at - noted >= PIECE_BYTES:
                        noted = self._note(data, noted, at)
                    self._report(self._arrived)
                    if at == end:
                        break
        finally:
            self._note(data, noted, at)

    def _note(self, data: io.FileIO, start: int, end: int) -> int:
        if start < end:
            os.fsync(data.fileno())
            self._part.note([(start, end)])
        return end

    def _check(self, response: Any, asked: ByteRange) -> None:  # noqa: ANN401 - httpx goes by two names
        """Refuse an answer that is no part of this very file, or that others may have changed on the way."""
        answers = [*response.history, response]
        if response.status_code != 206:
            raise NoRanges("the server sends whole files alone")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise NoRanges("the server sends parts in another encoding")
        if not all(_is_protected(answer.url) for answer in answers):
            raise NoRanges("the connection is not protected by TLS, so a part of a file proves nothing")
        sent = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if sent is None or int(sent[1]) != asked[0] or int(sent[2]) >= asked[1]:
            raise NoRanges("the server sends other parts than those asked for")
        if int(sent[3]) != self._part.size_bytes:
            raise AnotherFile
        self._check_version(answers)

    def _check_version(self, answers: list[Any]) -> None:
        """The hub says the file's SHA-256 with each answer; another server's ETag has to stay the same."""
        linked = [_plain(answer.headers.get("X-Linked-Etag", "")) for answer in answers]
        digest = next((one for one in linked if SHA256.fullmatch(one)), None)
        etag = digest or _plain(answers[-1].headers.get("ETag", ""))
        if not etag:
            raise NoRanges("the server does not say which version of the file it sends")
        if digest not in (None, self._part.digest) or (self._etag and etag != self._etag):
            raise AnotherFile
        self._etag = etag


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _is_protected(url: Any) -> bool:  # noqa: ANN401 - httpx goes by two names
    if url.scheme == "https" or url.host == "localhost":
        return True
    try:
        return ip_address(url.host).is_loopback
    except ValueError:
        return False


def _write(data: io.FileIO, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[data.write(rest) :]
