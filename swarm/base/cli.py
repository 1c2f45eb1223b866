"""How every command reads its options, explains them and prints: values and defaults in words, options under headings.

Owns what tyro shows, and how wide; a command owns what its options mean. Options are dataclasses whose kinds and
headings are said with `swarm.base.cli_types`. On a terminal tables fit it; in a pipe or a file every cell stays
whole on its line.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from types import NoneType, UnionType
from typing import IO, Annotated, Any, Final, Union, get_args, get_origin

import tyro
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from swarm.base.cli_types import NoOption, Word, headings_of
from swarm.base.plain_text import plain

UNBOUNDED = 10_000
"""Columns where no terminal looks: more than any table of ours has. A table is no wider than its cells ask for."""


class PlainConsole(Console):
    """A console on which text is only ever text: no control, no markup, no emoji code in it means anything."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich renders, with every text plain; colours and cursor movements are rich's own, and stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """A reader that went away is the program's to know: `swarm.base.program`."""
        raise


def make_console(file: IO[str] | None = None, *, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that writes to `file`; to standard output or standard error if none is named.

    soft_wrap is rich's. Numbers and names are not coloured.
    """
    stream = file if file is not None else sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNBOUNDED
    return PlainConsole(
        file=file, stderr=stderr, width=width, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False
    )


_NUMBERS: Final[Mapping[type, str]] = {int: "a whole number", float: "a number"}
_DEFAULT: Final = " (default: "
_GROUP: Final = "under_"
"""What tells a heading from an option of the same name."""
_REPEATED: Final = "; may be repeated"


class _PlainWords:
    """A rule of tyro's for dataclasses: its own, with other words, and with a group for each heading."""

    def __init__(self) -> None:
        self._groups: dict[type, StructConstructorSpec] = {}
        self._is_asking = False

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type in self._groups:
            return self._groups[info.type]
        if self._is_asking or not is_dataclass(info.type):
            return None
        self._is_asking = True
        try:
            plain = ConstructorRegistry.get_struct_spec(info)
        finally:
            self._is_asking = False
        assert isinstance(plain, StructConstructorSpec), "a dataclass"
        options = [
            field for field in plain.fields if not any(isinstance(one, NoOption) for one in _markers(field.type))
        ]
        return self._grouped(info.type, replace(plain, fields=tuple(map(_worded, options))))

    def _grouped(self, options: type, plain: StructConstructorSpec) -> StructConstructorSpec:
        by_name = {field.name: field for field in plain.fields}
        groups: list[StructFieldSpec] = []
        for heading, names in headings_of(options).items():
            held = tuple(by_name.pop(name) for name in names)
            groups += held if any(is_dataclass(_bare(one.type)) for one in held) else [self._group(heading, held)]

        def make(**values: Any) -> Any:  # noqa: ANN401 - whatever the dataclass is
            for name in [name for name in values if name.startswith(_GROUP)]:
                values |= values.pop(name)
            return plain.instantiate(**values)

        make.__doc__ = options.__doc__
        return StructConstructorSpec(make, (*by_name.values(), *groups))

    def _group(self, heading: str, held: tuple[StructFieldSpec, ...]) -> StructFieldSpec:
        group = type(heading, (), {})
        self._groups[group] = StructConstructorSpec(dict, held)
        kind: Any = Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=heading)]
        return StructFieldSpec(name=f"{_GROUP}{heading}", type=kind, default=tyro.MISSING_NONPROP, helptext="")


def fit(table: Table, console: Console) -> bool:
    """Leave the lines out of a table that is too wide for its terminal; whether it is."""
    wide = console.options.update(width=UNBOUNDED, max_width=UNBOUNDED)
    if Measurement.get(console, wide, table).maximum <= console.width:
        return True
    table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    return False


def plain_words() -> ConstructorRegistry:
    """What a command gives to `tyro.cli` as `registry`."""
    registry = ConstructorRegistry()
    registry.struct_rule(_PlainWords())
    registry.primitive_rule(_number)
    return registry


def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A rule of tyro's for numbers and optional numbers: its own, with an error that does not speak of types."""
    kinds = {_bare(one) for one in get_args(info.type)} if info.type_origin in (Union, UnionType) else {info.type}
    number = next((one for one in (int, float) if one in kinds), None)
    if number is None or kinds - {number, NoneType}:
        return None

    def read(words: list[str]) -> float | None:
        if words == ["None"] and NoneType in kinds:
            return None
        try:
            return number(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} is not {_NUMBERS[number]}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="N" if number is int else "NUMBER",
        instance_from_str=read,
        is_instance=lambda value: value is None or (isinstance(value, int | number) and not isinstance(value, bool)),
        str_from_instance=lambda value: [str(value)],
    )


def _worded(field: StructFieldSpec) -> StructFieldSpec:
    """A field whose value and default are shown in words."""
    if is_dataclass(_bare(field.type)):
        return field
    said = _Sentence(field)
    shown = tyro.conf.arg(
        metavar=_metavar(field.type, said.is_required), help_behavior_hint=None if said.is_required else said.hint
    )
    kind: Any = Annotated[field.type, shown]
    return replace(field, type=kind, helptext=said.text)


@dataclass(frozen=True)
class _Sentence:
    """What a field's docstring says, parted into sentence and default; tyro asks when it shows them."""

    field: StructFieldSpec

    @property
    def is_repeated(self) -> bool:
        return tyro.conf.UseAppendAction in _markers(self.field.type)

    @property
    def is_required(self) -> bool:
        return self.field.default in (tyro.MISSING, tyro.MISSING_NONPROP) and not self.is_repeated

    def text(self) -> str:
        """On one line and without its full stop, since the default follows."""
        text, default = self._parts
        return text if default or not self.is_repeated else text.removesuffix(_REPEATED)

    def hint(self, _: str) -> str:
        """The default as the docstring gives it, else its value."""
        return self._parts[1] or ("(repeatable)" if self.is_repeated else f"(default: {_valued(self.field.default)})")

    @property
    def _parts(self) -> tuple[str, str]:
        told = self.field.helptext() if callable(self.field.helptext) else self.field.helptext
        text = " ".join((told or "").split()).removesuffix(".")
        start = text.rfind(_DEFAULT)
        is_last = start >= 0 and text.endswith(")")
        return (text[:start], text[start + 1 :]) if is_last else (text, "")


def _valued(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case None | ():
            return "none"
        case enum.Enum():
            return str(value.value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _metavar(kind: Any, is_required: bool) -> str | None:  # noqa: ANN401 - a type, annotated or not
    word = next(_words(kind), None)
    if word is None:
        return None
    if tyro.conf.Positional in _markers(kind):
        return word if is_required else f"[{word}]"
    is_list = get_origin(_bare(kind)) is tuple and tyro.conf.UseAppendAction not in _markers(kind)
    return f"[{word} …]" if is_list else word


def _words(kind: Any) -> Iterator[str]:  # noqa: ANN401
    """The words within a type, as in `tuple[Peer, ...]` or `Folder | None`."""
    if isinstance(kind, Word):
        yield kind.text
    for part in get_args(kind):
        yield from _words(part)


def _markers(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def _bare(kind: Any) -> Any:  # noqa: ANN401
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
