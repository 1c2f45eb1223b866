"""Canopy's programs as a user starts them, for the end-to-end tests."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import grpc
import psutil

from swarm.alive import shown_certificate
from swarm.link.certificate import name_of
from swarm.link.dial import pin
from swarm.protocol import wire
from swarm.protocol.messages import NodeInfo
from tests.forked import program as forked

START_S = 100
GONE_S = 10
LONG = ("--max-new-tokens", "1500", "--nodes", "0", "--temperature", "1")
"""A client's options for a text that lasts long enough to act on; with speculation it would take 2 s."""
IN_OPEN = 0x20
INOTIFY_EVENT_BYTES = 16


def environment() -> dict[str, str]:
    """The environment of programs that are started now."""
    return forked.environment(os.environ)


@dataclass(frozen=True, slots=True)
class Program:
    """A running program.

    Attributes:
        process: its process.
        log: the file that its output goes to.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, pattern: str) -> str:
        """The first match in its output; fails with the output if the program ends or none comes in `START_S`."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if found := re.search(pattern, self.log.read_text()):
                return found[0]
            if ended:
                break
            time.sleep(0.05)  # a log file has no event to wait for
        raise AssertionError(f"no {pattern!r} in the output:\n{self.log.read_text()}")

    def type(self, text: str) -> None:
        """Write to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def tree(self) -> list[psutil.Process]:
        """The program and all its descendants."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def end(self, number: int) -> tuple[int, list[psutil.Process]]:
        """Send a signal; the exit status, and what is left of it after `GONE_S`."""
        members = self.tree()
        self.process.send_signal(number)
        status = self.process.wait(timeout=GONE_S)
        return status, psutil.wait_procs(members, timeout=GONE_S)[1]


@contextmanager
def program(arguments: Sequence[str], log: Path, folder: Path | None = None) -> Iterator[Program]:
    """Run one of Canopy's programs by its module, such as `["node.cli", "serve", …]`, in a folder."""
    with log.open("wb") as output:
        process = forked.start(arguments, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    running = Program(process, log)
    with ended_after(running):
        yield running


@contextmanager
def ended_after(running: Program) -> Iterator[None]:
    """Afterwards the program and all that it started have ended."""
    try:
        yield
    finally:
        if running.process.poll() is None:
            _, left = running.end(signal.SIGTERM)
            assert not left, f"left behind: {left}"
        if running.process.stdin is not None:
            running.process.stdin.close()


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true in time. It polls, since other processes give no event."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@contextmanager
def bootstrap(folder: Path) -> Iterator[str]:
    """A bootstrap peer; yields its address."""
    options = ["--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "bootstrap.key")]
    with program(["swarm.cli", "bootstrap", *options], folder / "bootstrap.log") as peer:
        yield peer.wait_for(r"/ip4/\S+")


def serve(model: Path | str, layers: str, peer: str, folder: Path) -> list[str]:
    """The arguments of `node serve` on loopback."""
    options = ["--layers", layers, "--join", peer, "--host", "127.0.0.1", "--threads", "1"]
    return ["node.cli", "serve", str(model), *options, "--identity", str(folder / f"{layers}.key")]


def run(
    *arguments: str, timeout_s: float = 100, folder: Path | None = None, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in a folder; typed: its standard input, None for that of the tests."""
    stdin = None if typed is None else PIPE
    with forked.start(arguments, stdin=stdin, stdout=PIPE, stderr=PIPE, text=True, cwd=folder) as process:
        try:
            output, errors = process.communicate(typed, timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@contextmanager
def opened(file: Path) -> Iterator[Callable[[], int]]:
    """Yields a function that counts how often any program opened a file; inotify sees compiled code too."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(file), IN_OPEN) >= 0

    def count() -> int:
        try:
            return len(os.read(watch, 1 << 16)) // INOTIFY_EVENT_BYTES
        except BlockingIOError:
            return 0

    try:
        yield count
    finally:
        os.close(watch)


def info(address: str) -> NodeInfo:
    """The answer of a node's Info call."""
    host, _, port = address.rpartition(":")
    certificate = shown_certificate(host, int(port))
    credentials, pinned = pin(certificate, name_of(certificate))
    with grpc.secure_channel(address, credentials, pinned) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFO)
        return wire.decode_info(call(b"", timeout=5))
