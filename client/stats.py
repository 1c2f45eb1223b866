"""What a generation cost and where each sweep's time went. Plain values; owns no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.protocol.messages import HopTime


@dataclass(frozen=True, slots=True)
class SweepMeasurement:
    """One sweep that came back, as the client saw it; times in milliseconds.

    The one record of a sweep: statistics, the controller and `--explain` read it.

    Attributes:
        nodes: tree nodes below the pending token (K); of a part of the prompt, its tokens.
        emitted: tokens that became certain by its reply.
        draft_ms: what drafting took before it was sent.
        total_ms: from sending it to its reply.
        first_link_ms: the link to hop 0, one way, as pings measured it; 0 where they did not.
        hops: per hop, queue, compute, messages and the measured link behind it.
        depth: levels of the tree.
        predicted_ms: what `total_ms` was predicted to be, None where nobody predicted.
        reason: why the tree was as large as it was.
        is_part: it went on below a tree that was on its way, so it carried no pending token.
        rounds: passes of the draft model before it was sent.
        is_prompt: it carried a part of the prompt, and no tree.
        expected_tokens: the sum of its nodes' acceptance probabilities.
        is_alone: it met no other sweep of this client at any hop, as far as was predicted.
        sent_ms: when it left, by the client's clock; None while sweeps of an earlier generation were unanswered.
        behind: how many of this generation's sweeps were unanswered when it left, the last of them sent right before.
    """

    nodes: int
    emitted: int
    draft_ms: float
    total_ms: float
    first_link_ms: float
    hops: tuple[HopTime, ...]
    depth: int = 0
    predicted_ms: float | None = None
    reason: str = ""
    is_part: bool = False
    rounds: int = 0
    is_prompt: bool = False
    expected_tokens: float = 0.0
    is_alone: bool = True
    sent_ms: float | None = None
    behind: int = 0

    @property
    def rows(self) -> int:
        """Rows that every hop computed: the nodes, and the pending token where it carried one."""
        return self.nodes + (not self.is_part and not self.is_prompt)

    @property
    def accepted_tokens(self) -> int:
        """Emitted tokens that its nodes brought; the target's own pick after the pending token is not theirs."""
        return max(self.emitted - (not self.is_part), 0)

    @property
    def waits_ms(self) -> tuple[float, ...]:
        """Hop by hop, what it waited for other sweeps."""
        return tuple(hop.queue_ms for hop in self.hops)

    @property
    def computes_ms(self) -> tuple[float, ...]:
        """Hop by hop, what it was computed for, messages included."""
        return tuple(hop.compute_ms + hop.other_ms for hop in self.hops)

    @property
    def waited_ms(self) -> float:
        """What it waited at all hops together."""
        return sum(self.waits_ms)

    @property
    def computed_ms(self) -> float:
        """What all hops computed for it, messages included."""
        return sum(self.computes_ms)

    @property
    def network_ms(self) -> float:
        """One way over all links, as pings say that it took at best lately; 0 where one is not known."""
        links_ms = [self.first_link_ms, *(hop.link_ms for hop in self.hops)]
        return sum(links_ms) if all(links_ms) else 0.0

    @property
    def first_hop_ms(self) -> float:
        """From sending it until it left the first hop."""
        return sum([self.first_link_ms, *self.waits_ms[:1], *self.computes_ms[:1]])

    @property
    def links_ms(self) -> float:
        """All of `total_ms` that no hop waited or computed for."""
        return max(self.total_ms - self.waited_ms - self.computed_ms, 0.0)

    @property
    def other_ms(self) -> float:
        """Time that no hop and no link accounts for: serialisation, waiting for the network's rate, scheduling."""
        known = sum(hop.queue_ms + hop.compute_ms + hop.other_ms + hop.link_ms for hop in self.hops)
        return self.total_ms - self.first_link_ms - known


@dataclass(frozen=True, slots=True)
class Repair:
    """One change of route in the middle of a session.

    generation: of the new route. replaced: peers that it goes around. seconds: from the first report until every hop
    of the new route was attached. is_move: they were leaving and served meanwhile.
    """

    generation: int
    replaced: tuple[str, ...]
    seconds: float
    is_move: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """One generation.

    reused_tokens: of the prompt, those that the session held already, which did not travel again. sweeps: decode
    sweeps; prefill ones, which bring no token, are counted apart. Acceptance length is tokens per tree, the target's
    own token included (plain decoding scores 1.00): the parts in which a tree travels count as one sweep. replicas:
    second machines of hops (hedging). repairs: changes of route meanwhile. differences: what was reported when two such
    machines did not compute the same. reproducible: whether text depends on model, prompt and seed alone (fp32, a
    lossless codec, no multi-step sampling).
    """

    tokens: int
    prompt_tokens: int
    reused_tokens: int
    prefill_sweeps: int
    seed: int
    reproducible: bool
    numeric_class: str
    time_to_first_token_s: float
    total_s: float
    sweeps: tuple[SweepMeasurement, ...]
    hops: tuple[str, ...]
    replicas: tuple[str, ...] = ()
    repairs: tuple[Repair, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Tokens per tree."""
        return self.tokens / self.trees if self.trees else 0.0

    @property
    def trees(self) -> int:
        """Decode sweeps that began a tree; the others went on below one."""
        return sum(not sweep.is_part for sweep in self.sweeps)

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first sweep's, per second after its reply."""
        decode_s = self.total_s - self.time_to_first_token_s
        later = self.tokens - self.sweeps[0].emitted if self.sweeps else 0
        return max(later, 0) / decode_s if decode_s > 0 else 0.0

    @property
    def ms_per_sweep(self) -> float:
        """Median of a decode sweep's trip, the draft not included."""
        totals = sorted(sweep.total_ms for sweep in self.sweeps)
        return totals[len(totals) // 2] if totals else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. tokens: the generated ids, an ending EOS included; the text never holds it."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "eos", "length"]
    stats: Stats
