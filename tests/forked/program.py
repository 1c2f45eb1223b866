"""Programs that are forked of a process with the libraries imported, and otherwise are what `subprocess` starts."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from tests.leftovers import SERVERS

LIBRARIES = (
    *("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "scipy.optimize"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama", "safetensors.torch"),
    *("tyro", "rich.console", "cryptography.x509", "zeroconf", "prometheus_client", "aiomqtt", "llguidance"),
)
"""What a node and a client import, and take seconds for. gRPC is not among them: who uses it must not be forked."""
FREE = (
    *("CANOPY_", "GRPC_", "HIVEMIND_", "PYTEST_", "XDG_CONFIG_", "XDG_DATA_", "XDG_STATE_"),
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it, wherever it is imported
)
"""Beginnings of the variables that none of them reads."""
START_S = 100.0
SMALL_PARTS_NODE = "tests.e2e.swarm.models.small_parts_node"
FORKED = (
    *("node.cli", "client.cli", "benchmarks.emulation.homes_client"),
    *(SMALL_PARTS_NODE, SCRIPT := "canopy_script"),
)
"""Modules that import them anyhow, a test's own script among them. Others start as usual: some must stay small."""
CACHE = tempfile.TemporaryDirectory(prefix="canopy-cache-")
"""Where programs keep what they learn about drafts, in place of the user's cache."""
AS_USUAL = dict(os.environ)
_SET_CHILD_SUBREAPER = 36


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of programs: one thread each, since several share few cores."""
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": CACHE.name}


class Request(TypedDict):
    """What a server is asked to run.

    Attributes:
        module: as `python -m` takes it.
        arguments: its own.
        environment: all variables.
        cwd: the folder that it runs in.
        start_new_session: whether it leads a session of its own.
        namespaces: the files of the namespaces that it enters, which are of networks or mounts.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    start_new_session: bool
    namespaces: list[str]


class ForkServer:
    """A process that has imported libraries under an environment, and the connection to it."""

    def __init__(self, libraries: Sequence[str], environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(START_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked.server", str(theirs.fileno()), *libraries],
                pass_fds=[theirs.fileno()],
                env=self.environment,
                cwd=Path(__file__).parents[2],
            )
        SERVERS.add(self._process.pid)
        assert self._connection.recv(32) == b"ready"

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with that environment would import the same."""
        names = {name for name in {*environment, *self.environment} if not name.startswith(FREE)}
        return all(environment.get(name) == self.environment.get(name) for name in names)

    def fork(self, request: Request, files: Sequence[int]) -> int:
        """Start a program as a child of this process, with standard files; returns its process id."""
        with _taking_over_orphans():
            socket.send_fds(self._connection, [json.dumps(request).encode()], files)
            return int(self._connection.recv(32))

    def close(self) -> None:
        """End the server; its programs go on."""
        self._connection.close()
        self._process.wait(timeout=10)
        SERVERS.discard(self._process.pid)


class ForkedPopen(subprocess.Popen[Any]):
    """A program of a server. It takes `[module, *arguments]` and options of `subprocess.Popen`, `env` among them."""

    def __init__(
        self,
        server: ForkServer,
        arguments: Sequence[str],
        namespaces: Sequence[str] = (),
        **options: Any,  # noqa: ANN401 - as Popen
    ) -> None:
        self._server, self._namespaces = server, list(namespaces)
        super().__init__(arguments, **options)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:  # noqa: ANN401 - as Popen calls it
        executable, before, _, passed, cwd, environment, *_, shell = given[:9]
        ends, start_new_session = given[9:15], given[20]
        assert (executable, before, passed, shell) == (None, None, (), False), "such programs are not forked"
        module, *arguments = args
        request = Request(
            module=module,
            arguments=arguments,
            environment=dict(environment),
            cwd=str(cwd or os.getcwd()),
            start_new_session=start_new_session,
            namespaces=self._namespaces,
        )
        theirs = [end if end != -1 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        try:
            self.pid = self._server.fork(request, theirs)
            self._child_created = True
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


@cache
def shared_server() -> ForkServer:
    """The server of this process for nodes and clients, which ends with it."""
    server = ForkServer(LIBRARIES, environment(AS_USUAL))
    atexit.register(server.close)
    return server


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:  # noqa: ANN401 - as Popen
    """Run a module with arguments: one of `FORKED` from the shared server, if its environment allows that."""
    given = environment(os.environ)
    if arguments[0] in FORKED and shared_server().suits(given):
        return ForkedPopen(shared_server(), arguments, env=given, **options)
    return subprocess.Popen([sys.executable, "-m", *arguments], env=given, **options)


@contextmanager
def _taking_over_orphans() -> Iterator[None]:
    """Meanwhile this process becomes the parent of those of its descendants whose parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        assert libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
