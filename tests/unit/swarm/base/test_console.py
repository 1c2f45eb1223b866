"""Where a command prints: a wide table stays whole in a pipe, and fits a terminal."""

from __future__ import annotations

import io
import sys

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from swarm.base.cli import make_console

TITLES = [f"the title of column {number}" for number in range(20)]
CELLS = [f"the cell {number}, with spaces in it" for number in range(20)]


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def wide() -> Table:
    table = Table()
    for title in TITLES:
        table.add_column(title)
    table.add_row(*CELLS)
    return table


def test_where_no_terminal_looks_every_cell_is_whole_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    make_console(out).print(wide())
    lines = out.getvalue().splitlines()
    assert len(lines) == 5  # three rules, the titles, the row
    assert all(title in lines[1] for title in TITLES)
    assert all(cell in lines[3] for cell in CELLS)
    assert len(lines[0]) < 20 * 40


def test_standard_output_in_a_pipe_is_such_a_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours for a pager; its lines are no narrower for that
    assert not sys.stdout.isatty()
    make_console().print(wide())
    row = capsys.readouterr().out.splitlines()[3]
    assert all(cell in row for cell in CELLS)


def test_on_a_terminal_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    make_console(out).print(wide())
    lines = out.getvalue().splitlines()
    assert {len(Text.from_ansi(line)) for line in lines} == {100}


HOSTILE = "\x1b]52;c;ZXZpbA==\x07 [red]x[/red] :smile: \u202e"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_strangers_text_is_text_wherever_it_stands(kind: type[io.StringIO]) -> None:
    out = kind()
    console = make_console(out)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as progress:
        progress.add_task(HOSTILE)
        console.print(HOSTILE)
        console.print(Text(HOSTILE), table, style="dim")
    said = out.getvalue()
    assert said.count("�]52;c;ZXZpbA== [red]x[/red] :smile:") >= 6
    assert "\x1b]" not in said  # rich's own colours begin with \x1b[
    assert "\x07" not in said
    assert "\u202e" not in said
