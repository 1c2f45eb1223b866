"""A fact that leaves the process is declared once: a frozen dataclass whose annotations carry its bounds.

    tokens: Annotated[int, below(TOKEN_END)]            route: Annotated[tuple[RouteHop, ...], Size(MAX_HOPS, 1)]

What is written, what is refused and the reference table come from these annotations. A form writes facts of one class:
`ProtoForm` as the protobuf message of the same field names, `ListForm` as a list for msgpack, in which fields are only
ever added at the end, `JsonForm` as a JSON object. What a later release adds is read past. Rules across fields are a
method `check(self) -> None` of the class, which raises `Broken`; writing checks nothing (see `Form.check`).
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
import types
import typing
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass
from functools import lru_cache, partial
from itertools import pairwise
from operator import index
from typing import Any, Final, Generic, NamedTuple, TypeVar

from swarm.base.errors import LayersError, ProtocolError, RemoteProtocolError
from swarm.base.version import unknown_here

T = TypeVar("T")
Put = Callable[[Any], Any]
"""A checked value to what is written."""
Get = Callable[[Any], Any]
"""What was read, trusted in nothing, to a value; raises `Broken`."""


class Broken(Exception):
    """A value that breaks its declaration; a form raises its room's own error instead.

    Attributes:
        field: the part at fault.
        reason: what is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


# Bounds: `says` is the text in tables, `problem` is what is wrong with a value.


@dataclass(frozen=True, slots=True)
class Within:
    """A number in `[low, high]`, so neither infinite nor NaN."""

    low: float
    high: float

    @property
    def says(self) -> str:
        is_limit = isinstance(self.high, int) and self.high >= 1 << 31 and (self.high & (self.high + 1)) == 0
        return f"{self.low} … {f'2^{int(self.high).bit_length()} - 1' if is_limit else self.high}"

    def problem(self, value: Any) -> str | None:
        return None if self.low <= value <= self.high else f"{value} is not in {self.says}"


def below(end: int) -> Within:
    """A whole number in `[0, end)`."""
    return Within(0, end - 1)


@dataclass(frozen=True, slots=True)
class Printable:
    """Printable text, no line ends.

    Attributes:
        most: characters, at most.
        least: characters, at least.
        form: what the whole text must match; None for any.
        cut: what does not fit is cut, and what is not printable replaced, where it is written.
    """

    most: int
    least: int = 0
    form: re.Pattern[str] | None = None
    cut: bool = False

    @property
    def says(self) -> str:
        span = f"{self.least} … {self.most}" if self.least else f"at most {self.most}"
        return f"printable, {span} characters" + (f", as `{self.form.pattern}`" if self.form else "")

    def problem(self, value: str) -> str | None:
        if not self.least <= len(value) <= self.most:
            return f"{len(value)} characters, the limit is {self.most}" if value else "is empty"
        if not value.isprintable():
            return "must be printable"
        return None if self.form is None or self.form.fullmatch(value) else f"{value!r} has not the form of one"


@dataclass(frozen=True, slots=True)
class Size:
    """How many bytes, or items of a tuple: these are counted before any of them is read."""

    most: int
    least: int = 0

    @property
    def says(self) -> str:
        return f"{self.most}" if self.least == self.most else f"{self.least} … {self.most}"

    def problem(self, value: Sequence[Any]) -> str | None:
        count = len(value)
        if self.least <= count <= self.most:
            return None
        if count <= self.most or self.least == self.most:
            return f"{count} instead of {self.says}"
        return f"{count} are too many, the limit is {self.most}"


def exactly(size: int) -> Size:
    """So many bytes."""
    return Size(size, size)


@dataclass(frozen=True, slots=True)
class Rule:
    """Any other law; `says` is what a value must be."""

    says: str
    holds: Callable[[Any], bool]

    def problem(self, value: Any) -> str | None:
        return None if self.holds(value) else f"must be {self.says}"


RISING = Rule("rising", lambda values: all(one < other for one, other in pairwise(values)))
RISING_PAIRS = Rule("rising", lambda pairs: all(one[0] < other[0] for one, other in pairwise(pairs)))
Bound = Within | Printable | Size | Rule


