"""The process behind an emulated network: started, asked, ended. It ends itself when this program does."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.demo.link_shape import Ends
from swarm.errors import ConfigError, SwarmError

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 5.0


class Emulator:
    """One process that answers each line `[number, verb, link, …]` with `[number, {…}]` once it has taken effect."""

    def __init__(self, process: asyncio.subprocess.Process, module: str) -> None:
        self._process = process
        self._module = module
        self._asking = asyncio.Lock()
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str]) -> tuple[Emulator, dict[str, Any]]:
        """Run `python -m module`; the emulator and its first words.

        Raises:
            ConfigError: it says why it cannot.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is this program's, whose end closes the pipe
        )
        emulator = cls(process, module)
        try:
            _, words = await emulator._hear()
            _refuse(words)
        except BaseException:
            await emulator.stop()
            raise
        return emulator, words

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, verb: str, link: Ends, *words: object) -> dict[str, Any]:
        """Have it do something; returns when that has taken effect.

        Raises:
            ConfigError: it says why it cannot.
        """
        assert self._process.stdin is not None, "piped"
        async with self._asking:
            number = next(self._numbers)
            self._process.stdin.write(json.dumps([number, verb, link, *words]).encode() + b"\n")
            answered: int | None = None
            while answered != number:  # the answer to a question that was cancelled may come first
                answered, answer = await self._hear()
        _refuse(answer)
        return answer

    async def stop(self) -> None:
        assert self._process.stdin is not None, "piped"
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _hear(self) -> tuple[int | None, dict[str, Any]]:
        assert self._process.stdout is not None, "piped"
        if line := await self._process.stdout.readline():
            number, answer = json.loads(line)
            return number, answer
        status = await self._process.wait()
        raise SwarmError(f"the network's process ({self._module}) has ended with exit status {status}: start it again")


def _refuse(answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise ConfigError(answer["error"])
