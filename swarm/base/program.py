"""The boundary of every program: whatever ends a command is one line with a way out, and an exit code.

    SwarmError                   its own words                                                 1
    a file that cannot be used   which file, why, and whose it is                              1
    anything else                what failed where, and the file that holds the whole report   1
    a reader that went away      nothing (`swarm status | head`)                               141
    Ctrl-C                       nothing                                                       130

CANOPY_DEBUG=1 prints the stack trace too. Nothing is sent anywhere.
"""

from __future__ import annotations

import errno
import os
import platform
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from swarm.base.errors import SwarmError
from swarm.base.files import foreign_part, replace_file, state_folder, why_unusable
from swarm.base.plain_text import plain, plain_line
from swarm.base.version import VERSION

MAX_WORDS: Final = 300
"""Characters of somebody else's error that the line shows."""
MAX_REPORT: Final = 65_536
"""Characters of a stack trace that are kept: the last ones, which say most."""
INTERRUPTED: Final = 128 + signal.SIGINT
UNREAD: Final = 128 + signal.SIGPIPE
OURS: Final = ("swarm", "node", "client")
READERS: Final = ("swarm.files", "node.model", "client.draft.loading", "client.draft.heads", "client.base.target")
"""Packages and modules of ours that read a model's files: what fails under them is the files' fault, or unknown."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Run a command to its end; the exit code."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # here, where it can be caught: the interpreter's own comes too late
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:
        return _code(error)
    except Exception as error:  # noqa: BLE001 - the boundary
        cause = _cause(error)
        if _nobody_reads() and isinstance(cause, BrokenPipeError):
            return UNREAD
        return _end(program, cause)


def explain(error: Exception) -> str:
    """One line for an error that is none of Canopy's own: what failed, and what to do, but for the report's place."""
    if isinstance(error, OSError) and error.filename is not None:
        return _of_file(error)
    said = plain_line(str(error)).strip()
    shown = f"{type(error).__name__}: {said[:MAX_WORDS]}" if said else type(error).__name__
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({shown}): end other programs, or hold fewer layers (--num-layers)"
    if isinstance(error, ImportError):
        return f"a library cannot be loaded ({shown}): the installation is damaged, and `pip check` says where"
    modules = list(_modules(error))
    library = modules[-1].partition(".")[0] if modules else ""
    place = "" if library in OURS else f" by {library}"
    if any(map(_reads_models, modules)):
        return f"the model's files cannot be read{place} ({shown}): take another file of it, or report this"
    return f"unexpected error, raised{place or ' by Canopy'} ({shown}): please report it"


def report_path(program: str) -> Path:
    """The file of a program's last unexpected error."""
    return state_folder() / f"error-{program}.log"


def _end(program: str, error: Exception) -> int:
    if isinstance(error, SwarmError):
        line = plain_line("; ".join((str(error), *getattr(error, "__notes__", ()))))
    else:
        line = f"{explain(error)}; {_kept(program, error)}"
    if os.environ.get("CANOPY_DEBUG"):
        _say(plain(_trace(error)).rstrip())
    _say(f"{program}: {line}")
    return 1


def _kept(program: str, error: Exception) -> str:
    """Write the report; where it is."""
    path = report_path(program)
    about = f"canopy {VERSION}, Python {platform.python_version()}, {platform.platform()}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (about + plain(_trace(error))).encode())
    except OSError:
        return "CANOPY_DEBUG=1 shows the whole report"
    return f"the whole report: {path}"


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-MAX_REPORT:]


def _of_file(error: OSError) -> str:
    said = plain_line(why_unusable(error))
    if error.errno in _FULL:
        return f"{said}: make room on its disk"
    if isinstance(error, PermissionError) and foreign_part(Path(os.fsdecode(error.filename))) is None:
        return f"{said}: another place, or other permissions, are needed"
    return said


def _cause(error: Exception) -> Exception:
    """What a group of one holds, and Canopy's own error out of a group of several."""
    while isinstance(error, ExceptionGroup):
        error = next((one for one in error.exceptions if isinstance(one, SwarmError)), error.exceptions[0])
    return error


def _modules(error: BaseException) -> Iterator[str]:
    """The modules that were at work when it was raised, outermost first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield str(frame.f_globals.get("__name__", ""))


def _reads_models(module: str) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in READERS)


def _nobody_reads() -> bool:
    """Whether whoever read the output has gone; the rest goes nowhere then, the interpreter's last flush too."""
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a stream without a file
            seen = select.poll()
            seen.register(stream.fileno(), 0)  # errors are told unasked
            if seen.poll(0):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                gone = True
    return gone


def _code(error: SystemExit) -> int:
    if isinstance(error.code, str):
        _say(error.code)
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


def _say(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr)  # noqa: T201 - a program's last words
