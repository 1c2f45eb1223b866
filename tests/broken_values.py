"""What a declaration refuses: something written, with one part of it replaced by a value outside of its declaration."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Iterator
from typing import Any

from swarm.base.declared import Bound, Fact, Size, bare, facts
from tests.declarations import beyond

Broken = tuple[str, Any]
"""Name of the part at fault, and what is written instead."""

_OF_OTHER_TYPES: dict[Any, tuple[Any, ...]] = {
    int: (True, 1.5, "1", b"1", []),
    float: (True, "1", [], float("nan"), float("inf"), float("-inf")),
    bool: (1, "true", []),
    str: (7, b"x", [], True),
    bytes: (7, ["x"]),
}


def broken_facts(kind: Any, written: Any, *, is_json: bool = False) -> Iterator[Broken]:  # noqa: ANN401
    """Every way in which one part of what was written of a declaration can break it.

    Args:
        kind: the declaration.
        written: a list of its fields, or a JSON object of them.
        is_json: then null stands for what has a default, and a whole number for a float.
    """
    sent = [fact for fact in facts(kind) if not fact.written.not_sent]
    for place, fact in enumerate(sent):
        if fact.written.inline:
            yield from broken_facts(fact.hint, written, is_json=True)
            continue
        at = place if isinstance(written, list) else fact.written.name or fact.name
        for name, value in _broken(fact, (fact.hint, fact.bounds), written[at], is_json):
            yield fact.name if fact.written.as_one else name, _replaced(written, at, value)
        if not fact.optional and (not is_json or fact.default is dataclasses.MISSING):
            yield fact.name, _replaced(written, at, None)


def _broken(fact: Fact, declared: tuple[Any, tuple[Bound, ...]], written: Any, is_json: bool) -> Iterator[Broken]:  # noqa: ANN401
    """Ways for one value, or item of it."""
    hint, bounds = declared
    if typing.get_origin(hint) is tuple:
        yield from ((fact.name, odd) for odd in (7, "x", {"x": 1}))
        yield from ((fact.name, [None] * (bound.most + 1)) for bound in bounds if isinstance(bound, Size))
        args = typing.get_args(hint)
        for place, item in enumerate(written or ()):
            arg = args[0] if args[-1] is ... else args[place]
            for name, value in _broken(fact, bare(arg)[:2], item, is_json):
                yield name, _replaced(written, place, value)
        if args[-1] is not ... and written:
            yield fact.name, written[:-1]
    elif dataclasses.is_dataclass(hint):
        yield from ((fact.name, odd) for odd in (7, "x", True))
        if written is not None:
            yield from broken_facts(hint, written, is_json=is_json)
    elif issubclass(hint, enum.Enum):
        yield from ((fact.name, odd) for odd in ("no such one", 7, ["x"], True))
    else:
        made: Callable[[Any], Any] = float if hint is float else lambda value: value
        further = () if hint is not float or is_json else (1,)
        yield from ((fact.name, odd) for odd in (*_OF_OTHER_TYPES[hint], *further))
        yield from ((fact.name, made(value)) for bound in bounds if isinstance(bound, Bound) for value in beyond(bound))


def _replaced(written: Any, at: Any, value: Any) -> Any:  # noqa: ANN401
    copy = written.copy()
    copy[at] = value
    return copy
