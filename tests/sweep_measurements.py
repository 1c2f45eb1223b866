"""Sweeps as tests want them measured: by what they waited and computed in all, evenly over their hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from client.stats import SweepMeasurement
from swarm.protocol.messages import HopTime


def hop_times(waits_ms: Sequence[float], computes_ms: Sequence[float], link_ms: float = 0.0) -> tuple[HopTime, ...]:
    """One per hop; every link takes as long."""
    pairs = zip(waits_ms, computes_ms, strict=True)
    return tuple(HopTime(queue_ms=wait, compute_ms=compute, other_ms=0.0, link_ms=link_ms) for wait, compute in pairs)


def measured(  # noqa: PLR0913 - as many as a sweep has figures
    nodes: int,
    total_ms: float,
    waited_ms: float,
    computed_ms: float,
    hops: int = 1,
    *,
    accepted_tokens: int = 0,
    network_ms: float = 0.0,
    waits_ms: Sequence[float] = (),
    computes_ms: Sequence[float] = (),
    is_prompt: bool = False,
    expected_tokens: float = 0.0,
    is_alone: bool = True,
    sent_ms: float | None = None,
    behind: int = 0,
) -> SweepMeasurement:
    """A sweep of a pending token and so many nodes, or of a part of the prompt with as many rows."""
    link_ms = network_ms / (hops + 1)
    return SweepMeasurement(
        nodes=nodes + is_prompt,
        emitted=0 if is_prompt else accepted_tokens + 1,
        draft_ms=0.0,
        total_ms=total_ms,
        first_link_ms=link_ms,
        hops=hop_times(waits_ms or [waited_ms / hops] * hops, computes_ms or [computed_ms / hops] * hops, link_ms),
        is_prompt=is_prompt,
        expected_tokens=expected_tokens,
        is_alone=is_alone,
        sent_ms=sent_ms,
        behind=behind,
    )


def over_hops(sweep: SweepMeasurement, hops: int) -> SweepMeasurement:
    """The same sweep over so many hops."""
    waits, computes = [sweep.waited_ms / hops] * hops, [sweep.computed_ms / hops] * hops
    link_ms = sweep.network_ms / (hops + 1)
    return replace(sweep, hops=hop_times(waits, computes, link_ms), first_link_ms=link_ms)


def with_wait(sweep: SweepMeasurement, waited_ms: float) -> SweepMeasurement:
    """The same sweep, but it waited so long at its hops."""
    hops = tuple(replace(hop, queue_ms=waited_ms / len(sweep.hops)) for hop in sweep.hops)
    return replace(sweep, hops=hops)


def with_pings(sweep: SweepMeasurement, network_ms: float) -> SweepMeasurement:
    """The same sweep, when pings said that one way over all links takes so long; 0 where they did not."""
    link_ms = network_ms / (len(sweep.hops) + 1)
    hops = tuple(replace(hop, link_ms=link_ms) for hop in sweep.hops)
    return replace(sweep, hops=hops, first_link_ms=link_ms)
