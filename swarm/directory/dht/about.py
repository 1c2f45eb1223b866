"""What a peer of the directory speaks: asked by everyone who joins, so that two releases that cannot meet say so.

A swarm of another format lies under other keys, and a machine that looked there would find nothing and not know why.
The handler's name, an empty request and the first three places of the answer never change; later releases add more.
Behind them stand the peer's clock and the address from which the asker comes, for whoever looks for trouble, and the
id of the open swarm that it is of. Whoever asks says in its question which one it means, if it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from swarm.base.ids import SwarmId, as_swarm_id
from swarm.base.plain_text import plain_line
from swarm.base.quota import parse_ip
from swarm.base.version import UPDATE, VERSION
from swarm.directory.node_record import FORMAT

HANDLER: Final = "canopy/about"
ASK_S: Final = 3.0
"""How long a peer may take to say it; one that says nothing may be of a release that could not yet."""
MAX_BYTES: Final = 1_024
WIRE: Final = 1
"""Of sessions' messages: the number in `swarm.wire.v1`."""
UPDATE_HERE: Final = "update this machine"
UPDATE_THERE: Final = "its machines are to be updated"
"""With one of them a disagreement ends."""
_MAX_VERSIONS: Final = 16
_LATEST_S: Final = 1e11


@dataclass(frozen=True, slots=True)
class About:
    """What a program speaks.

    Attributes:
        release: its version, at most 32 characters, printable.
        formats: of the directory's records.
        wires: of sessions' messages.
        time: its clock when it said so, Unix seconds; None if it did not say.
        seen: IP address from which the asker comes, an IPv6 one up to its /64; empty if it did not say.
        swarm: the open swarm that it is of; None if it did not say, as in a private one.
    """

    release: str
    formats: tuple[int, ...]
    wires: tuple[int, ...]
    time: float | None = field(default=None, compare=False)
    seen: str = field(default="", compare=False)
    swarm: SwarmId | None = field(default=None, compare=False)


OURS: Final = About(VERSION, (FORMAT,), (WIRE,))


def pack_about(now: float = 0.0, seen: str = "", swarm: SwarmId | None = None) -> bytes:
    """The answer to everyone who asks.

    Args:
        now: Unix seconds; 0 where it is not said.
    """
    packed: bytes = msgpack.packb([OURS.release, list(OURS.formats), list(OURS.wires), now, seen, swarm])
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
        case [str(release), [*formats], [*wires], *more] if _are_versions(formats) and _are_versions(wires):
            return About(plain_line(release[:32]), tuple(formats), tuple(wires), *_clock_and_asker(more), _swarm(more))
        case _:
            return None


def refusal(answers: Sequence[About]) -> str | None:
    """Why this program cannot take part, and which side is to be updated; None where one of those asked understands it.

    Args:
        answers: of peers that said what they speak; those that said nothing may be older, and speak as we do.
    """
    refusals = [text for one in answers if (text := disagreement(one, OURS)) is not None]
    return refusals[0] if refusals and len(refusals) == len(answers) else None


def disagreement(theirs: About, ours: About = OURS) -> str | None:
    """Why two programs do not understand each other, and which side is to be updated; None if they do."""
    for what, there, here in (("records", theirs.formats, ours.formats), ("messages", theirs.wires, ours.wires)):
        if set(there) & set(here):
            continue
        side = f"{UPDATE_HERE} ({UPDATE})" if max(there) > max(here) else UPDATE_THERE
        return (
            f"this swarm runs release {theirs.release}, with {what} of format {_listed(there)}; this machine runs "
            f"{ours.release}, with format {_listed(here)}: {side}"
        )
    return None


def _are_versions(values: Sequence[object]) -> bool:
    return 0 < len(values) <= _MAX_VERSIONS and all(type(one) is int and 0 <= one < 2**31 for one in values)


def _clock_and_asker(more: Sequence[object]) -> tuple[float | None, str]:
    """What stands behind the first three places, as far as it is what it should be."""
    match more:
        case [float(now), str(seen), *_] if 0 < now < _LATEST_S:
            ip = parse_ip(seen)
            return now, "" if ip is None else str(ip)
        case _:
            return None, ""


def _swarm(more: Sequence[object]) -> SwarmId | None:
    return as_swarm_id(more[2]) if len(more) > 2 else None


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))
