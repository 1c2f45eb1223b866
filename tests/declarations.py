"""Test data from declarations: values within their bounds, and values beyond them."""

from __future__ import annotations

import copy
import enum
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, is_dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from hypothesis import strategies as st

from swarm.base.declared import Bound, Broken, Fact, Printable, Rule, Size, Within, bare, facts
from swarm.base.layers import Span

M = TypeVar("M", bound=Message)
Place = Callable[[Any], Any]
MANY = 4
"""Items of a list, at most."""


def values_of(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:  # noqa: ANN401
    """Values of a declaration that hold to every bound; `fields` has strategies for some of its fields."""
    found = {}
    for fact in facts(kind):
        if fact.written.not_sent and fact.default is not MISSING:
            continue
        one = fields[fact.name] if fact.name in fields else _value(fact.hint, fact.bounds)
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
    if hint is Span:
        return st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda ends: Span(ends[0], sum(ends)))
    if is_dataclass(hint):
        return values_of(hint)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return _scalar(hint, bounds, size)


def _scalar(hint: Any, bounds: tuple[Bound, ...], size: Size) -> st.SearchStrategy[Any]:  # noqa: ANN401
    within = next((bound for bound in bounds if isinstance(bound, Within)), None)
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
    letters = st.characters(categories=["L", "N", "P", "S"])
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


def broken_messages(kind: Any, message: M, place: Place = lambda one: one, named: str = "") -> Iterator[tuple[str, M]]:  # noqa: ANN401
    """Protobuf messages that break one bound each of a declaration, and the field that is to be named.

    Args:
        kind: the declared class.
        message: one that holds to all bounds and has every field.
        place: from the message to the part of it that is of this class.
        named: the field that is named whatever part of it is at fault.
    """
    for fact in facts(kind):
        field = named or fact.name
        for change in _changes(fact):
            broken = copy.deepcopy(message)
            try:
                change(place(broken))
            except (ValueError, TypeError):  # protobuf itself holds no such value
                continue
            yield field, broken
        for name, hint, _, is_item in _parts(fact):
            if is_dataclass(hint):
                inner = partial(_within, place, name, is_item)
                yield from broken_messages(hint, message, inner, field if named or fact.written.as_one else "")


Change = Callable[[Any], None]


def _parts(fact: Fact) -> list[tuple[str, Any, tuple[Bound, ...], bool]]:
    """The fields of a message that hold a fact: each one's name, type, bounds, and whether these are of its items."""
    name = fact.written.name or fact.name
    if typing.get_origin(fact.hint) is not tuple:
        return [(name, fact.hint, fact.bounds, False)]
    item = typing.get_args(fact.hint)[0]
    names, items = (fact.written.columns, typing.get_args(item)) if fact.written.columns else ((name,), (item,))
    return [(name, *_bounded(item), True) for name, item in zip(names, items, strict=True)]


def _changes(fact: Fact) -> Iterator[Change]:
    parts = _parts(fact)
    for name, hint, bounds, is_item in parts:
        is_choice = typing.get_origin(hint) is typing.Literal or isinstance(hint, enum.EnumMeta)
        values = [one for bound in bounds for one in beyond(bound) if one != "" or not fact.optional]
        for value in [*values, *([0, 99] if is_choice else [])]:
            yield partial(_put, name, value, is_item)
    if parts[0][-1]:
        for count in (len(value) for bound in fact.bounds for value in beyond(bound)):
            yield partial(_repeat, [name for name, *_ in parts], count)


def _put(name: str, value: object, is_item: bool, message: Any) -> None:  # noqa: ANN401
    if is_item:
        getattr(message, name)[0] = value
    else:
        setattr(message, name, value)


def _repeat(names: list[str], count: int, message: Any) -> None:  # noqa: ANN401
    for name in names:
        items = getattr(message, name)
        first = items[0]
        del items[:]
        items.extend([first] * count)


def _within(place: Place, name: str, is_item: bool, message: Any) -> Any:  # noqa: ANN401
    found = getattr(place(message), name)
    return found[0] if is_item else found
