"""The `client` command up to the point where it would join a swarm."""

from __future__ import annotations

import asyncio
import io
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TextIO, cast

import pytest

import client.cli
from client.base.options import GenerateOptions, Grammar, Options, make_options
from client.cli import LineTrackingStream, NoteFormatter
from client.library.session import Piece
from client.terminal.chat import typed_lines
from client.terminal.commands import Bench, ChatCommand, Generate
from swarm.base.errors import ConfigError, GenerationInterrupted
from swarm.demo import TARGET

NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/Qm{'a' * 44}"


def command(prompt: str) -> Generate:
    """Would join a peer that nobody is."""
    return Generate(model=str(TARGET), join=(NOBODY,), prompt=prompt)


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input that is no text."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x80abc"), encoding="utf-8"))


def test_a_prompt_is_read_where_ctrl_c_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

        def read(self, size: int | None = -1) -> str:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Keyboard())
    assert client.cli.run(command("-")) == 130
    assert capfd.readouterr().err == "reading the prompt from standard input; Ctrl-D ends it\n"


@pytest.mark.usefixtures("garbage")
@pytest.mark.parametrize("prompt", ["-", "\udcff\udcfe"])
def test_a_prompt_that_is_no_text_is_one_line(prompt: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert client.cli.run(command(prompt)) == 1
    assert capfd.readouterr().err == "client: prompt: is not valid text (UTF-8)\n"


@pytest.mark.usefixtures("garbage")
def test_a_chat_with_what_is_no_text_is_one_line() -> None:
    with pytest.raises(ConfigError, match="is not valid text"):
        next(typed_lines(is_terminal=False))


@pytest.mark.parametrize("threads", [0, 4_000_000])
def test_threads_that_cannot_be_are_one_line(threads: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert client.cli.run(replace(command("It"), threads=threads)) == 1
    assert capfd.readouterr().err.startswith(f"client: threads {threads}: give 1 to ")


def test_an_empty_draft_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert client.cli.run(replace(command("It"), draft=("",))) == 1
    assert capfd.readouterr().err == "client: draft is empty: name a folder or a hub id, or leave it out\n"


@pytest.mark.parametrize("kind", [Generate, ChatCommand, Bench])
def test_options_are_checked_before_anybody_is_asked(
    kind: type[Generate | ChatCommand | Bench], capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = Options(temperature=math.nan)
    assert client.cli.run(kind(model="/nowhere", join=(NOBODY,), options=wrong)) == 1
    assert capfd.readouterr().err == "client: temperature must be a finite number\n"


@pytest.mark.parametrize(("name", "why"), [("nowhere/x.json", "no such folder"), (".", "is a folder")])
def test_where_a_measurement_goes_is_checked_before_it(
    name: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert client.cli.run(Bench(model=str(TARGET), join=(NOBODY,), json=path)) == 1
    assert capfd.readouterr().err == f"client: {path}: cannot be written ({why})\n"


def test_a_note_begins_a_new_line_where_the_texts_is_open() -> None:
    said = io.StringIO()
    text, logger = LineTrackingStream(said), logging.Logger("client.chain.chain")
    handler = logging.StreamHandler(said)
    handler.setFormatter(NoteFormatter(text, "client: %(message)s"))
    logger.addHandler(handler)
    logger.warning("before")
    print("where the aid", end="", file=cast("TextIO", text))
    logger.warning("waiting")
    logger.warning("waiting")
    print(" had been left", file=cast("TextIO", text))
    logger.warning("after")
    assert said.getvalue() == (
        "client: before\nwhere the aid\nclient: waiting\nclient: waiting\n had been left\nclient: after\n"
    )


class FakeSwarm:
    """Says one text, in pieces, and breaks."""

    defaults: ClassVar[dict[str, float]] = {}
    pieces = ("once\x1b", "]0;owned\x07\r\n", "\u202eé")

    @classmethod
    @asynccontextmanager
    async def connect(cls, *_: object, **__: object) -> AsyncIterator[FakeSwarm]:
        yield cls()

    async def stream(self, *_: object, **__: object) -> AsyncIterator[Piece]:
        for text in self.pieces:
            yield Piece(text)
        raise GenerationInterrupted("node \x1b[2J\nclient: all is well", "", ())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_text_is_plain_on_a_terminal_and_itself_in_a_pipe(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Output(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    said = Output(newline="")
    monkeypatch.setattr("client.library.aio.AsyncSwarm", FakeSwarm)
    monkeypatch.setattr("swarm.base.process_limits.freeze_imports", lambda: None)
    monkeypatch.setattr("sys.stdout", said)
    assert client.cli.run(command("go")) == 1
    assert said.getvalue() == ("once�]0;owned��\n�é" if is_terminal else "once\x1b]0;owned\x07\r\n\u202eé")
    errors = capsys.readouterr().err
    assert errors == "\nclient: generation interrupted after 0 tokens: node �[2J\\nclient: all is well\n"


def test_a_file_of_a_schema_is_the_texts_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Any]] = []

    class Noting(FakeSwarm):
        async def stream(self, *_: object, **options: Any) -> AsyncIterator[Piece]:  # noqa: ANN401
            given.append(options)
            yield Piece("{}")

    monkeypatch.setattr("client.library.aio.AsyncSwarm", Noting)
    monkeypatch.setattr("swarm.base.process_limits.freeze_imports", lambda: None)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert client.cli.run(replace(command("go"), json_schema=schema)) == 0
    options = make_options(cast("GenerateOptions", given[0]))
    assert options.grammar == Grammar("json_schema", '{"type": "object"}')
    assert client.cli.run(replace(command("go"), json_schema=tmp_path / "none.json")) == 1
    assert "--json-schema" in capsys.readouterr().err
