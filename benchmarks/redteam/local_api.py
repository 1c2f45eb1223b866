"""A `client api` over the range's swarm, and the honest caller who asks it while others attack it.

It is a program of the attack's own, so what it computes counts as the attack's. It has two keys, of which one is the
honest caller's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.redteam.attack import Fight
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.errors import RegistryError
from swarm.base.tasks import TaskScope
from swarm.demo import TARGET

HONEST, OTHER = "honest-caller", "other-caller"
"""Keys."""
LONG: Final = "Once upon a time there was an owl who lived in the old oak by the river and " * 4
"""The beginning of the honest caller's prompts: tokens enough that a session which holds them is worth sharing."""
ASKED: Final = {"model": "demo-target", "prompt": LONG, "max_tokens": 12, "temperature": 0.0}
PATIENCE_S: Final = 45.0
TRIES: Final = 60
PAUSE_S: Final = 1.0
"""Between two questions of the honest caller: else it would take a third of the swarm from the range's two users."""
GROWTH_BYTES: Final = 512 << 20
MAX_ANSWER: Final = 4 << 20
NORMAL: Final = ("nice", "-n", "-19")
"""Back to the priority of a user's program, where the system lets an attacker; else it stays where it was."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the status, 0 where nothing did, and the body."""

    status: int
    body: str

    def json(self) -> dict[str, Any]:
        """The body; empty where it is no object."""
        with suppress(ValueError):
            found = json.loads(self.body)
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def text(self) -> str:
        return str(self.json().get("choices", [{}])[0].get("text", ""))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that a kept session held."""
        return int(self.json().get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens", 0))

    @property
    def reason(self) -> str:
        return str(self.json().get("error", {}).get("message", ""))


@dataclass(slots=True)
class LocalApi:
    """The API, as callers see it.

    Attributes:
        address: `host:port`.
        right: the text that the honest caller has to get.
        answers: of the honest caller: how long each took.
    """

    fight: Fight
    program: RunningProgram
    address: str
    right: str = ""
    answers: list[float] = field(default_factory=list)

    def head(self, path: str, *headers: str, key: str = OTHER, host: str = "", length: int | None = None) -> bytes:
        """The head of a request."""
        lines = [f"{'GET' if length is None else 'POST'} {path} HTTP/1.1", f"Host: {host or self.address}", *headers]
        lines += [f"Authorization: Bearer {key}"] if key else []
        lines += [] if length is None else [f"Content-Length: {length}", "Content-Type: application/json"]
        return ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode()

    async def send(self, data: bytes, *, source: str | None = None, limit_s: float = PATIENCE_S) -> Answer:
        """One request on a connection of its own; status 500 is a breach."""
        raw = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(limit_s):
                one = await self.fight.kit.socket(self.address, source)
                with suppress(OSError):  # what is refused early is not read to its end
                    await one.send(data)
                while len(raw) < MAX_ANSWER and (part := await one.reader.read(1 << 16)):
                    raw += part
                one.writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        words = head.split(maxsplit=2)
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        if status == 500:
            self.fight.breach(f"status 500: {body[:200].decode(errors='replace')}")
        self.fight.tally.refused += status >= 400
        return Answer(status, body.decode(errors="replace"))

    async def ask(self, path: str, body: Mapping[str, Any] | bytes, *headers: str, **rest: Any) -> Answer:  # noqa: ANN401
        """Post a body; `rest` is of `head`, and `limit_s`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        limit_s = rest.pop("limit_s", PATIENCE_S)
        self.fight.tally.acts += 1
        return await self.send(self.head(path, *headers, length=len(data), **rest) + data, limit_s=limit_s)

    async def asked_honestly(self) -> Answer:
        """What the honest caller gets, who comes from this machine."""
        data = json.dumps(ASKED).encode()
        head = self.head("/v1/completions", key=HONEST, length=len(data))
        return await self.send(head + data, source="127.0.0.1")

    async def be_honest(self) -> None:
        """The honest caller: the same text again and again, which must be right, and be there in time."""
        while True:
            await asyncio.sleep(PAUSE_S)
            began = time.monotonic()
            answer = await self.asked_honestly()
            self.answers.append(time.monotonic() - began)
            if answer.text != self.right:
                said = answer.reason or answer.text or "nothing"
                self.fight.breach(f"the honest caller of the API gets {answer.status}: {said[:150]}")
                return

    async def stands_still_s(self, acting: asyncio.Future[Any]) -> float:
        """The longest that the API's own page of health took to answer until something was done."""
        longest = 0.0
        while not acting.done():
            began = time.monotonic()
            await self.send(self.head("/health"), source="127.0.0.1")
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.05)
        return longest

    def resident(self) -> int:
        """Its memory, workers not counted: a lease bounds theirs."""
        with suppress(psutil.Error):
            return int(psutil.Process(self.program.process.pid).memory_info().rss)
        return 0

    def check(self, before: int) -> None:
        """What must not have happened to it."""
        if self.program.process.returncode is not None:
            self.fight.breach("the API ended")
        if (grown := self.resident() - before) > GROWTH_BYTES:
            self.fight.breach(f"the API grew by {grown >> 20} MiB")
        if "Traceback" in self.program.log.read_text(errors="replace"):
            self.fight.breach("a stack trace stands in the API's log")
        if self.right:
            slowest = f", the slowest in {max(self.answers):.1f} s" if self.answers else ""
            self.fight.note(f"the honest caller got {len(self.answers)} answers{slowest}")


@asynccontextmanager
async def local_api(fight: Fight, model: Path = TARGET, *, beside: bool = True) -> AsyncIterator[LocalApi]:
    """An API that is up, and the word to attack it has come.

    Args:
        beside: whether an honest caller asks it meanwhile.
    """
    options = ["--join", fight.ground.join, "--port", "0", "--api-key", HONEST, "--api-key", OTHER]
    program = await fight.kit.hold(
        start_program("api", ["client.cli", "api", str(model), *options], Path(fight.ground.folder), NORMAL)
    )
    here = LocalApi(fight, program, (await program.wait_for(r"API at http://[^/]+/")).rpartition("//")[2].rstrip("/"))
    for _ in range(TRIES):  # the swarm is looked for meanwhile
        if found := (first := await here.asked_honestly()).text:
            break
        await asyncio.sleep(0.5)
    else:
        raise RegistryError(f"the API does not answer: {first.status} {first.reason}")
    fight.tally.refused = 0
    await fight.go()
    before = here.resident()
    async with TaskScope() as scope:  # its caller ends before it does
        if beside:
            here.right = found
            scope.spawn(here.be_honest())
        try:
            yield here
        finally:
            here.check(before)
