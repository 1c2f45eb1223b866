"""Processes that do for strangers what may take any time or memory, and can be killed: each call under a lease.

A worker forks workers: what one has read, such as a tokenizer, its forks share. The first of a program is started with
the first need, and imports nothing but what its calls name. The system itself ends a worker whose lease is over, so
nothing that it computes can hold that up; whoever waits sees the end of its socket. When the program ends, so do they.

    program ── call ──▶ worker        one request and one answer at a time: a head of JSON, and bytes
        └──── fork ───▶ worker ──▶ worker, which talks to the program directly
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from swarm.base.errors import SwarmError

_FRAME: Final = struct.Struct("!II")
_PROGRAM: Final = "from swarm.base.workers import serve_first; serve_first()"
_GRACE_S = 5.0
"""What a synchronous call waits beyond its lease, which the system keeps."""
_ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

WorkHead = Mapping[str, Any]
WorkAnswer = tuple[dict[str, Any], bytes]
WorkHandler = Callable[[dict[str, Any], bytes], WorkAnswer]


class WorkerEnded(SwarmError):
    """A worker ended in the middle of a call: mostly because its lease was over."""

    def __init__(self, reason: str = "took more time or memory than it may") -> None:
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class WorkLease:
    """What one call may take.

    Attributes:
        cpu_s: of a processor.
        wall_s: in all; more than `cpu_s`, since other programs want the processor too.
    """

    cpu_s: float
    wall_s: float


class Worker:
    """One worker, as the program sees it. One call at a time; a call that is broken off ends the worker."""

    def __init__(self, link: socket.socket) -> None:
        """Talk over this socket, which is the worker's from now on."""
        self._link = link
        self._is_calling = False

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, or a call found it gone."""
        return self._link.fileno() < 0

    def fork(self, memory_bytes: int, niceness: int = 0) -> Worker:
        """Another worker, which has what this one read. Never waits.

        Args:
            memory_bytes: what it may come to take beyond what this one takes.
            niceness: by how much it makes way for other programs.

        Raises:
            WorkerEnded: this one is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            head = _packed({"fork": {"memory_bytes": memory_bytes, "niceness": niceness}}, b"")
            try:
                socket.send_fds(self._link, [head], [theirs.fileno()])
            except OSError:
                ours.close()
                raise WorkerEnded from None
        return Worker(ours)

    def call(self, handler: str, head: WorkHead, data: bytes = b"", *, lease: WorkLease) -> WorkAnswer:
        """What a handler answers, on the calling thread.

        Args:
            handler: `module:function` of a `WorkHandler`.
            head: what JSON can hold.

        Raises:
            WorkerEnded: it took more than the lease, or broke.
        """
        with self._calling():
            self._link.settimeout(lease.wall_s + _GRACE_S)
            self._link.sendall(_packed(_request(handler, head, lease), data))
            sizes = _FRAME.unpack(_read(self._link, _FRAME.size))
            return _unpacked(_read(self._link, sum(sizes)), sizes)

    async def acall(self, handler: str, head: WorkHead, data: bytes = b"", *, lease: WorkLease) -> WorkAnswer:
        """The same as `call`, beside the event loop; the caller sees to it that calls do not overlap.

        Raises:
            WorkerEnded: it took more than the lease, or broke.
        """
        loop = asyncio.get_running_loop()
        with self._calling():
            self._link.setblocking(False)
            await loop.sock_sendall(self._link, _packed(_request(handler, head, lease), data))
            sizes = _FRAME.unpack(await _aread(self._link, _FRAME.size))
            return _unpacked(await _aread(self._link, sum(sizes)), sizes)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call; one that is broken off ends the worker, whose answer nobody would expect any more."""
        self._is_calling, is_done = True, False
        try:
            yield
            is_done = True
        except OSError:
            raise WorkerEnded from None
        finally:
            self._is_calling = False
            if not is_done:
                self.close()

    def close(self) -> None:
        """Let it end; a call that waits hears of it. Harmless the second time."""
        if not self._is_calling:
            self._link.close()
            return
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)


class _First:
    """The program's first worker, from which all others come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process; None where there is none."""
        return None if self._process is None else self._process.pid

    def fork(self, memory_bytes: int, niceness: int) -> Worker:
        """A fork of it; it is started where there is none yet, or where it was killed.

        Raises:
            OSError: it cannot be started.
            WorkerEnded: it was killed just now.
        """
        with self._lock:
            if self._worker is None or self._process is None or self._process.poll() is not None:
                if self._worker is not None:
                    self._worker.close()
                self._worker = self._start()
            return self._worker.fork(memory_bytes, niceness)

    def _start(self) -> Worker:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(part for part in sys.path if part)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
            )
        return Worker(ours)

    def close(self) -> None:
        with self._lock:
            if self._worker is not None and self._process is not None:
                self._worker.close()
                self._process.wait()
                self._worker = self._process = None


