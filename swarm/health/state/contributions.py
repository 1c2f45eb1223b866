"""Who contributed how much: layer-tokens that peers say they served, over all their runs. Pure and bounded.

Peers report running totals of one run. What a total grew by is counted, at most as much as a machine could have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.ids import PeerId
from swarm.telemetry.messages import Metrics, Status

MAX_PEERS = 4_096
MOST_TOKENS_PER_S = 50_000.0
"""Per layer: more than any machine computes. Who claims more is counted with this."""
UNSEEN_S = 86_400.0
"""For how long somebody may have served before he was first heard."""
SLACK_S = 10.0


@dataclass(slots=True)
class Served:
    """One peer's part. run: when the run began whose total is `last`. heard_at: when it was told, by our own clock."""

    name: str | None = None
    layer_tokens: int = 0
    run: float = 0.0
    last: int = 0
    heard_at: float | None = None


@dataclass(slots=True)
class ServedBook:
    """What all peers served."""

    peers: dict[PeerId, Served] = field(default_factory=dict)

    def add(self, peer: PeerId, status: Status, metrics: Metrics, now: float) -> None:
        """Count what a peer did since it was last heard; of its own clock nothing is believed."""
        served = self.peers.setdefault(peer, Served())
        if served.run != status.started_at or metrics.layer_tokens < served.last:
            served.run, served.last = status.started_at, 0
        seconds = UNSEEN_S if served.heard_at is None else max(now - served.heard_at, 0.0) + SLACK_S
        most = int(MOST_TOKENS_PER_S * seconds * len(status.span))
        served.layer_tokens += min(metrics.layer_tokens - served.last, most)
        served.last, served.heard_at, served.name = metrics.layer_tokens, now, status.name
        if len(self.peers) > MAX_PEERS:
            del self.peers[min(self.peers, key=lambda one: self.peers[one].layer_tokens)]

    def best(self, count: int) -> list[tuple[PeerId, Served, float]]:
        """The peers that served most, with their share of all."""
        whole = sum(served.layer_tokens for served in self.peers.values())
        ranked = sorted(self.peers.items(), key=lambda pair: (-pair[1].layer_tokens, pair[0]))
        return [(peer, served, served.layer_tokens / whole) for peer, served in ranked[:count] if served.layer_tokens]

    def dump(self) -> list[list[Any]]:
        """Everything as plain values, to be kept."""
        return [[peer, one.name, one.layer_tokens, one.run, one.last, one.heard_at] for peer, one in self.peers.items()]

    def load(self, rows: Iterable[Any]) -> None:
        """Take up what `dump` gave; what has another form is left out."""
        for row in rows:
            match row:
                case [str(peer), str() | None as name, int(total), float(run), int(last), float() | None as heard_at]:
                    self.peers[PeerId(peer)] = Served(name, total, run, last, heard_at)


def shares(best: Iterable[tuple[PeerId, Served, float]]) -> list[Mapping[str, Any]]:
    """The list of contributors as the page shows it."""
    return [
        {
            "peer": peer,
            "short": peer[-8:],
            "name": served.name,
            "layer_tokens": served.layer_tokens,
            "share": round(share, 4),
        }
        for peer, served, share in best
    ]
