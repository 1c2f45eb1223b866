"""A forked program is what a started one is, but for the libraries that it need not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from tests.forked.program import ForkedPopen, ForkServer, environment
from tests.leftovers import descendants

TELLS = """
import json, os, signal, sys
told = {
    "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(), "path": sys.path[0],
    "cwd": os.getcwd(), "environment": dict(os.environ), "typed": sys.stdin.read(), "parent": os.getppid(),
    "streams": [
        [s.encoding, s.errors, s.isatty(), s.line_buffering, s.write_through]
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)],
    "files": sorted(os.listdir("/proc/self/fd")), "leads": os.getsid(0) == os.getpid(),
    "ours": sorted(name for name in sys.modules if name.partition(".")[0] in ("swarm", "node", "client")),
}
print(json.dumps(told))
print("a word", file=sys.stderr)
sys.exit(3)
"""
WAITS = "import time\nprint('ready')\ntime.sleep(60)\n"
LIBRARY = "tabnanny"  # that nothing else imports


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer([LIBRARY], environment(os.environ))
    yield server
    server.close()


def write(folder: Path, code: str) -> Path:
    (folder / "canopy_told.py").write_text(code)
    return folder


def test_it_finds_what_a_started_program_finds(server: ForkServer, tmp_path: Path) -> None:
    write(tmp_path, TELLS)
    words = ["canopy_told", "a b", "--c"]
    told = []
    kinds: list[tuple[Callable[..., subprocess.Popen[Any]], list[str]]] = [
        (partial(ForkedPopen, server), words),
        (subprocess.Popen, [sys.executable, "-m", *words]),
    ]
    for kind, arguments in kinds:
        given = {**environment(os.environ), "CANOPY_MODEL": "one"}
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
        with kind(arguments, **pipes, text=True, env=given, cwd=tmp_path, start_new_session=True) as program:
            output, errors = program.communicate("typed", timeout=30)
        assert (program.returncode, errors) == (3, "a word\n")
        told.append(json.loads(output))
    assert told[0] == told[1]
    assert told[0]["parent"] == os.getpid()
    assert told[0]["argv"] == [str(tmp_path / "canopy_told.py"), "a b", "--c"]
    assert told[0]["ours"] == []


def test_its_libraries_are_imported_already(server: ForkServer, tmp_path: Path) -> None:
    write(tmp_path, f"import sys\nprint({LIBRARY!r} in sys.modules)\n")
    with ForkedPopen(server, ["canopy_told"], stdout=PIPE, env=server.environment, cwd=tmp_path) as program:
        assert program.communicate(timeout=30)[0] == b"True\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_the_server_goes_on(server: ForkServer, tmp_path: Path, number: int) -> None:
    write(tmp_path, WAITS)
    for _ in range(2):
        with ForkedPopen(
            server, ["canopy_told"], stdout=PIPE, stderr=PIPE, env=server.environment, cwd=tmp_path
        ) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            assert psutil.Process(program.pid) in descendants()
            program.send_signal(number)
            assert program.wait(timeout=30) == -number


def test_what_a_library_may_have_read_must_be_the_same(server: ForkServer) -> None:
    same = server.environment
    assert server.suits({**same, "CANOPY_MODEL": "one", "GRPC_VERBOSITY": "NONE", "XDG_STATE_HOME": "/other"})
    assert not server.suits({**same, "HF_ENDPOINT": "http://127.0.0.1:1"})
    assert not server.suits({name: value for name, value in same.items() if name != "OMP_NUM_THREADS"})
    assert not server.suits({**same, "XDG_CACHE_HOME": "/other"})
