"""A process that has imported the libraries of a node and of a client. Programs are forked of it, which saves seconds.

It has one thread, and nothing of Canopy's. A request is a JSON object with standard input, output and error beside it;
the answer is the process id of the program, whose parent is whoever asked: a process that takes over orphans.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.forked.program import Request

MAX_REQUEST_BYTES = 1 << 18


def serve(connection: socket.socket) -> Request:
    """Fork a program per request. Returns in the program, with what it is to run; the server itself ends here.

    Args:
        connection: a datagram socket; the server ends when its peer closes.
    """
    while True:
        asked, files, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        if not asked:
            sys.exit(0)
        assert threading.active_count() == 1, threading.enumerate()
        request: Request = json.loads(asked)
        reading, writing = os.pipe()
        if (middle := os.fork()) == 0:
            parent = os.getpid()
            if (program := os.fork()) != 0:
                os.write(writing, str(program).encode())
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.0005)  # it ends at once, and then the asker is the parent
            for own in (reading, writing):
                os.close(own)
            connection.close()
            enter(request, files)
            return request
        for file in (writing, *files):
            os.close(file)
        os.waitpid(middle, 0)  # from here on the program is the asker's child
        connection.send(os.read(reading, 32))
        os.close(reading)


def enter(request: Request, files: list[int]) -> None:
    """Make this process what a program finds that was started as usual: files, folder, environment, session."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    namespaces = [open(file, "rb") for file in request["namespaces"]]  # noqa: SIM115 - other mounts may not show them
    for namespace in namespaces:
        assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, ctypes.get_errno()
        namespace.close()
    os.chdir(request["cwd"])
    if request["start_new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = os.getcwd()
    sys.argv = ["", *request["arguments"]]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _text(number, "w" if number else "r", getattr(sys, name))
        for one in (name, f"__{name}__"):
            setattr(sys, one, stream)


def _text(number: int, mode: str, like: Any) -> io.TextIOWrapper:  # noqa: ANN401 - a standard stream
    """A standard stream as Python makes it where PYTHONUNBUFFERED is set."""
    raw: Any = open(number, f"{mode}b", buffering=0 if mode == "w" else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, like.encoding, like.errors, write_through=True, line_buffering=raw.isatty())


def main() -> None:
    """Import what the command line names, and serve the socket whose number it begins with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the programs get it too, and end by themselves
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a program would copy the memory that it shares
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.send(b"ready")
        request = serve(connection)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
