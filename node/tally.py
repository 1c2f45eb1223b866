"""What this node has done since it started: plain counters, written by the event loop only."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from swarm.messages import Counters


@dataclass(slots=True)
class Tally:
    """Running totals; names as in `swarm.messages.Counters`."""

    sweeps: int = 0
    frames_in: int = 0
    frames_out: int = 0
    tree_nodes: int = 0
    pruned_nodes: int = 0
    errors: int = 0
    replays: int = 0
    catch_ups: int = 0
    restores: int = 0
    restored_nodes: int = 0
    replay_us: int = 0
    doubles: int = 0
    differences: int = 0

    def counters(self, forwards: int, rows_in_forwards: int) -> Counters:
        """The totals as a message, with what the model itself counted."""
        return Counters(**asdict(self), forwards=forwards, rows_in_forwards=rows_in_forwards)
