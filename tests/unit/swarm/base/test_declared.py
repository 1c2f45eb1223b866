"""Facts that are declared once: each form writes what it reads, and refuses by name what breaks its declaration."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgpack
import pytest
from hypothesis import given

from swarm.base.declared import (
    RISING,
    Broken,
    JsonForm,
    ListForm,
    Printable,
    Size,
    Within,
    Written,
    below,
    exactly,
    table,
)
from swarm.base.errors import RemoteProtocolError
from swarm.base.layers import Span
from tests.declarations import values_of


class Mood(enum.Enum):
    WARM = "warm"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Place:
    """Where.

    Attributes:
        name: what it is called, in letters
            of one case.
        rank: less is better.
    """

    name: Annotated[str, Printable(8, 1, re.compile("[a-z]+"))]
    rank: Annotated[int, below(5)] = 0


class FactError(RemoteProtocolError):
    """What this room raises."""


@dataclass(frozen=True, slots=True)
class Whole:
    """All types."""

    place: Place
    moods: Annotated[tuple[Mood, ...], Size(3)]
    pairs: tuple[tuple[Annotated[int, below(9)], float], ...]
    key: Annotated[bytes, exactly(4)]
    span: Span
    share: Annotated[float, Within(0.0, 1.0)]
    local: Annotated[str, Written(not_sent=True)] = "here"
    note: Annotated[str, Printable(20)] | None = None
    sizes: Annotated[tuple[int, ...], RISING] = ()
    kind: Literal["one", "two"] = "one"
    is_late: bool = False

    def check(self) -> None:
        if self.is_late and self.note is None:
            raise Broken("note", "says why it is late")


LISTED, JSON = ListForm(Whole, FactError), JsonForm(Whole, FactError)
WHOLE = Whole(Place("home", 2), (Mood.WARM,), ((1, 2.5),), b"four", Span(0, 4), 0.5)
AS_LIST = [["home", 2], ["warm"], [[1, 2.5]], b"four", [0, 4], 0.5, None, [], "one", False]


def test_a_list_has_the_fields_in_order() -> None:
    assert LISTED.encode(WHOLE) == AS_LIST
    assert LISTED.decode(AS_LIST) == WHOLE
    assert LISTED.decode(AS_LIST, local="there").local == "there"
    assert LISTED.decode(AS_LIST[:6]) == LISTED.decode([*AS_LIST, "later"]) == WHOLE


def test_an_object_has_them_by_name() -> None:
    written = JSON.encode(WHOLE)
    assert written["place"] == {"name": "home", "rank": 2}
    assert written["key"] == "Zm91cg=="
    assert JSON.decode(written) == WHOLE
    assert JSON.decode({**written, "share": 1, "later": 7}).share == 1.0
    for share in (10**400, True, float("inf")):
        with pytest.raises(FactError, match="share: must be a finite number"):
            JSON.decode({**written, "share": share})


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (0, ["HOME"], "name"), (0, ["home", 5], "rank"), (0, ["home", True], "rank"), (0, [], "name"), (0, 7, "place"),
        (1, ["warm"] * 4, "moods"), (1, ["tepid"], "moods"), (1, [["warm"]], "moods"), (1, "warm", "moods"),
        (2, [[1]], "pairs"), (2, [[9, 1.0]], "pairs"), (2, [[1, float("nan")]], "pairs"), (2, [[1, 2]], "pairs"),
        (3, b"five!", "key"), (3, "four", "key"), (4, [4, 4], "span"), (5, 1.01, "share"), (5, float("nan"), "share"),
        (6, "a\nb", "note"), (7, [2, 1], "sizes"), (8, "three", "kind"), (9, 1, "is_late"), (9, True, "note"),
    ],
)  # fmt: skip
def test_what_breaks_a_declaration_is_refused_by_name(place: int, value: object, field: str) -> None:
    broken: list[Any] = [*AS_LIST]
    broken[place] = value
    with pytest.raises(FactError) as caught:
        LISTED.decode(broken)
    assert caught.value.field == field


def test_what_is_missing_is_named() -> None:
    with pytest.raises(FactError, match="share: is missing"):
        LISTED.decode(AS_LIST[:5])
    with pytest.raises(FactError, match="place: is missing"):
        JSON.decode({})
    for form in (LISTED, JSON):
        with pytest.raises(FactError, match="data: must be"):
            form.decode("no")


def test_a_value_of_this_program_is_held_to_its_bounds() -> None:
    assert LISTED.check(WHOLE) == WHOLE
    with pytest.raises(FactError, match="key"):
        LISTED.check(Whole(Place("home"), (), (), b"long!", Span(0, 1), 0.5))


@given(values_of(Place))
def test_values_within_bounds_survive(place: Place) -> None:
    for form in (ListForm(Place), JsonForm(Place)):
        assert form.decode(msgpack.unpackb(msgpack.packb(form.encode(place)))) == place


def test_the_table_says_what_is_declared() -> None:
    assert table(Place) == [
        ("name", "str", "printable, 1 … 8 characters, as `[a-z]+`", "what it is called, in letters of one case."),
        ("rank", "int", "0 … 4", "less is better."),
    ]
    assert [row[:3] for row in table(Whole)][1:4] == [
        ("moods", "list of Mood", "0 … 3"),
        ("pairs", "list of (int, float)", ""),
        ("key", "bytes", "4"),
    ]
