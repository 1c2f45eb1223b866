"""Streams: what a reader may be behind, what silence says, and how each ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from client.api.context import ApiSettings
from client.api.errors import ApiError, error_body
from client.api.sse import UnreadFrames, json_line, json_lines_response, sse, sse_response
from swarm.base.errors import GenerationInterrupted
from swarm.base.tasks import TaskScope


class Reader:
    """The ASGI side of a client: takes what is sent while it is not stalled."""

    def __init__(self) -> None:
        self.taken = b""
        self.is_over = False
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.took = asyncio.Event()
        self.gate = asyncio.Event()  # opened by the first comment
        self.has_gone = asyncio.Event()

    async def receive(self) -> dict[str, object]:
        await self.has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, object]) -> None:
        await self.may_take.wait()
        body = message.get("body", b"")
        assert isinstance(body, bytes)
        self.taken += body
        if body:
            self.took.set()
        if b": ping" in self.taken:
            self.gate.set()
        self.is_over = message["type"] == "http.response.body" and not message.get("more_body")


class Closed:
    """A run that notes that it was closed."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def close(self) -> None:
        self.ended.set()


def error_frame(error: ApiError) -> bytes:
    return sse(error_body("openai", error))


async def frames(*parts: bytes | Exception | asyncio.Event) -> AsyncGenerator[bytes, None]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        if isinstance(part, asyncio.Event):
            await part.wait()
        else:
            yield part


async def played(*parts: bytes | Exception | asyncio.Event) -> tuple[Reader, Closed]:
    """A stream that was read to its end."""
    reader, run = Reader(), Closed()
    response = sse_response(run, frames(*parts), error_frame, ApiSettings())
    await response({"type": "http"}, reader.receive, reader.send)  # type: ignore[arg-type]
    return reader, run


async def test_a_stream_is_what_its_frames_are() -> None:
    reader, run = await played(sse({"a": "é\u2028"}), sse({}, "end"))
    assert reader.taken.decode() == 'data: {"a":"é\u2028"}\n\nevent: end\ndata: {}\n\n'
    assert (reader.is_over, run.ended.is_set()) == (True, True)


async def test_an_error_is_the_last_frame() -> None:
    reader, _ = await played(sse(1), GenerationInterrupted("the chain broke", "", ()))
    assert reader.taken.startswith(b"data: 1\n\n")
    assert b'"generation_interrupted"' in reader.taken
    assert reader.is_over


async def test_what_nobody_expected_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    reader, _ = await played(sse(1), ValueError("secret"))
    assert b"internal_error" in reader.taken
    assert b"secret" not in reader.taken
    assert "a stream failed" in caplog.text


async def test_a_client_that_goes_away_ends_the_run() -> None:
    reader, run = Reader(), Closed()
    response = sse_response(run, frames(sse(1), asyncio.Event()), error_frame, ApiSettings())
    async with TaskScope() as scope:
        task = scope.spawn(response({"type": "http"}, reader.receive, reader.send))  # type: ignore[arg-type]
        await reader.took.wait()
        reader.has_gone.set()
        await task
    assert run.ended.is_set()
    assert not reader.is_over


async def test_a_run_does_not_wait_for_a_reader_that_stalls() -> None:
    reader, run = Reader(), Closed()
    reader.may_take.clear()
    response = sse_response(run, frames(*[sse(number) for number in range(100)]), error_frame, ApiSettings())
    async with TaskScope() as scope:
        task = scope.spawn(response({"type": "http"}, reader.receive, reader.send))  # type: ignore[arg-type]
        await run.ended.wait()
        reader.may_take.set()
        await task
    assert reader.taken.count(b"data: ") == 100


async def test_a_reader_too_far_behind_is_told_and_pins_nothing() -> None:
    reader, run = Reader(), Closed()
    reader.may_take.clear()
    settings = ApiSettings(max_unread_bytes=100, stalled_s=0.01)
    response = sse_response(run, frames(*[sse("x" * 40)] * 50), error_frame, settings)
    async with TaskScope() as scope:
        task = scope.spawn(response({"type": "http"}, reader.receive, reader.send))  # type: ignore[arg-type]
        await run.ended.wait()
        reader.may_take.set()
        await task
    assert b'"reader_too_slow"' in reader.taken
    assert reader.is_over


async def test_silence_is_bridged_by_comments() -> None:
    reader, settings = Reader(), ApiSettings(keep_alive_s=0.001)
    response = sse_response(Closed(), frames(sse(1), reader.gate, sse(2)), error_frame, settings)
    await response({"type": "http"}, reader.receive, reader.send)  # type: ignore[arg-type]
    assert b": ping\n\n" in reader.taken
    assert reader.taken.endswith(sse(2))


async def test_lines_of_json_have_no_comments() -> None:
    reader, settings = Reader(), ApiSettings(keep_alive_s=0.0)
    response = json_lines_response(Closed(), frames(json_line(1), json_line("é")), error_frame, settings)
    await response({"type": "http"}, reader.receive, reader.send)  # type: ignore[arg-type]
    assert reader.taken.decode() == '1\n"é"\n'


async def test_waits_for_a_reader_add_up() -> None:
    unread = UnreadFrames(10, 0.05)
    await unread.put(b"x" * 10)
    async with TaskScope() as scope:
        scope.spawn(unread.put(b"y" * 10))
        await asyncio.sleep(0)
        assert await unread.get() == b"x" * 10
        assert await unread.get() == b"y" * 10
    await unread.put(b"z" * 10)
    with pytest.raises(ApiError, match="too slowly"):
        await unread.put(b"w")
    assert unread.waited_s >= 0.05


async def test_a_server_that_ends_tells_its_readers() -> None:
    reader, run, settings = Reader(), Closed(), ApiSettings()
    response = sse_response(run, frames(sse(1), asyncio.Event()), error_frame, settings)
    async with TaskScope() as scope:
        task = scope.spawn(response({"type": "http"}, reader.receive, reader.send))  # type: ignore[arg-type]
        await reader.took.wait()
        settings.leaving.set()
        await task
    assert b'"server_leaving"' in reader.taken
    assert (reader.is_over, run.ended.is_set()) == (True, True)
