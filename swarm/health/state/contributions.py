"""Who contributed how much, by receipts of clients; and each model's counters, by what nodes say. Pure and bounded.

A receipt says which machines computed how many tokens together, and is signed by a key that cost nobody anything. So it
counts as far as all machines of its route showed it, each of which checked it against what it had computed itself; each
token of a session once; and to each machine no more than it could do in the time. A group that lacks some layers
therefore gains only what honest machines, who gain as much per layer, have really computed for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.base.ids import PeerId, SessionId
from swarm.protocol.messages import RouteHop
from swarm.status.messages import Metrics, Status
from swarm.trust.receipt import FRESH_S, MAX_SESSION_S, Receipt

MAX_PEERS = 4_096
MAX_TOKENS_PER_S = 50_000.0
"""Per layer: more than any machine computes. A higher claim is cut to this."""
ROWS_PER_FORWARD: Final = 1_024
"""No forward of a node has more, and none is shorter than a canary's was: what a machine can do at most."""
SLACK_S = 10.0
MAX_TOTAL = 2**63
"""More than all machines together compute in a century."""
MAX_SESSIONS: Final = 16_384
MAX_LEGS: Final = 8
"""Routes of one session, the newest."""
MAX_SESSION_PEERS: Final = 96
SESSIONS_KEPT: Final = 4_096
"""Sessions whose receipts go on counting after a restart of the service, the latest."""
Ability = Callable[[PeerId, Receipt], float]
"""How many layer-tokens per second a machine can do that shows a receipt; 0: it must not count."""


def tokens_per_s(probed_ms: float | None) -> float:
    """How many tokens a machine can commit per second at most.

    Args:
        probed_ms: compute of a canary's sweep for its whole span; None where none was measured.
    """
    return min(MAX_TOKENS_PER_S, ROWS_PER_FORWARD * 1e3 / max(probed_ms, 1e-3)) if probed_ms else MAX_TOKENS_PER_S


@dataclass(slots=True)
class Contribution:
    """One peer's part.

    Attributes:
        name: the name that its owner gave it.
        layer_tokens: that clients signed for, over all runs.
        heard_at: until when `allowance` has grown, by this machine's clock; None before it was heard.
        allowance: layer-tokens that it can have computed and that have not counted yet.
    """

    name: str | None = None
    layer_tokens: int = 0
    heard_at: float | None = None
    allowance: float = 0.0

    def count(self, layer_tokens: int, per_s: float, now: float) -> None:
        """Add to its sum, as far as the machine can have done that."""
        passed_s = SLACK_S if self.heard_at is None else max(now - self.heard_at, 0.0)
        self.allowance = min(self.allowance + per_s * passed_s, per_s * FRESH_S)
        self.heard_at = now
        counted = min(layer_tokens, int(self.allowance))
        self.allowance -= counted
        self.layer_tokens = min(self.layer_tokens + counted, MAX_TOTAL)


@dataclass(slots=True)
class _SeenSession:
    """What counted of one session.

    Attributes:
        began_at: as its first receipt said.
        levels: up to which of the session's tokens each machine's part has counted.
        legs: how far each machine of a route has shown its receipts, by the route from its beginning on.
    """

    began_at: int
    levels: dict[PeerId, int] = field(default_factory=dict)
    legs: OrderedDict[tuple[tuple[RouteHop, ...], int], dict[PeerId, int]] = field(default_factory=OrderedDict)

    def show(self, peer: PeerId, receipt: Receipt) -> int:
        """A machine shows a receipt; returns the tokens by which all machines of its route grow."""
        route = [PeerId(hop.peer) for hop in receipt.route]
        if len(self.levels.keys() | set(route)) > MAX_SESSION_PEERS:
            return 0
        shown = self.legs.setdefault(receipt.leg, {})
        self.legs.move_to_end(receipt.leg)
        if len(self.legs) > MAX_LEGS:
            self.legs.popitem(last=False)
        shown[peer] = max(shown.get(peer, 0), receipt.tokens)
        level = min(shown.get(one, 0) for one in route)
        grown = level - max(receipt.since, *(self.levels.get(one, 0) for one in route))
        if grown > 0:
            self.levels |= dict.fromkeys(route, level)
        return max(grown, 0)


