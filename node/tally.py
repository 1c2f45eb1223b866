"""What this node has done since it started: plain counters, written by the event loop only."""

from __future__ import annotations

from dataclasses import dataclass, fields

from swarm.hop_log import SweepWork
from swarm.messages import Counters


@dataclass(slots=True)
class Tally:
    """Running totals; names as in `swarm.messages.Counters`, then what only telemetry tells.

    tokens: tree nodes that became committed. layer_tokens: tokens × layers that computed them. queue_ms, compute_ms: of
    all sweeps. bytes_in: from upstream neighbours. bytes_out: to the next hop, back upstream, and to clients.
    """

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
    tokens: int = 0
    layer_tokens: int = 0
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0

    def counters(self, forwards: int, rows_in_forwards: int) -> Counters:
        """The totals as a message, with what the model itself counted."""
        own = {field.name: getattr(self, field.name) for field in fields(Counters) if hasattr(self, field.name)}
        return Counters(**own, forwards=forwards, rows_in_forwards=rows_in_forwards)

    def swept(self, work: SweepWork, layers: int, queue_ms: float, compute_ms: float) -> None:
        """A sweep was run by so many layers, after it had waited."""
        self.sweeps += 1
        self.frames_out += 1
        self.tree_nodes += len(work.run)
        self.pruned_nodes += len(work.frame.sweep.tokens) - len(work.run)
        self.tokens += len(work.applied.path)
        self.layer_tokens += len(work.applied.path) * layers
        self.queue_ms += queue_ms
        self.compute_ms += compute_ms

    def sent(self, count: int) -> None:
        """So many bytes left."""
        self.bytes_out += count
