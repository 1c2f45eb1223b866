"""What this node has done since it started: running totals, written by the event loop only. Owns no clock."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from node.session.admission import OwnerClass
from swarm.base.errors import Busy, HopError, LocalProtocolError, RemoteProtocolError, SessionError, SwarmError
from swarm.base.histogram import Histogram
from swarm.protocol.hop_log import SweepWork
from swarm.protocol.messages import Counters


class ErrorKind(enum.StrEnum):
    """What kind of error ended a session, or a part of it."""

    PROTOCOL = "protocol"
    """A neighbour or client broke the protocol."""
    HOP = "hop"
    """The next hop is lost."""
    BUSY = "busy"
    """There was no room."""
    SESSION = "session"
    """The session is over, or its window is full."""
    REFUSED = "refused"
    """Anything else that is refused on purpose."""
    INTERNAL = "internal"
    """A bug, or a forward that failed: look into the log."""

    @classmethod
    def of(cls, error: Exception) -> ErrorKind:
        """The kind of an error."""
        match error:
            case Busy():
                return cls.BUSY
            case HopError():
                return cls.HOP
            case RemoteProtocolError():
                return cls.PROTOCOL
            case SessionError():
                return cls.SESSION
            case SwarmError() if not isinstance(error, LocalProtocolError):
                return cls.REFUSED
            case _:
                return cls.INTERNAL


@dataclass(slots=True)
class NodeCounters:
    """Running totals; names as in `swarm.protocol.messages.Counters`, then what only telemetry publishes."""

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
    """Tree nodes that became committed."""
    kept_tokens: int = 0
    """Tokens with which sessions began, which were not computed again."""
    layer_tokens: int = 0
    """Tokens times the layers that computed them."""
    queue_ms: float = 0.0
    """Of all sweeps together."""
    compute_ms: float = 0.0
    """Of all sweeps together."""
    bytes_in: int = 0
    """From upstream neighbours."""
    bytes_out: int = 0
    """To the next hop, back upstream, and to clients."""
    rows_by_class: Counter[OwnerClass] = field(default_factory=Counter)
    """Tree nodes that were computed, by the class of whose they were."""
    bytes_in_by_class: Counter[OwnerClass] = field(default_factory=Counter)
    errors_by_kind: Counter[ErrorKind] = field(default_factory=Counter)
    queue_times: Histogram = field(default_factory=Histogram)
    """Per sweep."""
    compute_times: Histogram = field(default_factory=Histogram)
    """Per sweep."""
    forward_times: Histogram = field(default_factory=Histogram)
    """Per forward."""

    def to_message(self, forwards: int, rows_in_forwards: int) -> Counters:
        """The totals as a message, with what the model itself counted."""
        own = {field.name: getattr(self, field.name) for field in fields(Counters) if hasattr(self, field.name)}
        return Counters(**own, forwards=forwards, rows_in_forwards=rows_in_forwards)

    def swept(self, work: SweepWork, layers: int, queue_ms: float, compute_ms: float) -> None:
        """A sweep was run.

        Args:
            layers: how many layers ran it here.
            compute_ms: its share of forwards.
        """
        self.sweeps += 1
        self.frames_out += 1
        self.tree_nodes += len(work.run)
        self.pruned_nodes += work.frame.sweep.count - len(work.run)
        self.tokens += len(work.applied.path)
        self.layer_tokens += len(work.applied.path) * layers
        self.queue_ms += queue_ms
        self.compute_ms += compute_ms
        self.queue_times.add_ms(queue_ms)
        self.compute_times.add_ms(compute_ms)

    def forwarded(self, forwards_ms: Iterable[float]) -> None:
        """Forwards took so many milliseconds."""
        for milliseconds in forwards_ms:
            self.forward_times.add_ms(milliseconds)

    def failed(self, error: Exception) -> None:
        """An error came up in a session."""
        self.errors += 1
        self.errors_by_kind[ErrorKind.of(error)] += 1

    def sent(self, count: int) -> None:
        """So many bytes left."""
        self.bytes_out += count
