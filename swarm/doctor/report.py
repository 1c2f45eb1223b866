"""What the doctor found, as people and programs read it. All of it is redacted here, in one place."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.doctor.ladder import Diagnosis, Level, first_cause
from swarm.doctor.redaction import PrivateWords, redact
from swarm.runtime.version import VERSION

SCHEMA: Final = 2
_STYLES: Final[Mapping[Level, str]] = {
    Level.OK: "green",
    Level.HINT: "yellow",
    Level.NOT_KNOWN: "dim",
    Level.NOT_ASKED: "dim",
    Level.TROUBLE: "bold red",
}


def redacted(found: Sequence[Diagnosis], private: PrivateWords) -> list[Diagnosis]:
    """The findings without what is private."""
    return [replace(one, text=redact(one.text, private), mend=redact(one.mend, private)) for one in found]


def show(found: Sequence[Diagnosis], console: Console, *, verbose: bool) -> None:
    """Print lines: on a terminal each with its mend below, elsewhere each on one line with its mend behind an arrow.

    Args:
        found: redacted.
        console: where to.
        verbose: whether what is well, and what was not asked, has lines of its own too.
    """
    quiet = set() if verbose else {Level.OK, Level.NOT_ASKED}
    shown = [one for one in found if one.level not in quiet]
    if console.is_terminal:
        _show_table(shown, console)
    else:
        for one in shown:
            console.print(Text(f"{one.level.value:<9} {one.rung:<10} {one.text}{one.mend and f' → {one.mend}'}"))
    if not verbose:
        idle: dict[str, list[str]] = {}
        for one in found:
            if one.level is Level.NOT_ASKED:
                idle.setdefault(one.text, []).append(one.rung)
        for why, rungs in idle.items():
            console.print(Text(f"not asked, {why}: {', '.join(rungs)}"), soft_wrap=False)
        if well := list(dict.fromkeys(one.rung for one in found if one.level is Level.OK)):
            console.print(Text(f"well: {', '.join(well)}"), soft_wrap=False)
    console.print(Text(_summary(found)), soft_wrap=False)


def _show_table(shown: Sequence[Diagnosis], console: Console) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in shown:
        said = Text.assemble(one.text, "\n→ ", (one.mend, "bold")) if one.mend else Text(one.text)
        table.add_row(Text(one.level.value, _STYLES[one.level]), Text(one.rung), said)
    if shown:
        console.print(table, soft_wrap=False)


def _summary(found: Sequence[Diagnosis]) -> str:
    cause = first_cause(found)
    said = [
        f"{number} {level.value if number == 1 else f'{level.value}s'}"
        for level in (Level.TROUBLE, Level.HINT)
        if (number := sum(one.level is level for one in found))
    ]
    said += [f"{number} not known"] if (number := sum(one.level is Level.NOT_KNOWN for one in found)) else []
    if cause is None:
        return "; ".join(["nothing is in the way", *([", ".join(said)] if said else [])])
    counts = f"{', '.join(said)}; this output can be pasted into an issue as it is"
    return f"first cause: {cause.rung}: {cause.text}\n{counts}"


def as_json(found: Sequence[Diagnosis], took_s: float) -> str:
    """The same for programs, as docs/reference/doctor.md describes it.

    Args:
        found: redacted.
        took_s: how long it took.
    """
    cause = first_cause(found)
    report: dict[str, Any] = {
        "v": SCHEMA,
        "version": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "took_s": round(took_s, 1),
        "troubles": sum(one.level is Level.TROUBLE for one in found),
        "hints": sum(one.level is Level.HINT for one in found),
        "first_cause": None if cause is None else _said(cause),
        "findings": list(map(_said, found)),
    }
    return json.dumps(report, indent=2)


def _said(one: Diagnosis) -> dict[str, str]:
    return {"check": one.rung, "level": one.level.value, "kind": one.kind, "text": one.text, "mend": one.mend}
