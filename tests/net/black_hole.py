"""A port at which connections are neither accepted nor refused, as behind a link that swallows packets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def black_hole(host: str, port: int) -> Iterator[None]:
    """Listen with a queue that is full: the system leaves what else comes unanswered."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket(family))
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect((host, port))
        yield
