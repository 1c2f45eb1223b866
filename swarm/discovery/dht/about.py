"""What a peer of the directory speaks: asked by everyone who joins, so that two releases that cannot meet say so.

A swarm of another format lies under other keys, and a machine that looked there would find nothing and not know why.
The handler's name, an empty request and the first three places of the answer never change; later releases add more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from swarm.discovery.node_record import FORMAT
from swarm.runtime.plain_text import plain_line
from swarm.runtime.version import UPDATE, VERSION

HANDLER: Final = "canopy/about"
ASK_S: Final = 3.0
"""How long a peer may take to say it; one that says nothing may be of a release that could not yet."""
MAX_ASKED: Final = 3
"""Peers that are asked: of those that this machine joins through, the first."""
MAX_BYTES: Final = 1_024
WIRE: Final = 1
"""Of sessions' messages: the number in `swarm.wire.v1`."""
_MAX_VERSIONS: Final = 16


@dataclass(frozen=True, slots=True)
class About:
    """What a program speaks.

    Attributes:
        release: its version, at most 32 characters, printable.
        formats: of the directory's records.
        wires: of sessions' messages.
    """

    release: str
    formats: tuple[int, ...]
    wires: tuple[int, ...]


OURS: Final = About(VERSION, (FORMAT,), (WIRE,))


def pack_about() -> bytes:
    """The answer to everyone who asks."""
    packed: bytes = msgpack.packb([OURS.release, list(OURS.formats), list(OURS.wires)])
    return packed


def parse_about(data: bytes) -> About | None:
    """Read an answer; None where it is none."""
    if len(data) > MAX_BYTES:
        return None
    try:
        values: Any = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException):
        return None
    match values:
        case [str(release), [*formats], [*wires], *_] if _are_versions(formats) and _are_versions(wires):
            return About(plain_line(release[:32]), tuple(formats), tuple(wires))
        case _:
            return None


def refusal(answers: Sequence[About]) -> str | None:
    """Why this program cannot take part, and which side is to be updated; None where one of those asked understands it.

    Args:
        answers: of peers that said what they speak; those that said nothing may be older, and speak as we do.
    """
    refusals = [text for one in answers if (text := _disagreement(one, OURS)) is not None]
    return refusals[0] if refusals and len(refusals) == len(answers) else None


def _disagreement(theirs: About, ours: About) -> str | None:
    for what, there, here in (("records", theirs.formats, ours.formats), ("messages", theirs.wires, ours.wires)):
        if set(there) & set(here):
            continue
        side = f"update this machine ({UPDATE})" if max(there) > max(here) else "its machines are to be updated"
        return (
            f"this swarm runs release {theirs.release}, with {what} of format {_listed(there)}; this machine runs "
            f"{ours.release}, with format {_listed(here)}: {side}"
        )
    return None


def _are_versions(values: Sequence[object]) -> bool:
    return 0 < len(values) <= _MAX_VERSIONS and all(type(one) is int and 0 <= one < 2**31 for one in values)


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))
