"""Hold and its answer: a client keeps a session alive, and hears how far it is at a hop (PROTOCOL R9, R17). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.ids import SessionId


@dataclass(frozen=True, slots=True)
class Hold:
    """What a client wants of a hop whose upstream may be lost (R9), besides the answer (R17).

    Attributes:
        session: whose.
        generation: of its route; a hop that heard of a newer one does nothing.
        ttl_s: keep the session for so many more seconds; with 0 it is only asked.
        is_release: end it on this hop, which is needed no more.
    """

    session: SessionId
    generation: int
    ttl_s: float = 0.0
    is_release: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Answer to Hold: whether the hop has the session, and how far that is there (R17).

    Attributes:
        held: whether it has the session; all else is 0 where not.
        generation: the newest of which it heard.
        is_ready: whether it and all hops behind it are attached for that generation.
        received: the last sequence that arrived.
        passed: the last sequence that the next hop has, or at the tail that was answered.
        working: the oldest sequence that it computes, sends, or has in a queue; 0 for none.
    """

    held: bool
    generation: int = 0
    is_ready: bool = False
    received: int = 0
    passed: int = 0
    working: int = 0
