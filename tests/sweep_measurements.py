"""Measurements of sweeps for tests: total times at the hops are spread evenly over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from client.base.stats import SweepMeasurement
from swarm.protocol.messages import HopTime


def hop_times(waits_ms: Sequence[float], computes_ms: Sequence[float], link_ms: float = 0.0) -> tuple[HopTime, ...]:
    """One `HopTime` per hop; all links take `link_ms`."""
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
    """A sweep of a pending token and `nodes` tree nodes, or of a part of the prompt with `nodes` + 1 tokens.

    Args:
        nodes: tree nodes below the pending token (K).
        total_ms: from sending the sweep to its reply.
        waited_ms: at all hops together; ignored if `waits_ms` is given.
        computed_ms: at all hops together; ignored if `computes_ms` is given.
        hops: how many there are.
        accepted_tokens: nodes that the target accepted.
        network_ms: one way over all links, spread evenly.
        waits_ms: per hop.
        computes_ms: per hop.
        is_prompt: whether it carried a part of the prompt.
        expected_tokens: sum of the acceptance probabilities.
        is_alone: whether it met no other sweep of this client.
        sent_ms: when it left, by the client's clock.
        behind: sweeps that were unanswered when it left.
    """
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
    """The same sweep over another number of hops."""
    waits, computes = [sweep.waited_ms / hops] * hops, [sweep.computed_ms / hops] * hops
    link_ms = sweep.network_ms / (hops + 1)
    return replace(sweep, hops=hop_times(waits, computes, link_ms), first_link_ms=link_ms)


def with_wait(sweep: SweepMeasurement, waited_ms: float) -> SweepMeasurement:
    """The same sweep with another wait at its hops, in all."""
    hops = tuple(replace(hop, queue_ms=waited_ms / len(sweep.hops)) for hop in sweep.hops)
    return replace(sweep, hops=hops)


def with_pings(sweep: SweepMeasurement, network_ms: float) -> SweepMeasurement:
    """The same sweep with other pings: one way over all links in all; 0: not measured."""
    link_ms = network_ms / (len(sweep.hops) + 1)
    hops = tuple(replace(hop, link_ms=link_ms) for hop in sweep.hops)
    return replace(sweep, hops=hops, first_link_ms=link_ms)
