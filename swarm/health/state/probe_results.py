"""What probes found, and how many tokens they may still spend. Pure; `client.terminal.probe` makes the lines read
here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.protocol.limits import MAX_LAYERS

MAX_HOPS = 256
MAX_NUMBER = 1e7
"""Of all that a probe measures: milliseconds, tokens, tokens/s."""
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class HopProbe:
    """One hop of a probe's chain; times are medians over its sweeps.

    Attributes:
        span: the layers that it computed, half-open.
        link_ms: one way, from the machine before it.
        queue_ms: waiting at the node.
        compute_ms: computing.
    """

    peer: PeerId
    span: tuple[int, int]
    link_ms: float
    queue_ms: float
    compute_ms: float


@dataclass(frozen=True, slots=True)
class ReplicaComparison:
    """A node's work on a text, and the same by others: by an audit of its layers, or by the same text around it.

    Attributes:
        peer: the node under test.
        others: the nodes that computed its layers too.
        agrees: whether both gave the same; None if one of the two could not be made.
        tokens: prompt and new tokens of all.
        error: why one could not be made.
        named: the one of three that differs from two others; None: nobody, or only two were asked.
    """

    peer: PeerId
    others: tuple[PeerId, ...]
    agrees: bool | None
    tokens: int
    error: str | None = None
    named: PeerId | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A canary generation.

    Attributes:
        ok: whether it made its tokens; None where it could not be started, which says nothing of the swarm.
        error: why not.
        tokens: prompt and new tokens, which is its cost.
        ttft_ms: time to the first token.
        tokens_per_s: after the first token.
        acceptance_length: tokens per sweep.
        sweep_ms: median time of a sweep.
        hops: its chain, in order.
        return_ms: one way from the tail back to the prober.
        audit: of one hop's part of it; None where none was made.
    """

    ok: bool | None
    error: str | None = None
    tokens: int = 0
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    acceptance_length: float | None = None
    sweep_ms: float | None = None
    hops: tuple[HopProbe, ...] = ()
    return_ms: float | None = None
    audit: ReplicaComparison | None = None


def read_probe(line: str) -> Probe:
    """Read the line that `client.terminal.probe` printed for a generation.

    Raises:
        RemoteProtocolError: it is something else.
    """
    try:
        raw = _object(line)
        return Probe(
            ok=None if raw["ok"] is None else bool(raw["ok"]),
            error=None if raw.get("error") is None else str(raw["error"])[:300],
            tokens=_tokens(raw),
            ttft_ms=_number(raw, "ttft_ms"),
            tokens_per_s=_number(raw, "tokens_per_s"),
            acceptance_length=_number(raw, "acceptance_length"),
            sweep_ms=_number(raw, "sweep_ms"),
            hops=tuple(_hop(hop) for hop in raw.get("hops", ())[:MAX_HOPS]),
            return_ms=_number(raw, "return_ms"),
            audit=None if raw.get("audit") is None else _comparison(raw["audit"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RemoteProtocolError("probe", f"a result that makes no sense: {line[:200]!r}") from error


def read_comparison(line: str) -> ReplicaComparison:
    """Read the line that `client.terminal.probe` printed for a comparison.

    Raises:
        RemoteProtocolError: it is something else.
    """
    try:
        return _comparison(_object(line))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RemoteProtocolError("probe", f"a result that makes no sense: {line[:200]!r}") from error


def _comparison(raw: Mapping[str, Any]) -> ReplicaComparison:
    return ReplicaComparison(
        peer=PeerId(str(raw["peer"])),
        others=tuple(PeerId(str(peer)) for peer in raw.get("others", ())[:MAX_HOPS]),
        agrees=None if raw["agrees"] is None else bool(raw["agrees"]),
        tokens=_tokens(raw),
        error=None if raw.get("error") is None else str(raw["error"])[:300],
        named=None if raw.get("named") is None else PeerId(str(raw["named"])),
    )


def _object(line: str) -> Mapping[str, Any]:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise TypeError("no object")
    return raw


def _number(raw: Mapping[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(name)
    return float(value)


def _tokens(raw: Mapping[str, Any]) -> int:
    return int(_number(raw, "tokens") or 0)


def _hop(raw: Mapping[str, Any]) -> HopProbe:
    start, end = map(int, raw["span"])
    if not 0 <= start < end <= MAX_LAYERS:
        raise ValueError("span")
    times = [_number(raw, name) or 0.0 for name in ("link_ms", "queue_ms", "compute_ms")]
    return HopProbe(PeerId(str(raw["peer"])), (start, end), *times)


@dataclass(slots=True)
class ProbeLog:
    """The probes of one model.

    Attributes:
        last: the newest that passed or failed.
        last_at: when it ended, in Unix seconds.
        failures: probes in a row, up to now, that failed.
        trouble: why the newest could not be started; None if it could.
    """

    last: Probe | None = None
    last_at: float = 0.0
    failures: int = 0
    trouble: str | None = None

    def add(self, probe: Probe, now: float) -> None:
        if probe.ok is None:
            self.trouble = probe.error
            return
        self.trouble = None
        self.last, self.last_at = probe, now
        self.failures = 0 if probe.ok else self.failures + 1


@dataclass(slots=True)
class ProbeBudget:
    """How many tokens probes may spend in any hour, prompts included."""

    tokens_per_hour: int
    _spent: deque[tuple[float, int]] = field(default_factory=deque)

    def left(self, now: float) -> int:
        """Tokens that may be spent now."""
        while self._spent and now - self._spent[0][0] >= HOUR_S:
            self._spent.popleft()
        return self.tokens_per_hour - sum(tokens for _, tokens in self._spent)

    def spend(self, tokens: int, now: float) -> None:
        """Note the tokens of a probe."""
        self._spent.append((now, tokens))
