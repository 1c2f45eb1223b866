"""Whose session goes where a node is full: of who holds most, the one that did nothing for the longest. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

IDLE_S = 30.0
"""Without a sweep for so long, a session gives way to any other."""
UNUSED_S = 3.0
"""The same for one that never had a sweep: who opens a session begins at once, and who hoards room does not."""
ALWAYS_OWN = 0.25
"""The fraction of the KV that an address keeps while it uses it, whoever else wants some."""

HolderT = TypeVar("HolderT")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a session holds, or asks for.

    Attributes:
        key: who pays for it.
        tokens: KV tokens.
    """

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has for sessions.

    Attributes:
        tokens: KV tokens in all.
        sessions: how many in all.
    """

    tokens: int
    sessions: int


def victims(
    held: Mapping[HolderT, Reservation],
    asked: Reservation,
    room: Room,
    idle_s: Callable[[HolderT], float],
    weight: Callable[[str], int],
) -> list[HolderT] | None:
    """The sessions that must go so that another fits: none where there is room, None where nobody has to go.

    First go those that nobody uses, idle for `IDLE_S`: of the owner who holds most by its weight, the longest first.
    Then who holds most gives way, and of its sessions the one that was idle for the longest, if its owner holds more
    than its share, and more than a quarter of the KV. Whoever asks holds what it asks for, so nobody takes from who
    has less.

    Args:
        held: who holds what.
        asked: by whom, and how much.
        room: in all.
        idle_s: how long a session did no sweep (`as_idle_s`).
        weight: how many shares a key has.
    """
    left = dict(held)
    gone: list[HolderT] = []
    while True:
        lacks_tokens = sum(one.tokens for one in left.values()) + asked.tokens > room.tokens
        if not lacks_tokens and len(left) < room.sessions:
            return gone
        amounts: Counter[str] = Counter()
        for one in (*left.values(), asked):
            amounts[one.key] += one.tokens if lacks_tokens else 1
        unused = [session for session in left if idle_s(session) >= IDLE_S]
        if unused:
            victim = max(unused, key=lambda one: (amounts[left[one].key] / weight(left[one].key), idle_s(one)))
        else:
            heaviest = max(amounts, key=lambda key: (amounts[key] / weight(key), key == asked.key, key))
            own = [session for session, one in left.items() if one.key == heaviest]
            capacity = room.tokens if lacks_tokens else room.sessions
            share = capacity * weight(heaviest) / sum(map(weight, amounts))
            kept = max(share, ALWAYS_OWN * capacity) if lacks_tokens else share
            if not own or heaviest == asked.key or amounts[heaviest] <= kept:
                return None
            victim = max(own, key=idle_s)
        del left[victim]
        gone.append(victim)


def as_idle_s(idle_s: float, *, is_unused: bool) -> float:
    """For how long a session counts as idle: one that never had a sweep, ten times as long as it was.

    Args:
        idle_s: seconds since its last sweep, or since it was opened.
        is_unused: whether it never had one.
    """
    return idle_s * (IDLE_S / UNUSED_S) if is_unused else idle_s
