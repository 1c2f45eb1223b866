"""What a generation cost and where each sweep's time went. Plain values; owns no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.protocol.messages import HopTime


def within_total(first_link_ms: float, hops: Sequence[HopTime], total_ms: float) -> tuple[float, tuple[HopTime, ...]]:
    """What hops report of a sweep, cut so that all of it together is no more than the client's own clock measured.

    The largest are cut first, all to one level: what a hop reports within its means stays as it is, whatever another
    hop makes up, and however slow the first ping was. A hop's four times are cut in proportion.

    Args:
        first_link_ms: one way to hop 0, as the client's pings measured it.
        hops: what each hop reports; every time is finite and not negative.
        total_ms: from sending the sweep to its reply, by the client's clock.

    Returns:
        The first link and the hops, cut.
    """
    sums_ms = [hop.queue_ms + hop.compute_ms + hop.other_ms + hop.link_ms for hop in hops]
    if first_link_ms + sum(sums_ms) <= total_ms:
        return first_link_ms, tuple(hops)
    level_ms, left_ms, rest = total_ms, total_ms, 1 + len(sums_ms)
    for sum_ms in sorted(
        [first_link_ms, *sums_ms]
    ):  # who asks for least is served first; the others share what is left
        level_ms = left_ms / rest
        if sum_ms > level_ms:
            break
        left_ms, rest = left_ms - sum_ms, rest - 1
    return min(first_link_ms, level_ms), tuple(
        _scaled(hop, min(level_ms / sum_ms, 1.0) if sum_ms else 1.0) for hop, sum_ms in zip(hops, sums_ms, strict=True)
    )


def _scaled(time: HopTime, part: float) -> HopTime:
    if part == 1.0:
        return time
    return HopTime(time.queue_ms * part, time.compute_ms * part, time.other_ms * part, time.link_ms * part)


@dataclass(frozen=True, slots=True)
class SweepMeasurement:
    """One sweep that came back, as the client saw it; times in milliseconds.

    The one record of a sweep: statistics, the controller and `--explain` read it.

    Attributes:
        nodes: tree nodes that it carries beside the pending token (K); tokens of a part of the prompt.
        emitted: tokens that became certain by its reply.
        draft_ms: how long drafting took before it was sent.
        total_ms: from sending it to its reply.
        first_link_ms: the link to hop 0, one way, as pings measured it; 0 where they did not.
        hops: per hop, queue, compute, messages and the measured link behind it, as the hop reports them, cut to what
            the client's clock allows (`within_total`).
        depth: levels of the tree.
        predicted_ms: what `total_ms` was predicted to be; None without a prediction.
        reason: why the tree was as large as it was.
        is_part: whether it went on below a tree in flight, so that it carried no pending token.
        rounds: passes of the draft model before it was sent.
        is_prompt: whether it carried a part of the prompt, and no tree.
        expected_tokens: the sum of its nodes' acceptance probabilities.
        is_alone: whether it met no other sweep of this client at any hop, as far as predicted.
        sent_ms: when it left, by the client's clock; None while sweeps of an earlier generation were unanswered.
        behind: how many of this generation's sweeps were unanswered when it left.
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
    def is_finite(self) -> bool:
        """Whether all of its times are numbers, none of them negative."""
        return (
            0 <= self.total_ms < math.inf
            and 0 <= self.first_link_ms < math.inf
            and all(
                0 <= ms < math.inf
                for hop in self.hops
                for ms in (hop.queue_ms, hop.compute_ms, hop.other_ms, hop.link_ms)
            )
        )

    @property
    def rows(self) -> int:
        """Rows that every hop computed: the nodes, and the pending token where it carried one."""
        return self.nodes + (not self.is_part and not self.is_prompt)

    @property
    def accepted_tokens(self) -> int:
        """Emitted tokens that its nodes brought; the pick after the pending token does not count."""
        return max(self.emitted - (not self.is_part), 0)

    @property
    def waits_ms(self) -> tuple[float, ...]:
        """Per hop, how long it queued."""
        return tuple(hop.queue_ms for hop in self.hops)

    @property
    def computes_ms(self) -> tuple[float, ...]:
        """Per hop, how long it was computed, messages included."""
        return tuple(hop.compute_ms + hop.other_ms for hop in self.hops)

    @property
    def waited_ms(self) -> float:
        """How long it queued at all hops together."""
        return sum(self.waits_ms)

    @property
    def computed_ms(self) -> float:
        """How long all hops together computed it, messages included."""
        return sum(self.computes_ms)

    @property
    def network_ms(self) -> float:
        """One way over all links, by the shortest late pings; 0 where a link was not measured."""
        links_ms = [self.first_link_ms, *(hop.link_ms for hop in self.hops)]
        return sum(links_ms) if all(links_ms) else 0.0

    @property
    def first_hop_ms(self) -> float:
        """The time from sending it until it left the first hop."""
        return sum([self.first_link_ms, *self.waits_ms[:1], *self.computes_ms[:1]])

    @property
    def links_ms(self) -> float:
        """The part of `total_ms` in which it neither queued nor was computed at a hop."""
        return max(self.total_ms - self.waited_ms - self.computed_ms, 0.0)

    @property
    def other_ms(self) -> float:
        """Time that no hop and no link accounts for: serialisation, waiting for the network's rate, scheduling."""
        known = sum(hop.queue_ms + hop.compute_ms + hop.other_ms + hop.link_ms for hop in self.hops)
        return self.total_ms - self.first_link_ms - known