@dataclass(frozen=True, slots=True)
class Written:
    """How a field is written where that is not under its own name, as what it is here."""

    name: str = ""  # in messages and objects
    columns: tuple[str, str] | None = None  # a tuple of pairs is two lists of a protobuf message
    hex: bool = False  # a text of hex digits is bytes in a protobuf message
    inline: bool = False  # in a JSON object, the value's fields stand among the others
    as_list: bool = False  # in a JSON object, the value is a list of its fields
    as_one: bool = False  # errors name this field, whatever part of its value is at fault
    not_sent: bool = False  # its value is an argument of `Form.decode`, or the default


class Fact(NamedTuple):
    """One field of a declaration."""

    name: str
    hint: Any  # its type, without bounds and without None
    bounds: tuple[Bound, ...]
    written: Written
    optional: bool  # whether it may be None
    default: Any  # `MISSING` where it must be there
    doc: str  # its line of the class's docstring


def bare(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """A type without annotations, None and NewType; its annotations; and whether it may be None."""
    marks: tuple[Any, ...] = ()
    optional = False
    while True:
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            hint, marks = hint.__origin__, (*marks, *hint.__metadata__)
        elif origin in (typing.Union, types.UnionType):
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
            optional = True
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        else:
            return hint, marks, optional


@lru_cache(None)
def facts(kind: Any) -> tuple[Fact, ...]:
    """The fields of a declaration, in order."""
    hints, found = typing.get_type_hints(kind, include_extras=True), []
    docs = {name: " ".join(doc.split()) for name, doc in re.findall(_ATTRIBUTE, kind.__doc__ or "")}
    for field in dataclasses.fields(kind):
        hint, marks, optional = bare(hints[field.name])
        written = next((mark for mark in marks if isinstance(mark, Written)), Written())
        bounds = tuple(mark for mark in marks if isinstance(mark, Bound))
        default = field.default if field.default_factory is MISSING else field.default_factory()
        found.append(Fact(field.name, hint, bounds, written, optional, default, docs.get(field.name, "")))
    return tuple(found)


_ATTRIBUTE = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)


def table(kind: type) -> list[tuple[str, str, str, str]]:
    """Rows of a reference table: name, type, bounds and doc of each field that travels."""
    rows = []
    for fact in facts(kind):
        bounds = [bound.says for bound in fact.bounds]
        if not fact.written.not_sent:
            optional = " or none" if fact.optional else ""
            rows.append((fact.written.name or fact.name, _type_name(fact.hint) + optional, "; ".join(bounds), fact.doc))
    return rows


def _type_name(hint: Any) -> str:
    args = [part for part in typing.get_args(bare(hint)[0]) if part is not ...]
    if not args:
        return str(bare(hint)[0].__name__)
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(args)}"
    names = [_type_name(part) for part in args]
    return f"list of {names[0]}" if len(names) == 1 else f"({', '.join(names)})"


