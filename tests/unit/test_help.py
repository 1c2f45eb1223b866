"""What `--help` of every command and subcommand says, as a stranger reads it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

import client.cli
import client.terminal.probe
import node.cli
import swarm.cli
from client.base.options import Options
from swarm.base.cli import plain_words
from swarm.base.cli_types import Count, Folder, Peer, headed

MAINS: dict[str, Callable[[], None]] = {
    "client": client.cli.main,
    "node": node.cli.main,
    "swarm": swarm.cli.main,
    "client.terminal.probe": client.terminal.probe.main,
}
HEADINGS = {
    "client generate": ["text", "swarm", "links", "drafting", "sampling", "penalties", "output"],
    "client chat": ["text", "swarm", "links", "drafting", "sampling", "penalties"],
    "client bench": ["text", "swarm", "links", "drafting", "sampling", "penalties", "output"],
    "client api": ["server", "bounds", "swarm", "links", "drafting"],
    "client train-draft": ["draft", "text", "training"],
    "node serve": ["model", "machine", "swarm", "network", "reach", "courtesy", "monitoring"],
    "node install": ["service", "model", "machine", "swarm", "network", "reach", "courtesy", "monitoring"],
    "swarm health": ["swarm", "broker", "page", "probe", "alert"],
}
TYPES = re.compile(r"\b(STR|INT|FLOAT|PATH|BOOL)\b|\{None\}|\bNone\b|\b(True|False)\b|\{fixed\}")


@dataclass(frozen=True)
class Entry:
    """An option, or what stands for a positional argument, and its sentence."""

    shown: str
    sentence: str


@dataclass(frozen=True)
class Screen:
    """A help text by its boxes."""

    text: str

    @property
    def boxes(self) -> dict[str, list[str]]:
        """Lines by title."""
        found: dict[str, list[str]] = {}
        for line in self.text.splitlines():
            if title := re.match(r"╭─ (.+?) ─*╮", line):
                lines = found.setdefault(title[1], [])
            elif line.startswith("│"):
                lines.append(line.strip("│")[1:].rstrip())
        return found

    @property
    def subcommands(self) -> list[str]:
        """Their names."""
        return [name[1] for line in self.boxes.get("subcommands", []) if (name := re.search(r"• ([\w-]+)", line))]

    @property
    def headings(self) -> list[str]:
        """Of options, but for the first box, which has those under none."""
        return [title.removesuffix(" options") for title in self.boxes if title.endswith(" options")]

    def entries(self, title: str) -> list[Entry]:
        """What a box explains."""
        found: list[Entry] = []
        for line in self.boxes[title]:
            if line.startswith(" "):
                found[-1] = Entry(found[-1].shown, f"{found[-1].sentence} {line.strip()}".strip())
            else:
                shown, _, sentence = line.partition("  ")
                found.append(Entry(shown, sentence.strip()))
        return found


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Screen]:
    """The help of a command line, at a width."""

    def show(program: str, *words: str, columns: int = 80) -> Screen:
        written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # boxes are drawn where they can be
        monkeypatch.setattr("sys.stdout", written)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.argv", [program, *words, "--help"])
        with pytest.raises(SystemExit) as end:
            MAINS[program]()
        assert end.value.code == 0
        written.seek(0)
        return Screen(written.read())

    return show


def check(shown: Screen, line: str) -> None:
    """Every value and default is in words, and every option has a sentence."""
    assert not TYPES.search(shown.text), line
    assert len(shown.text.split("\n\n")[0]) <= 100, f"{line}: its usage is not one line"
    assert "options" in shown.boxes, line
    assert "--no-no-" not in shown.text, f"{line}: an option that says no twice"
    for title in shown.boxes.keys() - {"subcommands"}:
        entries = shown.entries(title)
        assert entries, f"{line}: {title}"
        for entry in entries:
            where = f"{line}: {entry.shown}"
            assert re.search(r"[a-z]{2,} .*[a-z]{2,}", entry.sentence), f"{where} has no sentence"
            if entry.shown != "-h, --help":
                assert re.search(r"\((default: .+|required|repeatable)\)$", entry.sentence), f"{where} has no default"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("program", MAINS)
def test_every_option_says_what_to_give_and_what_it_does(
    program: str, columns: int, screen: Callable[..., Screen]
) -> None:
    root = screen(program, columns=columns)
    check(root, program)
    for command in root.subcommands:
        check(screen(program, command, columns=columns), f"{program} {command}")


def test_every_command_is_walked(screen: Callable[..., Screen]) -> None:
    assert {"serve", "status", "install", "uninstall", "doctor"} <= set(screen("node").subcommands)
    assert {"generate", "chat", "api", "bench", "train-draft"} <= set(screen("client").subcommands)
    expected = {
        "bootstrap",
        "status",
        "route",
        "plan",
        "health",
        "private",
        "top",
        "doctor",
        "invite",
        "list",
        "forget",
    }
    assert expected <= set(screen("swarm").subcommands)


@pytest.mark.parametrize("line", HEADINGS)
def test_long_lists_have_headings(line: str, screen: Callable[..., Screen]) -> None:
    shown = screen(*line.split())
    assert shown.headings == HEADINGS[line]
    assert [entry.shown for entry in shown.entries("options")] == ["-h, --help"]


def test_values_are_words(screen: Callable[..., Screen]) -> None:
    text = screen("client", "generate").text
    for shown in ("[MODEL]", "--prompt TEXT", "--resume FILE", "--wait SECONDS", "--nodes N", "--join PEER"):
        assert shown in text
    text = screen("node", "serve").text
    for shown in ("--layers START-END", "--offload-folder FOLDER", "--announce-address HOST:PORT", "--mqtt URL"):
        assert shown in text


@headed(name=("folder", "peer"), generation=("options",), amounts=("count",))
@dataclass(frozen=True)
class Example:
    """An example.

    Attributes:
        name: is a name.
        count: how many (default: all).
        folder: where to.
        peer: whom to ask.
        options: how to generate.
        is_dry: change nothing.
    """

    name: tyro.conf.Positional[str]
    count: Count | None = None
    folder: Folder = Path("here")
    peer: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    options: Annotated[Options, tyro.conf.arg(name="")] = Options()  # noqa: RUF009 - frozen
    is_dry: bool = False


def parse(*words: str) -> Example:
    return tyro.cli(Example, args=words, registry=plain_words())


def test_headings_change_nothing_of_what_is_read() -> None:
    assert parse("x") == Example("x")
    told = parse("--count", "3", "x", "--folder", "/f", "--peer", "a", "--peer", "b", "--is-dry", "--nodes", "4")
    assert told == Example("x", 3, Path("/f"), ("a", "b"), Options(nodes=4), is_dry=True)
    assert parse("x", "--stop", "a", "b", "--no-is-dry").options.stop == ("a", "b")


@pytest.mark.parametrize("words", [["x", "--count", "many"], [], ["x", "--name.folder", "/f"]])
def test_what_cannot_be_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)


@pytest.mark.parametrize(
    ("program", "words", "why"),
    [
        ("client", ["generate", "--nodes", "x"], "Error parsing --nodes: 'x' is not a whole number"),
        ("client", ["chat", "--wait", "soon"], "Error parsing --wait: 'soon' is not a number"),
        ("node", ["serve", "--layers", "0-4", "--port", "1.5"], "Error parsing --port: '1.5' is not a whole number"),
    ],
)
def test_what_is_no_number_is_said_without_types(
    program: str, words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [program, *words])
    with pytest.raises(SystemExit):
        MAINS[program]()
    said = capsys.readouterr().err
    assert why in said
    assert not TYPES.search(said)
    assert "typing" not in said


def test_none_and_numbers_are_read_as_ever() -> None:
    assert parse("x", "--count", "None") == parse("x")
    assert parse("x", "--temperature", "1e-1", "--top-p", "1", "--max-new-tokens", "1_000").options == Options(
        max_new_tokens=1_000, temperature=0.1, top_p=1.0
    )


def test_a_heading_over_no_field_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="Example has no foldr"):
        headed(name=("foldr",))(Example)
