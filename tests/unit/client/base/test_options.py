"""What can be asked for, at the edge."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import Any, cast

import numpy as np
import pytest

from client.base.options import (
    ConnectionOptions,
    ConnectOptions,
    GenerateOptions,
    Grammar,
    Options,
    make_connection,
    make_options,
)
from swarm.base.errors import ConfigError


@pytest.mark.parametrize(("keywords", "options"), [(GenerateOptions, Options), (ConnectOptions, ConnectionOptions)])
def test_keyword_arguments_are_the_options(keywords: type, options: type[Any]) -> None:
    assert set(keywords.__annotations__) == {field.name for field in fields(options)}


def test_options_of_a_connection_are_told_by_name() -> None:
    one = make_connection({"draft": "a", "peers": ["b"]})
    assert (one.draft, one.peers, one.wait, one.lookup) == (("a",), ("b",), 60.0, True)
    assert make_connection({"draft": None}).draft == make_connection({}).draft == ()
    with pytest.raises(ConfigError, match="unknown option 'recycle'"):
        make_connection(cast("ConnectOptions", {"recycle": True}))


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
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"max_new_tokens": 3.5}, "max_new_tokens"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"max_new_tokens": 10**11}, "max_new_tokens"),
        ({"nodes": "16"}, "nodes"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"logit_bias": {-5: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logit_bias": 7}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
        ({"grammar": "json"}, "grammar"),
        ({"grammar": Grammar("yaml")}, "grammar"),  # type: ignore[arg-type]
        ({"grammar": Grammar("regex", "a" * 65_537)}, "grammar"),
        ({"log_probs": 21}, "log_probs"),
        ({"log_probs": -1}, "log_probs"),
        ({"end_tokens": 5}, "end_tokens"),
        ({"end_tokens": ["</s>"]}, "end_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"seed": -1}, "seed"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 99_999_999_999}, "top_k"),
        ({"top_p": [0.5]}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"multistep": "yes"}, "multistep"),
    ],
)
def test_what_cannot_be_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_options(cast("GenerateOptions", given)).check()


def test_numbers_of_other_libraries_are_numbers() -> None:
    given = {"max_new_tokens": np.int64(3), "seed": np.uint64(7), "temperature": np.float32(0.5), "top_k": 2**32 - 1}
    make_options(cast("GenerateOptions", given)).check()


def test_a_seed_is_drawn_when_none_is_given() -> None:
    assert Options(seed=7).sampling().seed == 7
    assert Options().sampling().seed != Options().sampling().seed


def test_rules_travel_only_where_there_are_some() -> None:
    assert Options().sampling(7, {2}).rules is None
    rules = make_options({"logit_bias": {9: 1, 4: -2}}).sampling(7, {3, 2}).rules
    assert rules is not None
    assert (rules.start, rules.logit_bias, rules.end_tokens) == (7, ((4, -2.0), (9, 1.0)), (2, 3))


def test_an_interrupted_generation_has_its_rules_again() -> None:
    options = make_options({"grammar": Grammar("regex", "a+"), "logit_bias": {9: 1.5}, "frequency_penalty": 0.5})
    kept = json.loads(json.dumps(asdict(options)))
    assert make_options(kept) == options
