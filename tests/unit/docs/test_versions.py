"""The versions that are installed and tried: pinned ones with hashes, and the lowest that pyproject.toml admits."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.floors import PYPROJECT, floors
from tools.lock import CONSTRAINTS, LOCK, OUTSIDE, markers, pinned

PROJECT = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]


def test_the_lock_has_the_versions_of_the_constraints_each_with_hashes() -> None:
    text = LOCK.read_text(encoding="utf-8")
    known = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    assert pinned(text) == {name: version for name, version in known.items() if name not in OUTSIDE}
    for entry in re.split(r"\n(?=\S)", text.rstrip())[1:]:
        name, *hashes = entry.replace("\\\n", "\n").splitlines()
        assert hashes, name
        assert all(re.fullmatch(r" *--hash=sha256:[0-9a-f]{64} *", one) for one in hashes), name
        wanted = markers().get(canonicalize_name(name.split("==")[0]))
        assert (name.partition(" ; ")[2].strip() or None) == wanted, name


def test_what_is_pinned_is_admitted() -> None:
    known = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(one for extra in extras for one in extra)]):
        name = canonicalize_name(requirement.name)
        if name != canonicalize_name(PROJECT["name"]):
            assert requirement.specifier.contains(known[name]), requirement


def test_the_lowest_versions_are_those_of_what_a_user_may_install() -> None:
    found = floors(PROJECT)
    known = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    assert found.keys() <= known.keys()
    assert all(lowest <= Version(known[name]) for name, lowest in found.items())
    assert {"torch", "fastapi", "starlette", "amqtt"} <= found.keys()
    assert "pytest" not in found


def test_of_several_floors_the_highest_counts_and_none_is_missing() -> None:
    project = {
        "name": "x",
        "dependencies": ["a>=1,<9", "b~=2.1"],
        "optional-dependencies": {"all": ["x[e]"], "e": ["a>=3"]},
    }
    assert floors(project) == {"a": Version("3"), "b": Version("2.1")}
    with pytest.raises(ValueError, match="names no lowest version"):
        floors({**project, "dependencies": ["a<9"]})


@pytest.mark.parametrize("extra", ["api", "health", "metrics"])
def test_what_serves_http_says_which_starlette_it_needs(extra: str) -> None:
    """A request's path is taken from another place by releases that an old floor admitted."""
    assert floors({**PROJECT, "dependencies": []}, (extra,))["starlette"] >= Version("1.6")