def one_line(text: str, limit: int) -> str:
    """The text as it may travel: at most `limit` characters, those that are not printable replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text[:limit])


def _same(value: Any) -> Any:
    return value


def _guarded(get: Get, bounds: Iterable[Bound], name: str) -> Get:
    """What reads a value and holds it to its bounds."""
    for bound in bounds:
        get = _held(get, bound, name)
    return get


def _held(get: Get, bound: Bound, name: str) -> Get:
    problem = bound.problem

    def held(raw: Any) -> Any:
        value = raw if get is _same else get(raw)
        if (why := problem(value)) is not None:
            raise Broken(name, why)
        return value

    return held


class Form(Generic[T]):
    """One way to write facts of one class.

    Args:
        kind: the class.
        error: what a reader raises, with the field and the reason.
        name: what an error names where no field is at fault.
    """

    def __init__(self, kind: type[T], error: type[ProtocolError] = RemoteProtocolError, name: str = "data") -> None:
        declared: Any = kind
        self.kind, self.error, self.name = kind, error, name
        self.facts = tuple(fact for fact in facts(declared) if not fact.written.not_sent)
        self.given = {fact.name: fact.default for fact in facts(declared) if fact.written.not_sent}
        self._check: Callable[[T], None] | None = getattr(kind, "check", None)
        self._codecs = [(fact, *self._codec(fact)) for fact in self.facts]

    def encode(self, value: T) -> Any:
        """What is written for a value."""
        raise NotImplementedError

    def decode(self, raw: Any, **given: Any) -> T:
        """The value that was written, held to every bound and to `check`.

        Args:
            raw: as it was read.
            given: values of fields that are not sent.

        Raises:
            ProtocolError: of this form's kind, with the field that breaks its declaration.
        """
        try:
            return self.read(raw, given)
        except Broken as broken:
            raise self.error(broken.field, broken.reason) from None

    def check(self, value: T) -> T:
        """A value of this program as its readers will have it.

        Raises:
            ProtocolError: as `decode`.
        """
        return self.decode(self.encode(value), **{name: getattr(value, name) for name in self.given})

    def read(self, raw: Any, given: dict[str, Any]) -> T:
        """`decode`, which raises `Broken`."""
        values = self._values(raw)
        if self.given:
            values |= self.given | given
        value = self.kind(**values)
        if self._check is not None:
            self._check(value)
        return value

    def _values(self, raw: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _absent(self, fact: Fact) -> Any:
        if fact.default is MISSING and not fact.optional:
            raise Broken(fact.name, "is missing")
        return None if fact.default is MISSING else fact.default

    # How a value of each type is written; a protobuf message has types of its own, others come as lists and scalars.

    def _codec(self, fact: Fact) -> tuple[Put, Get]:
        put, get = self._value(fact.hint, fact.bounds, fact)
        cut = next((bound.most for bound in fact.bounds if isinstance(bound, Printable) and bound.cut), None)
        return (put if cut is None else partial(one_line, limit=cut)), get

    def _value(self, hint: Any, bounds: Sequence[Bound], fact: Fact) -> tuple[Put, Get]:
        """How a field, or an item of it, is written and read."""
        if typing.get_origin(hint) is tuple:
            put, get = self._tuple(typing.get_args(hint), bounds, fact)
            return put, _guarded(get, [bound for bound in bounds if not isinstance(bound, Size)], fact.name)
        if typing.get_origin(hint) is typing.Literal:
            put, get = self._choice({name: (name.upper(), name) for name in typing.get_args(hint)}, fact)
        elif issubclass(hint, enum.Enum):
            put, get = self._choice({one: (one.name, one.value) for one in hint}, fact)
        elif dataclasses.is_dataclass(hint):
            put, get = self._nested(hint, fact)
        else:
            put, get = self._scalar(hint, bounds, fact)
        return put, _guarded(get, bounds, fact.name)

    def _tuple(self, args: tuple[Any, ...], bounds: Sequence[Bound], fact: Fact) -> tuple[Put, Get]:
        is_any = args[-1] is ...
        codecs = [self._value(*bare(arg)[:2], fact) for arg in (args[:1] if is_any else args)]
        puts, gets = [put for put, _ in codecs], [get for _, get in codecs]
        sizes = [bound for bound in bounds if isinstance(bound, Size)] if is_any else [exactly(len(gets))]
        listed = _guarded(self._listed(fact), sizes, fact.name)
        if is_any:
            put_one, get_one = puts[0], gets[0]
            return (
                lambda items: [put_one(item) for item in items],
                lambda raw: tuple([get_one(item) for item in listed(raw)]),
            )
        return (
            lambda items: [put(item) for put, item in zip(puts, items, strict=True)],
            lambda raw: tuple([get(item) for get, item in zip(gets, listed(raw), strict=True)]),
        )

    def _listed(self, fact: Fact) -> Get:
        return _typed(fact, lambda raw: isinstance(raw, list), "a list")

    def _scalar(self, hint: Any, bounds: Sequence[Bound], fact: Fact) -> tuple[Put, Get]:
        puts: dict[Any, Put] = {float: float, int: index}
        return puts.get(hint, _same), _typed(fact, *_SCALARS[hint])

    def _choice(self, kinds: dict[Any, tuple[str, Any]], fact: Fact) -> tuple[Put, Get]:
        """One of some kinds, each with its name and its value."""
        return _chosen({kind: value for kind, (_, value) in kinds.items()}, kinds, fact)

    def _nested(self, kind: Any, fact: Fact) -> tuple[Put, Get]:
        form = type(self)(kind, self.error, fact.name)
        return form.encode, _read_by(form, fact)


class ProtoForm(Form[T]):
    """A declaration as the protobuf message of the same field names.

    Args:
        kind: the class.
        message: the generated class.
        error: what a reader raises.
    """

    def __init__(self, kind: type[T], message: Any, error: type[ProtocolError] = RemoteProtocolError) -> None:
        self.message = message
        super().__init__(kind, error, message.DESCRIPTOR.name)
        self._writes = [
            (fact.name, fact.written.name or fact.name, None if put is _same else put, fact.written.columns)
            for fact, put, _ in self._codecs
        ]
        self._reads = [
            (fact, fact.name, fact.written.name or fact.name, None if get is _same else get, fact.written.columns)
            + ((False, False) if fact.written.columns else (bool(self._field(fact).has_presence), fact.optional))
            for fact, _, get in self._codecs
        ]

    def encode(self, value: T) -> Any:
        """The message."""
        written: dict[str, Any] = {}
        for name, place, put, columns in self._writes:
            item = getattr(value, name)
            if item is None:
                continue
            if columns is None:
                written[place] = item if put is None else put(item)
            else:
                written.update(zip(columns, zip(*item, strict=True), strict=False))
        return self.message(**written)

    def _values(self, raw: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for fact, name, place, get, columns, has_presence, optional in self._reads:
            if has_presence and not raw.HasField(place):
                values[name] = self._absent(fact)
                continue
            item = getattr(raw, place) if columns is None else _pairs(raw, fact)
            if optional and not has_presence and not item:
                values[name] = None
            else:
                values[name] = item if get is None else get(item)
        return values

    def _field(self, fact: Fact) -> Any:
        return self.message.DESCRIPTOR.fields_by_name[fact.written.name or fact.name]

    def _listed(self, fact: Fact) -> Get:
        return _same

    def _scalar(self, hint: Any, bounds: Sequence[Bound], fact: Fact) -> tuple[Put, Get]:
        if fact.written.hex:
            return bytes.fromhex, bytes.hex
        is_free = hint is float and not any(isinstance(bound, Within) for bound in bounds)
        return _same, _typed(fact, *_SCALARS[float]) if is_free else _same

    def _choice(self, kinds: dict[Any, tuple[str, Any]], fact: Fact) -> tuple[Put, Get]:
        numbered = self._field(fact).enum_type
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", numbered.name).upper()
        numbers = {kind: numbered.values_by_name[f"{prefix}_{name}"].number for kind, (name, _) in kinds.items()}
        return _chosen(numbers, kinds, fact)

    def _nested(self, kind: Any, fact: Fact) -> tuple[Put, Get]:
        from google.protobuf.message_factory import GetMessageClass  # who declares no message imports no protobuf

        form: Form[Any] = ProtoForm(kind, GetMessageClass(self._field(fact).message_type), self.error)
        return form.encode, _read_by(form, fact)


def _pairs(message: Any, fact: Fact) -> list[tuple[Any, Any]]:
    """What two lists of a message hold together."""
    names = fact.written.columns or ("", "")
    one, other = (getattr(message, name) for name in names)
    for bound in fact.bounds:
        if isinstance(bound, Size) and (why := bound.problem(one)) is not None:
            raise Broken(fact.name, why)
    if len(one) != len(other):
        raise Broken(fact.name, f"{len(other)} {names[1]} of {len(one)}")
    return list(zip(one, other, strict=True))


class ListForm(Form[T]):
    """A declaration as a list for msgpack: a shorter one leaves fields at the end at their defaults."""

    def encode(self, value: T) -> list[Any]:
        """The list."""
        items = ((getattr(value, fact.name), put) for fact, put, _ in self._codecs)
        return [None if item is None else put(item) for item, put in items]

    def _values(self, raw: Any) -> dict[str, Any]:
        if not isinstance(raw, list):
            raise Broken(self.name, "must be a list")
        values = {fact.name: self._absent(fact) for fact in self.facts[len(raw) :]}
        for item, (fact, _, get) in zip(raw, self._codecs, strict=False):
            values[fact.name] = None if item is None and fact.optional else get(item)
        return values


class JsonForm(Form[T]):
    """A declaration as a JSON object; bytes are base64."""

    def encode(self, value: T) -> dict[str, Any]:
        """The object."""
        written: dict[str, Any] = {}
        for fact, put, _ in self._codecs:
            item = getattr(value, fact.name)
            if fact.written.inline:
                written |= put(item)
            else:
                written[fact.written.name or fact.name] = None if item is None else put(item)
        return written

    def _values(self, raw: Any) -> dict[str, Any]:
        if not isinstance(raw, dict):
            raise Broken(self.name, "must be a JSON object")
        values: dict[str, Any] = {}
        for fact, _, get in self._codecs:
            item = raw if fact.written.inline else raw.get(fact.written.name or fact.name)
            values[fact.name] = self._absent(fact) if item is None else get(item)
        return values

    def _scalar(self, hint: Any, bounds: Sequence[Bound], fact: Fact) -> tuple[Put, Get]:
        if hint is float:
            check = _typed(fact, lambda raw: type(raw) in (int, float) and abs(raw) <= _LARGEST, "a finite number")
            return float, lambda raw: float(check(raw))
        if hint is bytes:
            return lambda data: b64encode(data).decode(), _typed(fact, _is_base64, "base64", b64decode)
        return super()._scalar(hint, bounds, fact)

    def _nested(self, kind: Any, fact: Fact) -> tuple[Put, Get]:
        form: Form[Any] = (ListForm if fact.written.as_list else JsonForm)(kind, self.error, fact.name)
        return form.encode, _read_by(form, fact)


def _typed(fact: Fact, fits: Callable[[Any], bool], what: str, made: Put = _same) -> Get:
    def get(raw: Any) -> Any:
        if not fits(raw):
            raise Broken(fact.name, f"must be {what}")
        return made(raw)

    return get


def _chosen(written: dict[Any, Any], kinds: dict[Any, tuple[str, Any]], fact: Fact) -> tuple[Put, Get]:
    """Kinds as they are written; one that is not known here may be one of a later release."""
    read = {item: kind for kind, item in written.items()}
    names = ", ".join(str(value) for _, value in kinds.values())

    def get(raw: Any) -> Any:
        if not isinstance(raw, str | int) or raw not in read:
            shown = raw if type(raw) is int else repr(raw[:32] if isinstance(raw, str) else type(raw).__name__)
            raise Broken(fact.name, f"{unknown_here(f'{fact.name} {shown}')}; it has {names}")
        return read[raw]

    return (lambda kind: written.get(kind, kind)), get


def _read_by(form: Form[Any], fact: Fact) -> Get:
    def get(raw: Any) -> Any:
        try:
            return form.read(raw, {})
        except LayersError as error:
            raise Broken(fact.name, str(error)) from None
        except Broken as broken:
            if fact.written.as_one:
                raise Broken(fact.name, str(broken)) from None
            raise

    return get


def _is_base64(raw: Any) -> bool:
    return isinstance(raw, str) and len(raw) % 4 == 0 and re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", raw) is not None


_LARGEST: Final = sys.float_info.max
_SCALARS: Final[dict[Any, tuple[Callable[[Any], bool], str]]] = {
    int: (lambda raw: type(raw) is int, "a whole number"),
    float: (lambda raw: type(raw) is float and abs(raw) <= _LARGEST, "a finite number"),
    bool: (lambda raw: type(raw) is bool, "true or false"),
    str: (lambda raw: isinstance(raw, str), "text"),
    bytes: (lambda raw: isinstance(raw, bytes), "bytes"),
}
