"""A guide's commands as they stand in its text: who types what, and what should be seen. Pure; runs nothing.

A block that is followed has a comment above it that readers do not see:

    <!-- run: anna -->                the lines after `$ ` are typed on the machine anna, one after another
    <!-- run: anna, stays -->         the command goes on running once everything shown was seen
    <!-- run: anna, fails -->         the command is to fail
    <!-- run: anna, slow -->          left out by the tests, not by `python -m tools.follow`
    <!-- run: anna, file story.py --> the block is written to that file in anna's home folder
    <!-- by hand: reason -->          the block is not followed

In a block `^C` interrupts what stays on that machine, and `› ` begins a line that is typed into a command. Shown lines
are compared loosely: numbers only stand for numbers, `…` for anything, and their order is free.
A guide that others have to go before says so: <!-- after: operator.md, volunteer.md -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PROMPT, TYPED, INTERRUPT, ELLIPSIS = "$ ", "› ", "^C", "…"
_MARK = re.compile(r"<!-- (run|by hand|after): ?(.*?) -->")
_FLAGS = {"stays", "fails", "slow"}
_NUMBER = r"\d+(?:[.,]\d+)*"


class GuideError(Exception):
    """A guide that cannot be followed as it stands; the message begins with file and line."""


@dataclass(slots=True)
class Step:
    """One command, or an interrupt (`command` is None), with the lines typed into it and those to be seen."""

    command: str | None
    line: int
    typed: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Block:
    """What is typed on one machine. file: the name of a file that the text becomes instead."""

    guide: Path
    line: int
    host: str
    flags: frozenset[str]
    file: str | None
    text: tuple[str, ...]

    def steps(self) -> list[Step]:
        """The block's commands in order.

        Raises:
            GuideError: something is shown before anything is typed.
        """
        steps: list[Step] = []
        for number, line in enumerate(self.text, self.line + 1):
            if steps and (command := steps[-1].command) is not None and command.endswith("\\"):
                steps[-1].command = f"{command[:-1]}{line.strip()}"
            elif line.startswith(PROMPT):
                steps.append(Step(line.removeprefix(PROMPT), number))
            elif line.strip() == INTERRUPT:
                steps.append(Step(None, number))
            elif not steps:
                raise GuideError(f"{self.guide}:{number}: nothing was typed before this is shown")
            elif line.startswith(TYPED):
                steps[-1].typed.append(line.removeprefix(TYPED))
            elif line.strip(f" {ELLIPSIS}"):
                steps[-1].shown.append(line)
        return steps


@dataclass(frozen=True, slots=True)
class Guide:
    """What is to be followed of one document, and the documents that go before it."""

    path: Path
    after: tuple[Path, ...]
    blocks: tuple[Block, ...]


def read(path: Path) -> Guide:
    """Parse a guide.

    Raises:
        GuideError: a console block says neither who runs it nor why nobody does, or a mark is wrong.
    """
    blocks: list[Block] = []
    after: list[Path] = []
    mark: tuple[str, str] | None = None
    fence: tuple[str, int] | None = None
    inside: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if fence is not None and line.strip() == "```":
            blocks += _block(path, fence, mark, inside)
            fence = mark = None
        elif fence is not None:
            inside.append(line)
        elif line.startswith("```"):
            fence, inside = (line.removeprefix("```").strip(), number), []
        elif found := _MARK.fullmatch(line.strip()):
            mark = found[1], found[2]
            if mark[0] == "after":
                after += [path.parent / name.strip() for name in mark[1].split(",")]
                mark = None
        elif line.strip() and mark is not None:
            raise GuideError(f"{path}:{number}: a block should follow the mark {mark[0]!r}")
    return Guide(path, tuple(after), tuple(blocks))


def _block(path: Path, fence: tuple[str, int], mark: tuple[str, str] | None, text: list[str]) -> list[Block]:
    language, line = fence
    if mark is None:
        if language == "console":
            raise GuideError(f"{path}:{line}: says neither who runs this nor why nobody does")
        return []
    kind, value = mark
    if kind == "by hand":
        return []
    host, *options = [part.strip() for part in value.split(",")]
    files = [option.removeprefix("file ") for option in options if option.startswith("file ")]
    flags = {option for option in options if not option.startswith("file ")}
    if unknown := flags - _FLAGS:
        raise GuideError(f"{path}:{line}: {', '.join(sorted(unknown))}: no such mark")
    return [Block(path, line, host, frozenset(flags), files[0] if files else None, tuple(text))]


def is_shown(line: str, output: str) -> bool:
    """Whether an output holds a line of a guide, loosely: numbers, frames and spacing do not count."""
    parts = [re.escape(_plain(part)) for part in line.split(ELLIPSIS)]
    pattern = r".*?".join(part for part in parts if part).replace("\\#", "#")
    return re.search(pattern, _plain(output)) is not None


def _plain(text: str) -> str:
    """Numbers as #, frames of tables away, every white space one blank."""
    unframed = re.sub(r"[─━│┃┄┆┌┐└┘├┤┬┴┼┏┓┗┛┣┫┳┻╋╇╈┡┩╞╡╪]", " ", text)
    return re.sub(r"\s+", " ", re.sub(_NUMBER, "#", unframed)).strip()
