"""What reaches a user's terminal, files and environment: escapes, damaged files, planted links, clocks, proxies."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.attacks.hops import faulty, stand
from benchmarks.redteam.attacks.liars import CHECKED_LATER, TAIL
from benchmarks.redteam.byzantine import Lie, lying_hop
from swarm.base.errors import ConfigError, SwarmError
from swarm.demo import TARGET
from swarm.protocol.messages import FaultKind

ESCAPES = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\u202egnp\r\nclient: all is well"
CLI_S = 40.0
MAX_OUTPUT_BYTES = 1 << 20
ESCAPE_TOKENS = (218, 63, 18, 29, 198)
"""Bytes of the demo's vocabulary that spell an escape which sets a terminal's title."""


async def generate(fight: Fight, count: int) -> None:
    """Run `client generate` on a terminal, whose output must have no control character but line ends.

    A pipe gets a model's text byte for byte, so a terminal is what a text must not command.
    """
    await fight.started.wait()
    await asyncio.sleep(2.0)
    for _ in range(count):
        command = (sys.executable, "-m", "client.cli", "generate", str(TARGET), "--join", fight.ground.join)
        options = ("--prompt", "It was", "--max-new-tokens", "12", "--wait", "2")
        ours, theirs = os.openpty()
        dumb = os.environ | {"TERM": "dumb", "NO_COLOR": "1"}  # so that no escape is the program's own
        process = await asyncio.create_subprocess_exec(*command, *options, stdout=theirs, stderr=theirs, env=dumb)
        os.close(theirs)
        try:
            async with asyncio.timeout(CLI_S):
                out = await asyncio.to_thread(_read_all, ours)
                await process.wait()
        except TimeoutError:
            process.kill()
            fight.note("a command did not end in time")
            return
        text = out.decode(errors="replace")
        if any(character in text for character in "\x1b\x07\u202e\x9b"):
            fight.breach("a stranger's escapes reach a user's terminal")
        if "\nclient: all is well" in text:
            fight.breach("a stranger writes lines of its own on a user's terminal")
        if "Traceback" in text:
            fight.breach("a user's command ends with a stack trace")


def _read_all(terminal: int) -> bytes:
    """What programs wrote on a terminal until the last one let go of it."""
    out = b""
    with suppress(OSError), open(terminal, "rb", buffering=0) as stream:
        while len(out) < MAX_OUTPUT_BYTES and (part := stream.read(4_096)):
            out += part
    return out


@attack("escapes-in-reasons", Kind.TERMINAL, lasts_s=25.0)
async def escapes_in_reasons(fight: Fight) -> None:
    """Quick machines whose faults carry terminal escapes and line ends, while a user runs `client generate`."""
    fight.kit.scope.spawn(generate(fight, 2))
    await stand(fight, faulty(FaultKind.MODEL_MISMATCH, reason=ESCAPES), spans=("0-12",) * 3)


@attack("escapes-in-text", Kind.TERMINAL, lasts_s=25.0, limit=CHECKED_LATER)
async def escapes_in_text(fight: Fight) -> None:
    """A tail whose picks spell terminal escapes, while a user runs `client generate`."""
    fight.kit.scope.spawn(generate(fight, 2))
    place = 0

    def spell(reply: object) -> object:
        nonlocal place
        picks = []
        for node, _ in reply.picks:  # type: ignore[attr-defined]
            picks.append((node, ESCAPE_TOKENS[place % len(ESCAPE_TOKENS)]))
            place += 1
        return (replace(reply, picks=tuple(picks)),)  # type: ignore[type-var]

    await lying_hop(fight, TAIL, Lie(replies=spell))  # type: ignore[arg-type]


@attack("damaged-resume-files", Kind.FILES)
async def damaged_resume_files(fight: Fight) -> None:
    """Files of interrupted texts with numbers and depths that no text has; a trace is a breach."""
    from client.terminal.resumption import load

    shell = '{"format": 1, "text": "a", "tokens": [%s], "prompt": [1], "options": %s}'
    damaged = {
        "a number without end": shell % ("1e400", "{}"),
        "depth": shell % ("1", "[" * 100_000 + "]" * 100_000),
        "a token below zero": shell % ("-5", "{}"),
        "a huge token": shell % (str(10**40), "{}"),
        "options of no text": shell % ("1", '"x"'),
        "not an object": "[]",
        "nothing": "",
    }
    await fight.go()
    for name, text in damaged.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "interrupted.json"
            path.write_text(text)
            fight.tally.acts += 1
            try:
                found = load(path)
                if any(not 0 <= token < 2**31 for token in found.tokens):
                    fight.breach(f"a resume file with {name} is taken")
            except ConfigError:
                pass
            except Exception as error:  # noqa: BLE001 (that is what is looked for)
                fight.breach(f"a resume file with {name} ends in {type(error).__name__}")


@attack("planted-identity", Kind.FILES)
async def planted_identity(fight: Fight) -> None:
    """A folder shared with a stranger, who plants links where a key is about to be drafted."""
    from swarm.directory.identity import Identity

    await fight.go()
    with tempfile.TemporaryDirectory() as folder:
        path, bait = Path(folder) / "identity.key", Path(folder) / "bait"
        bait.touch(0o666)
        (Path(folder) / f".{path.name}.{os.getpid()}").symlink_to(bait)
        with suppress(SwarmError):
            Identity.load_or_create(path)
        if bait.stat().st_size:
            fight.breach("a private key was written through a planted link")


@attack("leaping-clock", Kind.CLOCKS)
async def leaping_clock(fight: Fight) -> None:
    """A history whose machine's clock leaps 40 days ahead for one sample, and back."""
    from swarm.health.state.verdict import Grade
    from swarm.health.tasks.history import History, Sample

    await fight.go()
    with tempfile.TemporaryDirectory() as folder:
        now = time.time()
        async with History.open(Path(folder) / "history") as history:
            sample = Sample(fight.ground.model.fingerprint, next(iter(Grade)), 1, 1)
            for minute in range(60):
                await history.add([sample], now - 3_600 + 60 * minute)
            before = await history.points(sample.fingerprint, "24h", now)
            await history.add([sample], now + 40 * 86_400)
            await history.add([sample], now + 60)
            after = await history.points(sample.fingerprint, "24h", now)
        if len(str(after)) < len(str(before)) // 2:
            fight.breach("one sample from the future wipes the history")


@attack("environment-proxy", Kind.FILES)
async def environment_proxy(fight: Fight) -> None:
    """A proxy of the environment, as companies set it, that would read what users send."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(200))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await fight.go()
    kept = dict(os.environ)
    os.environ |= dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTPS_PROXY"), f"http://127.0.0.1:{port}")
    try:
        await fight.kit.dial_as_users_do("192.0.2.7:31338")
        await asyncio.sleep(1.5)
    finally:
        os.environ.clear()
        os.environ |= kept
        server.close()
    if heard:
        fight.breach(f"a link goes through the environment's proxy: {heard[0][:40]!r}")
