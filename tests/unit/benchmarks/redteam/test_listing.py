"""Every attack is listed with its kind and a sentence, and the page names every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.redteam.attacks
from benchmarks.redteam.attack import Kind
from benchmarks.redteam.listing import all_attacks, find_attack
from swarm.base.errors import ConfigError

PAGE = Path(__file__).parents[4] / "docs" / "benchmarks" / "redteam.md"


def test_every_attack_says_in_a_line_what_it_does() -> None:
    for name, one in all_attacks().items():
        assert name == one.name
        assert 8 <= len(one.about) <= 120, name
        assert one.about[0].isupper() or one.about[0].isdigit(), name


def test_no_attack_of_a_module_is_left_out() -> None:
    modules = Path(benchmarks.redteam.attacks.__path__[0]).glob("*.py")
    declared = sum(path.read_text().count("\n@attack(") for path in modules)
    assert declared == len(all_attacks())


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_has_attacks_and_stands_on_the_page(kind: Kind) -> None:
    assert any(one.kind is kind for one in all_attacks().values())
    (kinds,) = (part for part in PAGE.read_text().split("\n\n") if part.startswith("The kinds are "))
    named = kinds.partition(". ")[0].removeprefix("The kinds are ").replace(" and ", ", ").replace("\n", " ")
    assert kind in named.split(", ")


def test_an_unknown_name_is_answered_in_one_line() -> None:
    with pytest.raises(ConfigError, match="no attack is called nonsense"):
        find_attack("nonsense")
