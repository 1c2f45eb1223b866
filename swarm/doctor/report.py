"""What the doctor found, as people and programs read it. All of it is redacted here, in one place."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.doctor.diagnosis import Diagnosis, Level
from swarm.doctor.redaction import PrivateWords, redact
from swarm.runtime.version import VERSION

SCHEMA: Final = 1
_STYLES: Final = {Level.OK: "green", Level.HINT: "yellow", Level.TROUBLE: "bold red"}


def redacted(found: Sequence[Diagnosis], private: PrivateWords) -> list[Diagnosis]:
    """The diagnoses without what is private."""
    return [replace(one, text=redact(one.text, private), mend=redact(one.mend, private)) for one in found]


def show(found: Sequence[Diagnosis], console: Console, *, verbose: bool) -> None:
    """Print lines: on a terminal each with its mend below, elsewhere each on one line with its mend behind an arrow.

    Args:
        found: redacted.
        console: where to.
        verbose: whether what is well has lines of its own too.
    """
    shown = [one for one in found if verbose or one.level is not Level.OK]
    if console.is_terminal:
        _show_table(shown, console)
    else:
        for one in shown:
            console.print(Text(f"{one.level.value:<8} {one.check:<10} {one.text}{one.mend and f' → {one.mend}'}"))
    well = list(dict.fromkeys(one.check for one in found if one.level is Level.OK))
    if well and not verbose:
        console.print(Text(f"well: {', '.join(well)}"), soft_wrap=False)
    console.print(Text(_summary(found)), soft_wrap=False)


def _show_table(shown: Sequence[Diagnosis], console: Console) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in shown:
        said = Text.assemble(one.text, "\n→ ", (one.mend, "bold")) if one.mend else Text(one.text)
        table.add_row(Text(one.level.value, _STYLES[one.level]), Text(one.check), said)
    if shown:
        console.print(table, soft_wrap=False)


def _summary(found: Sequence[Diagnosis]) -> str:
    troubles, hints = (sum(one.level is level for one in found) for level in (Level.TROUBLE, Level.HINT))
    if not troubles:
        return "nothing is in the way" + (f"; {_count(hints, 'hint')}" if hints else "")
    return f"{_count(troubles, 'trouble')}, {_count(hints, 'hint')}; this output can be pasted into an issue as it is"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def as_json(found: Sequence[Diagnosis], took_s: float) -> str:
    """The same for programs, as docs/reference/doctor.md describes it.

    Args:
        found: redacted.
        took_s: how long it took.
    """
    report: dict[str, Any] = {
        "v": SCHEMA,
        "version": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "took_s": round(took_s, 1),
        "troubles": sum(one.level is Level.TROUBLE for one in found),
        "hints": sum(one.level is Level.HINT for one in found),
        "findings": [
            {"check": one.check, "level": one.level.value, "kind": one.kind, "text": one.text, "mend": one.mend}
            for one in found
        ],
    }
    return json.dumps(report, indent=2)
