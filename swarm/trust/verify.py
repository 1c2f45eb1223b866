"""What machines signed of a text, computed once more: what each claims, and what follows. Owns no file and no network.

Decision: docs/decisions/0091-audits-recompute.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.compute.ragged_batch import RaggedModel
from swarm.protocol.numeric_class import without_rounding
from swarm.trust.bounds import Agrees, Differs, Judgement, Unclear, is_exact
from swarm.trust.replay import Stretch, calibrate, judge

AGREES, DIFFERS, UNDECIDED = 0, 1, 2
"""Exit statuses."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What signed parts of evidence say that left some layers.

    Attributes:
        peers: who signed it: one machine, or all of a chain.
        layers: which.
        stretch: what entered and left; None where the evidence does not hold both.
        missing: what it lacks then.
    """

    peers: tuple[PeerId, ...]
    layers: Span
    stretch: Stretch | None = None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a file of evidence says, once its signatures hold.

    Attributes:
        fingerprint: of the model.
        numeric_class: in which its machines computed.
        claims: what each of them signed.
        notes: what the signatures do not cover, for people.
    """

    fingerprint: str
    numeric_class: str
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """A claim and what follows from its recomputation."""

    claim: Claim
    verdict: Judgement


@dataclass(frozen=True, slots=True)
class Refutation:
    """A machine signed something else than its layers make, as a node's own computation says.

    Attributes:
        peer: the machine.
        span: its layers.
        numeric_class: in which it says to compute.
        verdict: where, and by how much.
        evidence: SHA-256 of what it signed, hex digits.
        at: Unix seconds.
    """

    peer: PeerId
    span: Span
    numeric_class: str
    verdict: Differs
    evidence: str
    at: float


def verify(span: RaggedModel, claims: Iterable[Claim]) -> Iterator[JudgedClaim]:
    """Recompute claims with layers that are here, one after the other.

    Raises:
        ConfigError: a claim is of nothing that these layers could have computed.
    """
    for claim in claims:
        yield JudgedClaim(claim, _judged(span, claim))


def undecided(claims: Iterable[Claim], reason: str) -> list[JudgedClaim]:
    """Claims of which nothing follows here."""
    return [JudgedClaim(claim, Unclear(claim.missing or reason)) for claim in claims]


def exit_status(findings: Iterable[JudgedClaim]) -> int:
    """`DIFFERS` where any claim does, `AGREES` where one agrees and none differs, else `UNDECIDED`."""
    kinds = {type(finding.verdict) for finding in findings}
    if Differs in kinds:
        return DIFFERS
    return AGREES if Agrees in kinds else UNDECIDED


def in_words(verdict: Judgement) -> str:
    """A verdict for people."""
    match verdict:
        case Agrees():
            return f"agrees at {verdict.count} tokens: {verdict.largest:.1e} off at most, {verdict.bound:.1e} is honest"
        case Differs():
            where = ", ".join(map(str, verdict.places))
            more = " and more" if verdict.count > len(verdict.places) else ""
            return f"DIFFERS: {verdict.what} at {where}{more}, {verdict.largest:.1e} off, {verdict.bound:.1e} is honest"
        case Unclear():
            return f"unclear: {verdict.reason}"


def _judged(span: RaggedModel, claim: Claim) -> Judgement:
    if claim.stretch is None:
        return Unclear(claim.missing)
    if not span.span.contains(claim.layers):
        return Unclear(f"needs layers {claim.layers}, and {span.span} are here")
    ours, theirs = span.signed_class, claim.stretch.numeric_class
    needs_calibration = span.numeric_class == without_rounding(theirs) and not is_exact(ours, theirs)
    return judge(span, claim.stretch, calibrate(span, claim.layers) if needs_calibration else None)
