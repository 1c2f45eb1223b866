"""The version of this program, and which of two sides that do not understand each other is to be updated.

Read once: it stands in a file, and a program may run out of those.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Final

from swarm.base.source_commit import source_commit

COMMIT_DIGITS: Final = 9
"""Of a commit's hash: with them a version fits the 32 characters of a record."""


def build_version(release: str, commit: str | None) -> str:
    """What a build calls itself: a release by its number, what lies between two of them with its commit too.

    Args:
        release: as the distribution is called; `.dev` stands in it between releases.
        commit: the hash of the source's commit; None where nothing tells.
    """
    if ".dev" not in release or commit is None:
        return release
    return f"{release}+g{commit[:COMMIT_DIGITS]}"


VERSION: Final = build_version(version("canopy-swarm"), source_commit())
UPDATE: Final = "pip install -U canopy-swarm"


def unknown_here(what: str) -> str:
    """What is said, to either side, of something that only a later release can mean.

    Args:
        what: the kind and number that is not known, such as `kind 9`.
    """
    return f"{what} is unknown to release {VERSION}; if a later one has it, update this one ({UPDATE})"


def which_side(theirs: str, ours: str = VERSION) -> str | None:
    """Which of two sides is to be updated, as a clause; None where they run the same release, or nobody can tell.

    Args:
        theirs: the other side's release, as its record says.
        ours: this program's.
    """
    there, here = _numbers(theirs), _numbers(ours)
    if there == here or not there or not here:
        return None
    if here < there:
        return f"it runs release {theirs}, this machine {ours}: update this machine ({UPDATE})"
    return f"it runs release {theirs}, this machine {ours}: that one is to be updated"


def _numbers(release: str) -> tuple[int, ...]:
    found = re.match(r"\d{1,6}(\.\d{1,6}){0,4}", release, re.ASCII)
    return () if found is None else tuple(map(int, found[0].split(".")))
