"""What a generation cost and where each sweep's time went. Plain values; owns no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.protocol.messages import HopTime


@dataclass(frozen=True, slots=True)
class SweepStats:
    """One sweep as the client saw it; times in milliseconds.

    nodes: tree nodes below the pending token (K). emitted: tokens that became certain by its reply. hops: per hop,
    queue, compute, messages and the measured link behind it. `first_link_ms` is the link to hop 0. `other_ms` is what
    none of them explains: serialisation, waiting for the network's rate, scheduling. depth: levels of the tree.
    predicted_ms: of `total_ms`, None where nobody predicted. reason: why the tree was as large as it was. is_part: it
    goes on below a tree that was on its way. rounds: passes of the draft model before it was sent.
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

    @property
    def other_ms(self) -> float:
        """Time that no hop, link or draft accounts for."""
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

    reused_tokens: of the prompt, those that the session held already, which did not travel again.
    sweeps: decode sweeps; prefill ones, which bring no token, are counted apart. Acceptance length is tokens per tree,
    the target's own token included (plain decoding scores 1.00): the parts in which a tree travels count as one sweep.
    twins: second machines of hops (hedging). repairs: changes of route meanwhile. differences: what was reported when
    two such machines did not compute the same.
    reproducible: whether text depends on model, prompt and seed alone (fp32, a lossless codec, no multi-step sampling).
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
    sweeps: tuple[SweepStats, ...]
    hops: tuple[str, ...]
    twins: tuple[str, ...] = ()
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