@dataclass(slots=True)
class ContributionBook:
    """The contributions of all peers, at most `MAX_PEERS`.

    Attributes:
        peers: by who did it, or who took its place.
        heirs: peers that took another one's place, by that one.
    """

    peers: dict[PeerId, Contribution] = field(default_factory=dict)
    heirs: dict[PeerId, PeerId] = field(default_factory=dict)
    _sessions: OrderedDict[SessionId, _SeenSession] = field(default_factory=OrderedDict)
    _forgotten_until: int = 0

    def name(self, peer: PeerId, name: str | None, now: float) -> None:
        """A node is there: from now on it can do something that counts."""
        one = self.peers.get(peer) or self._add(peer)
        one.name = name
        if one.heard_at is None:
            one.heard_at = now

    def show(self, peer: PeerId, receipt: Receipt, ability: Ability, now: float) -> None:
        """A machine shows a receipt, whose signature holds; it counts for all of its route, once all have shown it."""
        if receipt.untimely(now) is not None or receipt.hop_of(peer) is None:
            return
        session = self._session(receipt)
        if session is None:
            return
        grown = session.show(peer, receipt)
        for hop in receipt.route if grown else ():
            per_s = ability(PeerId(hop.peer), receipt)
            if per_s > 0:
                heir = self.heir_of(PeerId(hop.peer))
                one = self.peers.get(heir) or self._add(heir)
                one.count(grown * len(hop.span), per_s, now)

    def succeed(self, old: PeerId, new: PeerId) -> None:
        """A peer takes another one's place, once: what that one did, and what still comes of it, is its own."""
        if old in self.heirs or old not in self.peers or self.heir_of(new) == old:
            return
        self.heirs[old] = new
        while len(self.heirs) > MAX_PEERS:
            del self.heirs[next(iter(self.heirs))]
        sum_before = self.peers.pop(old).layer_tokens
        heir = self.heir_of(new)
        one = self.peers.get(heir) or self._add(heir)
        one.layer_tokens = min(one.layer_tokens + sum_before, MAX_TOTAL)

    def heir_of(self, peer: PeerId) -> PeerId:
        """Who has a peer's place now: itself, mostly."""
        while peer in self.heirs:
            peer = self.heirs[peer]
        return peer

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
        peers = [[peer, one.name, one.layer_tokens, one.heard_at] for peer, one in self.peers.items()]
        heirs = [["heir", old, new] for old, new in self.heirs.items()]
        latest = list(self._sessions.items())[-SESSIONS_KEPT:]
        left = list(self._sessions.values())[:-SESSIONS_KEPT]
        floor = max([self._forgotten_until, *(one.began_at for one in left)])
        sessions = [["session", name.hex(), one.began_at, list(one.levels.items())] for name, one in latest]
        return [*peers, *heirs, ["forgotten", floor], *sessions]

    def load(self, rows: Iterable[Any]) -> None:
        """Take up what `dump` gave, also that of releases that summed what nodes said; what has another form is left
        out.
        """
        for row in rows:
            match row:
                case [str(peer), str() | None as name, int(total), float() | None as heard_at] | [
                    str(peer),
                    str() | None as name,
                    int(total),
                    float(),
                    int(),
                    float() | None as heard_at,
                ] if 0 <= total <= MAX_TOTAL and len(self.peers) < MAX_PEERS:
                    self.peers[PeerId(peer)] = Contribution(name, total, heard_at)
                case ["heir", str(old), str(new)] if len(self.heirs) < MAX_PEERS:
                    if old not in self.heirs and self.heir_of(PeerId(new)) != old:
                        self.heirs[PeerId(old)] = PeerId(new)
                case ["forgotten", int(floor)]:
                    self._forgotten_until = max(self._forgotten_until, floor)
                case ["session", str(name), int(began_at), list(levels)] if len(self._sessions) < MAX_SESSIONS:
                    found = {PeerId(peer): level for peer, level in _pairs(levels)}
                    with suppress(ValueError):
                        self._sessions[SessionId(bytes.fromhex(name))] = _SeenSession(began_at, found)

    def _add(self, peer: PeerId) -> Contribution:
        one = self.peers[peer] = Contribution()
        if len(self.peers) > MAX_PEERS:
            del self.peers[min(self.peers, key=lambda other: (self.peers[other].layer_tokens, other == peer))]
        return one

    def _session(self, receipt: Receipt) -> _SeenSession | None:
        """What is known of a receipt's session; None where that was forgotten, or another beginning is claimed.

        One that was forgotten would count twice: so nothing counts any more that began before it.
        """
        name = receipt.session
        known = self._sessions.get(name)
        if known is None and receipt.began_at > self._forgotten_until:
            known = self._sessions[name] = _SeenSession(receipt.began_at)
        if known is None or known.began_at != receipt.began_at:
            return None
        self._sessions.move_to_end(name)
        while len(self._sessions) > MAX_SESSIONS or self._is_over(receipt.issued_at):
            _, gone = self._sessions.popitem(last=False)
            self._forgotten_until = max(self._forgotten_until, gone.began_at)
        return known

    def _is_over(self, now: float) -> bool:
        """Whether no receipt of the session that was shown least lately counts any more."""
        return next(iter(self._sessions.values())).began_at < now - 2 * MAX_SESSION_S


def _pairs(raw: list[Any]) -> Iterable[tuple[str, int]]:
    for pair in raw[:MAX_SESSION_PEERS]:
        match pair:
            case [str(peer), int(level)]:
                yield peer, level


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
