"""The words that `--help` shows for a value, one alias per kind, and the headings of long lists. Never parses anything.

A field says its kind by its type, `folder: Folder | None`; a class says its headings with `headed`. `swarm.base.cli`
reads both. Outside a command line an alias is the type that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import tyro

OptionsClass = TypeVar("OptionsClass", bound=type)
_Value = TypeVar("_Value")

_ATTRIBUTE: Final = "__option_headings__"


@dataclass(frozen=True, slots=True)
class Word:
    """What stands in `--help` for a value."""

    text: str


@dataclass(frozen=True, slots=True)
class NoOption:
    """Marks a field that is no option: it is filled in once the options were read."""


Found = Annotated[_Value, NoOption()]
"""A field's type where no option sets it."""
Text = Annotated[str, Word("TEXT")]
Name = Annotated[str, Word("NAME")]
Model = Annotated[str, Word("MODEL")]
"""A hub id, a folder, or a name or fingerprint of a swarm's model, as the option says."""
Revision = Annotated[str, Word("REVISION")]
Fingerprint = Annotated[str, Word("FINGERPRINT")]
Layers = Annotated[str, Word("START-END")]
DeviceName = Annotated[str, Word("DEVICE")]
Peer = Annotated[str, Word("PEER")]
"""A multiaddress, an invite or a peer id, as the option says."""
OwnParts = Annotated[str, Word("first:N,last:N")]
Host = Annotated[str, Word("HOST")]
HostPort = Annotated[str, Word("HOST:PORT")]
Relay = Annotated[str, Word("auto|off|HOST:PORT")]
Url = Annotated[str, Word("URL")]
File = Annotated[Path, Word("FILE")]
Folder = Annotated[Path, Word("FOLDER")]
Port = Annotated[int, Word("PORT")]
Count = Annotated[int, Word("N")]
Number = Annotated[float, Word("NUMBER")]
Probability = Annotated[float, Word("PROBABILITY")]
Seconds = Annotated[float, Word("SECONDS")]
Milliseconds = Annotated[float, Word("MS")]
Insecure = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.arg(help="plain text on the links of a swarm on this machine's loopback; all its programs need it"),
]
"""Whether machines that announce no certificate are dialled: everywhere else, links are encrypted or not made."""
NetworkKeyFile = Annotated[
    Path | None,
    Word("FILE"),
    tyro.conf.arg(help="file of a private swarm's network key; an invite brings it along, and it is remembered"),
]
"""Which members of a private swarm have, and nobody else."""
MegabitsPerSecond = Annotated[float, Word("MBIT")]
LanMode = Literal["yes", "no", "ask"]
"""Whether a swarm that the local network announces is joined."""
MegabytesPerSecond = Annotated[float, Word("MB")]
DayTimes = Annotated[str, Word("HH:MM-HH:MM")]


def headed(**headings: tuple[str, ...]) -> Callable[[OptionsClass], OptionsClass]:
    """Name the headings under which `--help` lists a dataclass's options, in this order.

    An option under no heading comes before them. A field that is a dataclass has its own headings, and stands for them
    in the order.

    Raises:
        TypeError: there is no such field.
    """

    def mark(options: OptionsClass) -> OptionsClass:
        unknown = {name for names in headings.values() for name in names} - {field.name for field in fields(options)}
        if unknown:
            raise TypeError(f"{options.__name__} has no {', '.join(sorted(unknown))}")
        setattr(options, _ATTRIBUTE, headings)
        return options

    return mark


def headings_of(options: type[Any]) -> Mapping[str, tuple[str, ...]]:
    """The headings of a class, and the fields under each."""
    found: Mapping[str, tuple[str, ...]] = getattr(options, _ATTRIBUTE, {})
    return found
