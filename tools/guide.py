"""The commands of a guide: which machine types what, and what its output must show. Reads guides; runs nothing.

A block that is executed has a comment above it that readers do not see:

    <!-- run: anna -->                the lines after `$ ` are typed on the machine anna, one after another
    <!-- run: anna, stays -->         the command keeps running once its output shows everything
    <!-- run: anna, fails -->         the command must fail
    <!-- run: anna, slow -->          left out by the tests, not by `python -m tools.follow`
    <!-- run: anna, file story.py --> the block is written to that file in anna's home folder
    <!-- by hand: reason -->          the block is not executed

In a block `^C` interrupts the newest command that stays on that machine, and `› ` begins a line that is typed into a
command. Shown lines are compared loosely: any number matches any other, `…` matches anything, and the order is free.
A guide that needs other guides to be executed first names them: <!-- after: operator.md, volunteer.md -->
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
    """A guide is wrong, or its commands do not do what it says; the message begins with file and line."""


@dataclass(slots=True)
class Step:
    """One command or interrupt.

    Attributes:
        command: the command line; None: an interrupt.
        line: line number in the guide.
        typed: lines that are typed into the command.
        shown: lines that its output must show.
    """

    command: str | None
    line: int
    typed: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block that is executed on one machine.

    Attributes:
        line: line number of the block.
        flags: of `stays`, `fails`, `slow`.
        file: name of the file that the text is written to, None for commands.
        text: lines of the block.
    """

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
    """One guide.

    Attributes:
        after: guides that must be executed first.
        blocks: what is executed, in order.
    """

    path: Path
    after: tuple[Path, ...]
    blocks: tuple[Block, ...]


def read(path: Path) -> Guide:
    """Parse a guide.

    Raises:
        GuideError: a console block has neither `run` nor `by hand` above it, or a mark is wrong.
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
