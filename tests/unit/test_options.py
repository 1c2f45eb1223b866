"""What can be asked for, at the edge."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import pytest

from client.options import GenerateOptions, Options, make_options
from swarm.errors import ConfigError


def test_keyword_arguments_are_the_options() -> None:
    assert set(GenerateOptions.__annotations__) == {field.name for field in fields(Options)}


def test_one_stop_string_is_not_many_letters() -> None:
    assert make_options({"stop": "end"}).stop == ("end",)
    assert make_options({"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_tokens": 3}, "unknown option 'max_tokens'"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"nodes": -1}, "nodes"),
        ({"nodes": 4_096}, "nodes"),
        ({"stop": ["a", ""]}, "stop"),
    ],
)
def test_what_cannot_be_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_options(cast("GenerateOptions", given)).check()


def test_a_seed_is_drawn_when_none_is_given() -> None:
    assert Options(seed=7).sampling().seed == 7
    assert Options().sampling().seed != Options().sampling().seed