FIRST: Final = _First()
atexit.register(FIRST.close)


def new_worker(memory_bytes: int, niceness: int = 0) -> Worker:
    """A worker that has read nothing yet; arguments as for `Worker.fork`.

    Raises:
        WorkerEnded: none can be started.
    """
    try:
        return FIRST.fork(memory_bytes, niceness)
    except OSError as error:
        raise WorkerEnded(f"cannot be begun: there is no room for another process ({error})") from error


def serve_first() -> None:
    """In the first worker: answer until the program ends."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole group: the program may drain, and ends these then
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    link = socket.socket(fileno=os.dup(0))
    os.close(0)
    while (forked := _serve(link)) is not None:
        link.close()
        link = forked
    os._exit(0)


def _serve(link: socket.socket) -> socket.socket | None:
    """Answer until the other side ends; in a fork, its own socket."""
    while True:
        try:
            sizes, sent = _begin(link)
            head, data = _unpacked(_read(link, sum(sizes)), sizes)
        except OSError:
            return None
        if "fork" not in head:
            link.sendall(_packed(*_answered(head, data)))
            continue
        forked = socket.socket(fileno=sent[0])
        process = -1
        with suppress(OSError):  # no room for another process: the other side sees its socket end
            process = os.fork()
        if process == 0:
            _bound(head["fork"]["memory_bytes"], head["fork"]["niceness"])
            return forked
        forked.close()


def _begin(link: socket.socket) -> tuple[tuple[int, int], list[int]]:
    """The sizes of the next request's parts, and the descriptors that came with it."""
    first, sent, _, _ = socket.recv_fds(link, _FRAME.size, 1)
    if not first:
        raise ConnectionResetError
    head, data = _FRAME.unpack(first + _read(link, _FRAME.size - len(first)))
    return (head, data), sent


def _bound(memory_bytes: int, niceness: int) -> None:
    """What this process may take from now on."""
    import resource

    if niceness:
        os.nice(niceness)
    if sys.platform == "linux":
        with suppress(ValueError, OSError):  # a container may allow less already
            held = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + memory_bytes, held + memory_bytes))


def _answered(head: dict[str, Any], data: bytes) -> WorkAnswer:
    """What a handler answers within its lease; a timer that runs off ends this process, whatever it does."""
    module, _, name = head["handler"].partition(":")
    signal.setitimer(signal.ITIMER_REAL, head["wall_s"])
    signal.setitimer(signal.ITIMER_PROF, head["cpu_s"])
    try:
        handler: WorkHandler = getattr(import_module(module), name)
        return handler(head["head"], data)
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 (whoever asked is told)
        return {"broke": f"{type(error).__name__}: {error}"[:200]}, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _request(handler: str, head: WorkHead, lease: WorkLease) -> WorkHead:
    return {"handler": handler, "head": head, "cpu_s": lease.cpu_s, "wall_s": lease.wall_s}


def _packed(head: WorkHead, data: bytes) -> bytes:
    said = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((_FRAME.pack(len(said), len(data)), said, data))


def _unpacked(body: bytes, sizes: tuple[int, ...]) -> WorkAnswer:
    head: dict[str, Any] = json.loads(body[: sizes[0]])
    if "broke" in head:
        raise WorkerEnded(f"could not be done ({head['broke']})")
    return head, body[sizes[0] :]


def _read(link: socket.socket, size: int) -> bytes:
    """So many bytes.

    Raises:
        OSError: the other side ended before.
    """
    found = bytearray()
    while len(found) < size:
        part = link.recv(size - len(found))
        if not part:
            raise ConnectionResetError
        found += part
    return bytes(found)


async def _aread(link: socket.socket, size: int) -> bytes:
    """As `_read`, beside the event loop."""
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < size:
        part = await loop.sock_recv(link, size - len(found))
        if not part:
            raise ConnectionResetError
        found += part
    return bytes(found)