@dataclass(frozen=True, slots=True)
class Repair:
    """One change of route in the middle of a session.

    Attributes:
        generation: of the new route.
        replaced: peers that it goes around.
        seconds: from the first report until every hop of the new route was attached.
        is_move: whether those peers were leaving, and served meanwhile.
    """

    generation: int
    replaced: tuple[str, ...]
    seconds: float
    is_move: bool


@dataclass(frozen=True, slots=True)
class PickChecks:
    """What came of checking a text's picks against the final rows of its tails (docs/design/lies.md).

    Attributes:
        judged: picks that were checked.
        largest_gap: of those, how far the best token's score lay above that of a pick, in logits.
        left_out: picks that were drawn and not checked: too many waited, or it could not be done.
        row_bytes: of final rows that travelled for this alone.
        refuted: machines that were convicted.
        reason: why none could be checked; empty where some were, or none were asked for.
        doubt: how much rarer than its calibration says the draft's best candidates were picked, 0 to 1: 1 is an alarm.
        held_s: how long a stream showed nothing of text that was there, before the first check of a tail that was new.
    """

    judged: int = 0
    largest_gap: float = 0.0
    left_out: int = 0
    row_bytes: int = 0
    refuted: tuple[str, ...] = ()
    reason: str = ""
    doubt: float = 0.0
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """What one generation took.

    Attributes:
        tokens: generated ones.
        prompt_tokens: tokens of the prompt.
        reused_tokens: of the prompt, those that the session held already and that did not travel again.
        prefill_sweeps: sweeps that carried a part of the prompt.
        seed: of the picks.
        reproducible: whether the text depends on model, prompt and seed alone: a numeric class that promises it
            (`swarm.protocol.numeric_class`), processors that round alike, a lossless codec, no multi-step sampling.
        numeric_class: of the route, with the lossy codec if it was chosen, and with its processors' mark where bits
            depend on these and all round alike.
        time_to_first_token_s: from the start to the first token.
        total_s: from the start to the end.
        sweeps: decode sweeps, without those of the prompt.
        hops: the chain at the end, as shown to people.
        replicas: second machines of hops (hedging), likewise.
        repairs: changes of route meanwhile.
        differences: reports of two machines of a hop that did not compute the same.
        ids_travel: whether machines between the ends of the chain were sent token ids (P17).
        paths: how the client reaches the first machine and the last at the end, such as `direct`, `punched` or
            `relayed`; empty where it is not known.
        picks: what came of checking picks.
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
    ids_travel: bool = False
    paths: tuple[str, ...] = ()
    picks: PickChecks = PickChecks()

    @property
    def acceptance_length(self) -> float:
        """Tokens per tree, the target's own included; plain decoding has 1.00. Parts of one tree count together."""
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
        """Median round trip of a decode sweep, the draft not included."""
        totals = sorted(sweep.total_ms for sweep in self.sweeps)
        return totals[len(totals) // 2] if totals else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """What the target thought of one token: natural logarithms of its own probabilities, before any rule or filter.

    Attributes:
        token: the id that was picked.
        log_prob: of it.
        top: the likeliest ids and theirs, best first; as many as were asked for.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """What a text can prove.

    Attributes:
        data: the evidence file, for `swarm verify`; empty where machines signed something else than they had said.
        signed_tokens: tokens of the answer that the machine which picked them signed.
        unsigned: machines of the chain that signed nothing: they died, or refused.
        problems: lines for people: who refused, which links' ends do not agree, what contradicts itself.
    """

    data: bytes
    signed_tokens: int = 0
    unsigned: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation.

    Attributes:
        text: without an ending EOS or stop string.
        tokens: the generated ids, an ending EOS included.
        finish_reason: why it ended.
        stats: what it took.
        log_probs: one per token, where they were asked for; after `resume`, of the tokens since.
        stop_string: the one of `stop` that ended the text; empty for any other end.
        proof: of the text, where it was asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "eos", "length"]
    stats: Stats
    log_probs: tuple[TokenLogProbs, ...] = ()
    stop_string: str = ""
    proof: Proof | None = None
