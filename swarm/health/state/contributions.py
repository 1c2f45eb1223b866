"""Who contributed how much, and each model's counters: from the running totals that peers report. Pure and bounded.

A node's totals start anew with every run, and nodes come and go: the growth of each total is added up, at most as much
as a machine could do, so that the sum never falls. What a node did before its first message is not counted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.base.ids import PeerId
from swarm.status.messages import Metrics, Status

MAX_PEERS = 4_096
MAX_TOKENS_PER_S = 50_000.0
"""Per layer: more than any machine computes. A higher claim is cut to this."""
UNSEEN_S = 86_400.0
"""For how long a peer may have served before its first message came."""
SLACK_S = 10.0
MAX_TOTAL = 2**63
"""More than all machines together compute in a century."""


@dataclass(slots=True)
class Contribution:
    """One peer's part.

    Attributes:
        name: the name that its owner gave it.
        layer_tokens: committed tokens times layers, over all runs.
        run_started_at: when the run began to which `last_total` belongs; Unix seconds of the peer's clock.
        last_total: the running total that it reported last.
        heard_at: when that report came, by this machine's clock.
    """

    name: str | None = None
    layer_tokens: int = 0
    run_started_at: float = 0.0
    last_total: int = 0
    heard_at: float | None = None


@dataclass(slots=True)
class ContributionBook:
    """The contributions of all peers, at most `MAX_PEERS`."""

    peers: dict[PeerId, Contribution] = field(default_factory=dict)

    def add(self, peer: PeerId, status: Status, metrics: Metrics, now: float) -> None:
        """Count what a peer did since its last report; elapsed time is this machine's, never the peer's."""
        contribution = self.peers.setdefault(peer, Contribution())
        if contribution.run_started_at != status.started_at or metrics.layer_tokens < contribution.last_total:
            contribution.run_started_at, contribution.last_total = status.started_at, 0
        seconds = UNSEEN_S if contribution.heard_at is None else max(now - contribution.heard_at, 0.0) + SLACK_S
        max_tokens = int(MAX_TOKENS_PER_S * seconds * len(status.span))
        contribution.layer_tokens += min(metrics.layer_tokens - contribution.last_total, max_tokens)
        contribution.last_total, contribution.heard_at, contribution.name = metrics.layer_tokens, now, status.name
        if len(self.peers) > MAX_PEERS:
            del self.peers[min(self.peers, key=lambda one: self.peers[one].layer_tokens)]

    def best(self, count: int) -> list[tuple[PeerId, Contribution, float]]:
        """The peers that served most, with their share of all."""
        total = sum(one.layer_tokens for one in self.peers.values())
        ranked = sorted(self.peers.items(), key=lambda pair: (-pair[1].layer_tokens, pair[0]))
        return [
            (peer, contribution, contribution.layer_tokens / total)
            for peer, contribution in ranked[:count]
            if contribution.layer_tokens
        ]

    def dump(self) -> list[list[Any]]:
        """Everything as plain values, to be kept."""
        return [
            [peer, one.name, one.layer_tokens, one.run_started_at, one.last_total, one.heard_at]
            for peer, one in self.peers.items()
        ]

    def load(self, rows: Iterable[Any]) -> None:
        """Take up what `dump` gave; what has another form is left out."""
        for row in rows:
            match row:
                case [
                    str(peer),
                    str() | None as name,
                    int(total),
                    float(run_started_at),
                    int(last_total),
                    float() | None as heard_at,
                ] if 0 <= total <= MAX_TOTAL and 0 <= last_total <= MAX_TOTAL and len(self.peers) < MAX_PEERS:
                    self.peers[PeerId(peer)] = Contribution(name, total, run_started_at, last_total, heard_at)


def shares(best: Iterable[tuple[PeerId, Contribution, float]]) -> list[Mapping[str, Any]]:
    """The list of contributors as the page shows it."""
    return [
        {
            "peer": peer,
            "short": peer[-8:],
            "name": contribution.name,
            "layer_tokens": contribution.layer_tokens,
            "share": round(share, 4),
        }
        for peer, contribution, share in best
    ]


MAX_SWEEPS_PER_S: Final = 10_000.0


@dataclass(slots=True)
class Totals:
    """The counters of one model.

    Attributes:
        sweeps: through the whole model: those of each node, times the part of the layers that it holds.
        layer_tokens: committed tokens times layers.
    """

    sweeps: float = 0.0
    layer_tokens: int = 0


@dataclass(slots=True)
class TotalsBook:
    """The counters of all models that have a node, by fingerprint."""

    models: dict[str, Totals] = field(default_factory=dict)

    def add(self, status: Status, previous: Metrics | None, metrics: Metrics, seconds: float) -> None:
        """Count what a node did since the metrics `previous`, which came so many seconds ago."""
        totals = self.models.setdefault(status.model.fingerprint, Totals())
        if previous is None or not status.model.num_layers:
            return
        is_same_run = metrics.uptime_s >= previous.uptime_s
        sweeps = metrics.sweeps - (previous.sweeps if is_same_run else 0)
        layer_tokens = metrics.layer_tokens - (previous.layer_tokens if is_same_run else 0)
        heard_s = max(seconds, 0.0) + SLACK_S
        layers = len(status.span)
        part = layers / status.model.num_layers
        totals.sweeps += min(max(sweeps, 0), MAX_SWEEPS_PER_S * heard_s) * part
        totals.layer_tokens += min(max(layer_tokens, 0), int(MAX_TOKENS_PER_S * heard_s * layers))

    def keep(self, known: Container[str]) -> None:
        """Drop the models that are not known any more."""
        for fingerprint in [one for one in self.models if one not in known]:
            del self.models[fingerprint]
