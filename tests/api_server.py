"""A real HTTP server for a test module: uvicorn on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from swarm.status.http import make_server


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve until the block is left; the value is the base URL without a slash at its end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = make_server(app)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), name="api-server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
