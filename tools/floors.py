"""The lowest versions that pyproject.toml admits, as constraints: `python -m tools.floors` prints them.

`make floors` installs them and runs the tests of what they matter for. What a floor needs in turn is not held down: pip
takes the newest that fits, as it does for whoever has an old package already.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYPROJECT: Final = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS: Final = ("all",)
"""Extras whose lowest versions are tested beside the base install's; tools of developers are pinned instead."""
_FLOORS: Final = frozenset({">=", "==", "~="})


def floors(project: Mapping[str, Any], extras: tuple[str, ...] = EXTRAS) -> dict[str, Version]:
    """The lowest version of each package that the base install or one of these extras may have.

    Args:
        project: the table `project` of a pyproject.toml.

    Raises:
        ValueError: a requirement has no lowest version.
    """
    found: dict[str, Version] = {}
    for requirement in _wanted(project, extras):
        lowest = [Version(one.version) for one in requirement.specifier if one.operator in _FLOORS]
        if not lowest:
            raise ValueError(f"{requirement} names no lowest version")
        name = canonicalize_name(requirement.name)
        found[name] = max(found.get(name, lowest[0]), *lowest)
    return dict(sorted(found.items()))


def _wanted(project: Mapping[str, Any], extras: tuple[str, ...]) -> Iterator[Requirement]:
    own, optional = canonicalize_name(project["name"]), project["optional-dependencies"]
    left, seen = [project["dependencies"], *(optional[extra] for extra in extras)], set(extras)
    environment = {name: str(value) for name, value in default_environment().items()}
    while left:
        for requirement in map(Requirement, left.pop()):
            if canonicalize_name(requirement.name) == own:
                further = requirement.extras - seen
                seen |= further
                left += [optional[extra] for extra in sorted(further)]
            elif requirement.marker is None or requirement.marker.evaluate(environment):
                yield requirement


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    for name, version in floors(project).items():
        sys.stdout.write(f"{name}=={version}\n")


if __name__ == "__main__":
    main()
