"""Serves the health page with made-up states, to tests or to a browser.

The page's files, any state, history and a live stream come from this process; nothing else runs.

    python -m benchmarks page_server degraded     # or another function of `page_states`; every 2 s something changes
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mimetypes
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from benchmarks.operations import page_states

PAGE = Path(__file__).parents[2] / "swarm" / "health" / "web" / "page"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
START_S = 10
TICK_S = 5.0
"""As often as a service renews a state in which nothing happens."""
TICK = 0.001
"""By how much it then becomes newer: less than the step between two states of a test."""


class PageServer:
    """Serves one state; `show` gives another to everybody who watches, `down` lets every answer fail."""

    def __init__(self, state: page_states.State) -> None:
        self._state, self._ticks = state, 0
        self._text = json.dumps(state)
        self._down = False
        self._readable = asyncio.Event()
        self._readable.set()
        self._readers: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            self._app(), lifespan="off", ws="none", log_level="warning", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)

    @contextlib.contextmanager
    def running(self) -> Iterator[PageServer]:
        """Serve from a thread until the end of the block."""
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="page server")
        thread.start()
        try:
            assert self._started.wait(START_S)
            yield self
        finally:
            self.down()
            self._server.should_exit = True
            thread.join()
            self._socket.close()

    def show(self, state: page_states.State) -> None:
        """Answer with this state from now on, and send it to all readers."""
        self._change(state, down=False)

    def down(self) -> None:
        """End every stream and answer 503 from now on."""
        self._change(self._state, down=True)

    @contextlib.contextmanager
    def history_withheld(self) -> Iterator[None]:
        """Answer no question for history until the end of the block."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._readable.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._readable.set)

    def _change(self, state: page_states.State, down: bool) -> None:
        def change() -> None:
            self._state, self._down, self._ticks = state, down, 0
            self._publish()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(change)

    def _publish(self) -> None:
        self._text = json.dumps({**self._state, "at": self._state["at"] + self._ticks * TICK})
        for reader in self._readers:
            reader.set()

    def _tick(self) -> None:
        """Say it again, a little newer, as the service does: what is not renewed counts as stale."""
        if not self._down:
            self._ticks += 1
            self._publish()
        assert self._loop is not None
        self._loop.call_later(TICK_S, self._tick)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._started.set)
        self._loop.call_later(TICK_S, self._tick)
        await self._server.serve(sockets=[self._socket])

    async def _events(self) -> AsyncIterator[str]:
        changed = asyncio.Event()
        self._readers.add(changed)
        try:
            while not self._down:
                changed.clear()
                yield f"event: state\ndata: {self._text}\n\n"
                await changed.wait()
        finally:
            self._readers.discard(changed)

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        headers = {"Content-Security-Policy": CSP}
        files = {path.name: path for path in PAGE.iterdir()}

        @app.get("/")
        async def index() -> Response:
            return Response(files["index.html"].read_bytes(), headers=headers, media_type="text/html")

        @app.get("/page/{name}")
        async def file(name: str) -> Response:
            if name not in files:
                return Response(status_code=404)
            return Response(files[name].read_bytes(), headers=headers, media_type=mimetypes.guess_type(name)[0])

        @app.get("/api/v1/state")
        async def state() -> Response:
            return Response(self._text, status_code=503 if self._down else 200, media_type="application/json")

        @app.get("/api/v1/history")
        async def history(window: str) -> Response:
            await self._readable.wait()
            return Response(json.dumps(page_states.history(window)), media_type="application/json")

        @app.get("/api/v1/stream")
        async def stream() -> Response:
            if self._down:
                return Response(status_code=503)
            return StreamingResponse(self._events(), media_type="text/event-stream")

        return app


def main() -> None:
    """Serve a named state until Ctrl-C, a little later every two seconds."""
    state = getattr(page_states, sys.argv[1] if len(sys.argv) > 1 else "serving")()
    with PageServer(state).running() as server, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        wait = threading.Event()
        while not wait.wait(2):
            server.show(state := page_states.later(state, 2))


if __name__ == "__main__":
    main()
