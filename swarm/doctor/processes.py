"""Runs what may hang where it can do no harm: system calls on a thread that nobody waits for, programs with a limit."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

PROGRAM_S: Final = 5.0
MAX_OUTPUT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that ended.

    Attributes:
        status: its exit status; negative where a signal ended it.
        output: standard output, then standard error.
    """

    status: int
    output: str


async def on_thread(call: Callable[[], T]) -> T:
    """The result of a call that may block, such as looking up a name, on a thread that the end never waits for.

    Cancelling gives the result up; the call goes on by itself.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        def once() -> None:
            if not outcome.done():
                act()

        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(once)

    def run() -> None:
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
            failure = error  # `error` is gone when the handler ends
            settle(lambda: outcome.set_exception(failure))
        else:
            settle(lambda: outcome.set_result(value))

    threading.Thread(target=run, daemon=True, name="doctor").start()
    return await outcome


async def run_program(
    command: Sequence[str], limit_s: float = PROGRAM_S, environment: Mapping[str, str] | None = None
) -> Ran | None:
    """Run a program without input.

    Args:
        command: its name or path, and its arguments.
        limit_s: seconds after which it is killed.
        environment: None for this process's.

    Returns:
        How it ended; None if there is no such program, or it took too long.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environment is None else dict(environment),
        )
    except FileNotFoundError:
        return None
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = (output[:MAX_OUTPUT] + b"\n" + errors[:MAX_OUTPUT]).decode(errors="replace").strip()
    return Ran(process.returncode or 0, text)
