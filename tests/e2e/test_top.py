"""`swarm top` as its user meets it: in a real terminal (tmux) against a live service, and as plain text."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.operations import page_states
from benchmarks.operations.page_server import PageServer
from swarm.base.errors import ConfigError, RegistryError, UnknownModel
from swarm.health.top.command import top
from swarm.health.top.options import Top
from tests.e2e.programs import run, within

PATIENCE_S = 40
COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|4[0-7]|9[0-7])[;m]")

in_terminal = pytest.mark.needs_program("tmux", "tmux")


@dataclass(frozen=True, slots=True)
class Terminal:
    """A tmux server of its own with one window."""

    path: Path

    def tmux(self, *arguments: str) -> str:
        """Ask it something."""
        done = subprocess.run(
            ["tmux", "-S", str(self.path), "-f", "/dev/null", *arguments], capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def keys(self, *keys: str) -> None:
        """Press them."""
        self.tmux("send-keys", *keys)

    def shows(self, *wanted: str) -> str:
        """The screen, once it shows all of this."""
        screen = ""

        def found() -> bool:
            nonlocal screen
            screen = self.tmux("capture-pane", "-p")
            return all(one in screen for one in wanted)

        assert within(PATIENCE_S, found), f"no {wanted} in\n{screen}"
        return screen


@contextmanager
def terminal(folder: Path, size: tuple[int, int], url: str, environment: str = "NO_COLOR=") -> Iterator[Terminal]:
    """`swarm top` in a terminal of that size."""
    made = Terminal(folder / "tmux")
    bare = (
        "env -u COLUMNS -u LINES"  # which readline sets in the tests' process, and which would count more than the size
    )
    program = shlex.join([sys.executable, "-m", "swarm.cli", "top", "--url", url])
    command = f"{bare} {environment} {program}; echo ended with $?; exec cat"
    start = ["new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), command, ";", "set", "remain-on-exit", "on"]
    made.tmux(*start)
    try:
        yield made
    finally:
        made.tmux("kill-server")


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer(page_states.serving()).running() as server:
        yield server


@in_terminal
def test_a_terminal_shows_the_swarm_live(server: PageServer, tmp_path: Path) -> None:
    before = page_states.serving()
    server.show(before)
    with terminal(tmp_path, (80, 24), server.url, "-u NO_COLOR COLORTERM=") as window:
        window.shows("✓ SERVING  demo-target", "● live", "greenhouse")
        assert COLOUR.search(window.tmux("capture-pane", "-p", "-e")) is not None
        server.show(page_states.broken(at=before["at"] + 1))
        broken = window.shows("✗ BROKEN", "missing: layers 4…7", "offline 4…7")
        assert page_states.JOIN in broken
        window.tmux("resize-window", "-x", "140", "-y", "45")
        window.shows("1 layers", "2 nodes", "4 alerts and events", "nobody serves layers 4…7")
        server.down()
        window.shows("trying again")
        server.show(page_states.later(before, 2))
        window.shows("✓ SERVING", "● live")
        window.keys("q")
        window.shows("ended with 0")


@in_terminal
def test_without_colours_it_says_the_same(server: PageServer, tmp_path: Path) -> None:
    state = page_states.several()
    state["models"][0]["nodes"][0]["name"] = "\x1b[31m[bold]evil"
    server.show(state)
    with terminal(tmp_path, (64, 20), server.url, "NO_COLOR=1") as window:
        window.shows("✗ BROKEN", "�[31m[bold]e", "╎╎╎")
        assert COLOUR.search(window.tmux("capture-pane", "-p", "-e")) is None
        window.keys("Right", "3")
        window.shows("✓ SERVING  Qwen/Qwen3-32B", "one sweep: ")
        window.keys("?")
        window.shows("✗ and ╎ no machine")


def printed(url: str | None, **options: object) -> str:
    """What `--once` prints into a pipe."""
    text = io.StringIO()
    asyncio.run(top(Top(url=url, once=True, **options), Console(file=text, width=240)))  # type: ignore[arg-type]
    return text.getvalue()


def test_once_is_plain_text_for_scripts(server: PageServer) -> None:
    server.show(page_states.several())
    done = run("swarm.cli", "top", "--url", server.url, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert "✗ BROKEN  demo-target" in done.stdout
    assert f"  node serve demo-target --layers 4-8 --join {page_states.JOIN}\n" in done.stdout
    assert "other models: Qwen/Qwen3-32B serving, openai/gpt-oss-120b serving" in done.stdout
    assert "\x1b" not in done.stdout
    assert "SERVING  Qwen/Qwen3-32B" in printed(server.url, model="Qwen")
    with pytest.raises(UnknownModel, match=r"nobody serves 'Llama' there; it has: demo-target \(4e5f17c2a9b0\)"):
        printed(server.url, model="Llama")
    server.show(page_states.crowd(200))
    assert len(printed(server.url).splitlines()) < 100
    server.show(page_states.empty())
    assert "nobody serves a model here yet" in printed(server.url)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that says this to one caller and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)

        def serve() -> None:
            with listening.accept()[0] as caller:
                caller.recv(4_096)
                caller.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            "is no health service: it answers 404 for api/v1/state",
        ),
        (b"HTTP/1.1 301 Moved\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n\r\n", "it answers 301"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", "is no health service of this version"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"v":9}', "is no health service of this version"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no health service answers at"),
        (b"", "no health service answers at"),
    ],
)
def test_a_wrong_server_is_one_clear_line(answer: bytes, said: str) -> None:
    with answering(answer) as url, pytest.raises(RegistryError, match=re.escape(said)) as caught:
        printed(url)
    assert "\n" not in str(caught.value)


def test_a_wrong_address_ends_with_one_line_and_a_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = run("swarm.cli", "top", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"swarm: no health service answers at http://127.0.0.1:{port}/: the connection is refused"
    )
    assert done.stderr.count("\n") == 1


def test_what_cannot_be_is_said(server: PageServer) -> None:
    wrong: list[tuple[Top, str]] = [
        (Top(url="nonsense"), "--url 'nonsense'"),
        (Top(url=server.url, join=("/ip4/127.0.0.1/tcp/1/p2p/x",)), "--url and --join: choose one"),
        (Top(join=("nonsense",)), "nonsense"),
        (Top(url=server.url), "draws on a terminal"),
    ]
    server.show(page_states.serving())
    for command, said in wrong:
        with pytest.raises(ConfigError, match=re.escape(said)):
            asyncio.run(top(command, Console(file=io.StringIO())))
