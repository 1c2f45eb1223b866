"""Test data from declarations: values within their bounds, and values beyond them."""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterator
from dataclasses import MISSING, is_dataclass
from typing import Any

from hypothesis import strategies as st

from swarm.declared import Bound, Broken, Printable, Rule, Size, Within, bare, facts

MANY = 4
"""Items of a list, at most."""


def values_of(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:  # noqa: ANN401
    """Values of a declaration that hold to every bound; `fields` has strategies for some of its fields."""
    found = {}
    for fact in facts(kind):
        if fact.written.not_sent and fact.default is not MISSING:
            continue
        one = fields.get(fact.name) or _value(fact.hint, fact.bounds)
        found[fact.name] = st.none() | one if fact.optional and fact.name not in fields else one
    return st.builds(kind, **found).filter(_is_whole)


def _is_whole(value: Any) -> bool:  # noqa: ANN401
    try:
        getattr(value, "check", lambda: None)()
    except Broken:
        return False
    return True


def _value(hint: Any, bounds: tuple[Bound, ...]) -> st.SearchStrategy[Any]:  # noqa: ANN401
    made = _of_type(hint, bounds)
    for bound in bounds:
        if isinstance(bound, Rule):
            made = made.filter(bound.holds)
    return made


def _of_type(hint: Any, bounds: tuple[Bound, ...]) -> st.SearchStrategy[Any]:  # noqa: ANN401
    size = next((bound for bound in bounds if isinstance(bound, Size)), Size(MANY))
    within = next((bound for bound in bounds if isinstance(bound, Within)), None)
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        parts = [_value(*_bounded(arg)) for arg in args if arg is not ...]
        if args[-1] is not ...:
            return st.tuples(*parts)
        listed = st.lists(parts[0], min_size=size.least, max_size=min(size.most, size.least + MANY))
        rises = any(isinstance(bound, Rule) and bound.says == "rising" for bound in bounds)
        return listed.map(lambda items: tuple(sorted(set(items)))) if rises else listed.map(tuple)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if is_dataclass(hint):
        return values_of(hint)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(int(within.low), int(within.high)) if within else st.integers(0, 2**32 - 1)
    if hint is float:
        low, high = (within.low, within.high) if within else (None, None)
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if hint is bytes:
        return st.binary(min_size=size.least, max_size=min(size.most, max(size.least, 64)))
    return _text(bounds)


def _text(bounds: tuple[Bound, ...]) -> st.SearchStrategy[str]:
    text = next((bound for bound in bounds if isinstance(bound, Printable)), Printable(20))
    if text.form is not None:
        return st.from_regex(text.form, fullmatch=True).filter(lambda found: text.problem(found) is None)
    letters = st.characters(exclude_categories=["Cs"]).filter(str.isprintable)
    return st.text(letters, min_size=text.least, max_size=min(text.most, text.least + 20))


def _bounded(arg: Any) -> tuple[Any, tuple[Bound, ...]]:  # noqa: ANN401
    hint, marks, _ = bare(arg)
    return hint, tuple(mark for mark in marks if isinstance(mark, Bound))


def beyond(bound: Bound) -> Iterator[Any]:
    """Values just outside of a bound; none for a `Rule`."""
    match bound:
        case Within(low, high):
            yield from (high + 1, low - 1)
            if isinstance(high, float):
                yield from (float("inf"), float("-inf"), float("nan"))
        case Printable(most, least, form):
            yield from ("x" * (most + 1), "two\nlines", "\x1b]0;owned\x07", "\u202e")
            yield from ([""] if least else [])
            yield from (["\u2713"] if form else [])
        case Size(most, least):
            yield bytes(most + 1)
            yield from ([bytes(least - 1)] if least else [])
        case Rule():
            pass
