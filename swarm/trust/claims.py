"""What a file of evidence claims, hop by hop, in the form that can be recomputed (`swarm.trust.verify`)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from swarm.base.errors import UnknownModel
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.compute.row_codec import decode_rows
from swarm.protocol.messages import Codec
from swarm.protocol.numeric_class import LOSSY_ROWS, without_rounding
from swarm.trust.evidence import Checked, EvidencedSpan, TextEvidence, load, spans_in, verify_signatures
from swarm.trust.hop_evidence import CheckedHop, check_hop, is_hop_evidence
from swarm.trust.replay import Pick, Stretch
from swarm.trust.settlement import Settlement
from swarm.trust.verify import Claim, Claims

LATEST_S: Final = 1 << 36
"""Later dates are not shown: a machine may say any."""


def read_claims(path: Path) -> Claims:
    """What a file claims.

    Raises:
        EvidenceError: it is no evidence, or a part of it is not what was signed.
        UnknownModel: there is no such file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnknownModel(f"{path} cannot be read: {error.strerror}") from None
    if is_hop_evidence(data):
        checked = check_hop(data)
        what = f"one hop's own words of {len(checked.evidence.nodes)} tokens: what it received, and what it sent"
        told = f"{what}; signed {_when(checked.settlement)}"
        return Claims(checked.settlement.fingerprint, _kind(checked.settlement), (hop_claim(checked),), (told,))
    evidence = load(data)
    return claims_of(evidence, verify_signatures(evidence))


def _when(settlement: Settlement) -> str:
    """Its date, for people."""
    return datetime.fromtimestamp(min(settlement.at, LATEST_S), UTC).strftime("%Y-%m-%d %H:%M UTC")


def hop_claim(checked: CheckedHop) -> Claim:
    """What one hop claims by evidence whose signatures hold."""
    own, shown = checked.settlement, checked.evidence
    entering, leaving = (
        None if rows is None else decode_rows(rows, torch.float32) for rows in (shown.entering, shown.leaving)
    )
    picks = tuple(Pick(place, token, shown.sampling) for place, token in checked.picks if shown.sampling is not None)
    return Claim((PeerId(own.peer),), own.span, Stretch(own.span, _kind(own), shown.tokens, entering, leaving, picks))


def _kind(settlement: Settlement) -> str:
    """In which numeric class a machine computed, with its processor's mark, and its rows travelled."""
    if settlement.codec is not Codec.INT8:
        return settlement.numeric_class
    return f"{without_rounding(settlement.numeric_class)}+{LOSSY_ROWS}"  # no mark: nothing of it is equal to the bit


def claims_of(evidence: TextEvidence, checked: Checked) -> Claims:
    """The claims of evidence whose signatures hold."""
    settlements = checked.settlements
    kinds = sorted(set(map(_kind, settlements)))
    kind = kinds[0] if len(kinds) == 1 else without_rounding(kinds[0]) if kinds else ""
    claims = [_claim(part, checked, evidence.told.prompt_tokens) for part in spans_in(evidence, checked)]
    claims += [_of_all(evidence, checked, kind)] if settlements else []
    return Claims(evidence.told.fingerprint, kind, tuple(claims), _notes(checked))


def _claim(part: EvidencedSpan, checked: Checked, prompt_tokens: int) -> Claim:
    """What one machine signed of its part."""
    own = part.settlement
    layers, peers = own.span, (PeerId(own.peer),)
    if part.missing:
        return Claim(peers, layers, missing=f"{part.missing}; --proof-rows keeps them")
    entering, leaving = (
        None if rows is None else decode_rows(rows, torch.float32) for rows in (part.entering, part.leaving)
    )
    picks = tuple(
        Pick(position, token, checked.sampling) for position, token in part.picks if position + 1 >= prompt_tokens
    )
    return Claim(peers, layers, Stretch(layers, _kind(own), part.tokens, entering, leaving, picks))


def _of_all(evidence: TextEvidence, checked: Checked, kind: str) -> Claim:
    """What all machines together signed: the text, by its model."""
    told, unsigned, settlements = evidence.told, set(checked.unsigned_picks), checked.settlements
    places = range(told.prompt_tokens, len(told.tokens))
    picks = tuple(Pick(place - 1, told.tokens[place], checked.sampling) for place in places if place not in unsigned)
    layers = Span(0, settlements[0].num_layers)
    everyone = tuple(dict.fromkeys(PeerId(one.peer) for one in settlements))
    return Claim(everyone, layers, Stretch(layers, kind, told.tokens, picks=picks))


def _notes(checked: Checked) -> tuple[str, ...]:
    notes = [f"{checked.signed_picks} tokens of the answer are signed, {len(checked.unsigned_picks)} are not"]
    notes += [f"signed {_when(checked.settlements[-1])}"] if checked.settlements else []
    notes += [f"nobody signed for {peer[-8:]} of generation {generation}" for generation, peer in checked.unsigned]
    if checked.adopted:
        notes.append(f"{checked.adopted} tokens were computed for an earlier text: none of their rows is signed")
    for one in checked.differing:
        notes.append(f"{one.sender[-8:]} and {one.receiver[-8:]} signed different rows of one link")
    return tuple(notes)
