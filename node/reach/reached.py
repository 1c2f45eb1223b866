"""How others come to this machine, as the ladder found and the watch keeps it. A value and its holder; asks nobody."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.discovery.node_record import Reach


@dataclass(frozen=True, slots=True)
class Reached:
    """One rung, proven.

    Attributes:
        address: under which others reach the gRPC service, as the record has it.
        reach: the rung.
        why: one line for the user.
    """

    address: str
    reach: Reach
    why: str


class Whereabouts:
    """How this machine is reached now; it changes while the node serves.

    Attributes:
        now: what the next record says.
    """

    def __init__(self, reached: Reached) -> None:
        self.now = reached

    def move(self, reached: Reached) -> bool:
        """From now on it is reached otherwise; whether that is news to others."""
        is_news = (reached.address, reached.reach) != (self.now.address, self.now.reach)
        self.now = reached
        return is_news
