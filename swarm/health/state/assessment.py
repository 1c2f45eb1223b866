"""What is judged of a swarm now: its models, each with nodes, verdict and probes, and its two sources. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.health.state.node import NodeView
from swarm.health.state.probe_results import ProbeLog
from swarm.health.state.verdict import Verdict
from swarm.telemetry.messages import ServedModel


class LinkState(enum.StrEnum):
    """How the connection to one of the two sources is."""

    OFF = "off"
    CONNECTED = "connected"
    OK = "ok"
    DOWN = "down"


@dataclass(slots=True)
class SourceStatus:
    """The connection to the broker, or to the DHT, and since when its state holds (Unix seconds)."""

    state: LinkState = LinkState.OFF
    since: float = 0.0

    def change_to(self, state: LinkState, now: float) -> bool:
        """Set the state; whether it is another one."""
        if state is self.state:
            return False
        self.state, self.since = state, now
        return True

    def shown(self) -> dict[str, object]:
        """As JSON values."""
        return {"state": self.state.value, "since": round(self.since, 3)}


@dataclass(frozen=True, slots=True)
class Assessment:
    """One model, its nodes, and the verdict.

    Attributes:
        model: which.
        nodes: all that are known.
        verdict: how the model fares.
        since: when the verdict became what it is, in Unix seconds.
        log: its probes.
    """

    model: ServedModel
    nodes: Sequence[NodeView]
    verdict: Verdict
    since: float
    log: ProbeLog
