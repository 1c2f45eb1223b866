"""The red team's table: a row per attack, of one run or of several.

A whole run takes more than an hour. So rows are recorded one by one, and a mend asks for its own
rows again, not for all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import benchmarks.sheet
from benchmarks.redteam.attack import Attack, Kind
from benchmarks.sheet import Sheet

NAME = "redteam"
COLUMNS = ("attack", "cost", "median", "p95", "after", "texts", "memory", "files", "verdict")
NOTES = (
    "cost: bytes/s that the attacker sent, its connections, identities and processor time, per second of the attack.",
    "median: tokens/s while it lasts of the undisturbed speed just before, of the user who felt it most; the median of "
    "the pairs. p95: the same of the speed that 95 of 100 texts exceed. after: the same, 3 to 10 s after its end, or "
    "10 to 20 s where that is below 0.9. A row that is not held is measured three times as long; all pairs count.",
    "texts: exact and complete, of those that were begun or running while it lasted and after it. memory: the largest "
    "growth of a program, in MB. files: the most that a program had open; it begins with 1,024.",
    "The attacker's addresses count as strangers', new ones each time. What comes from a machine's own network is "
    "borne 16 times as long, since many may stand behind one address.",
    "The attacker shares the machine's processors with the swarm. It runs with the lowest priority; a row that says "
    "*burns* is about nothing else, and depends on the machine. The *controls* touch no swarm: what they take is the "
    "price of the processor time alone, to compare a row of as many cores with.",
)

Rows = Mapping[str, Mapping[str, Any]]
"""By the attack's name, what `Outcome.measured` says."""


def recorded() -> Rows:
    """The rows of the last record; none without one."""
    path = benchmarks.sheet.RESULTS / f"{NAME}.json"
    if not path.exists():
        return {}
    rows: dict[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["attacks"]
    return rows


def merged(old: Rows, new: Rows, attacks: Mapping[str, Attack]) -> Rows:
    """New rows in the place of old ones, in the order of the attacks; rows of attacks that are no more are dropped."""
    rows = {**old, **new}
    return {name: rows[name] for name in attacks if name in rows}


def table(rows: Rows) -> Sheet:
    pairs = min((row["pairs"] for row in rows.values()), default=0)
    seconds = min((row["seconds"] for row in rows.values()), default=0.0)
    attacks = [row for row in rows.values() if row["kind"] != Kind.CONTROLS]
    made = Sheet(
        NAME,
        f"{len(attacks)} attacks on a live swarm, two honest users, {pairs} pairs of {seconds:.0f} s",
        COLUMNS,
        [row["cells"] for row in rows.values()],
        list(NOTES),
        {"attacks": dict(rows)},
    )
    counts: dict[str, int] = {}
    for row in attacks:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    made.notes.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".")
    for row in rows.values():
        made.notes += row["why"]
    return made
