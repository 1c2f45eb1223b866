"""Evidence of one hop: its own signature covers both sides, and bytes of strangers are bounded before all else."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import Codec, Rows, Sampling
from swarm.protocol.session import Limits, SessionState
from swarm.trust.claims import hop_claim
from swarm.trust.commitment import Committed, commit_tokens, placed
from swarm.trust.hop_evidence import MAGIC, MAX_SHOWN, HopEvidence, ShownStream, check_hop
from tests.sample_evidence import SAMPLING, WIDTH, SignedText, _sweeps, identity

TEXT = SignedText()
PATH = tuple(map(TreeNodeId, TEXT.rows[0].nodes))


def tokens_sent() -> list[Committed]:
    """What hop 0 received."""
    state, found = SessionState(Limits(100, 64, 8, 64)), list[Committed]()
    for sweep in _sweeps():
        nodes = placed(state, state.apply(sweep).appended)
        assert nodes is not None
        found.append(commit_tokens(TEXT.key.session, sweep.sequence, nodes, sweep.tokens, snapshot=False))
    return found


def rows(hop: int, count: int) -> Rows:
    return Rows(Codec.FP32, len(PATH), WIDTH, TEXT.rows[hop].data).first(count)


def evidence(place: int, count: int = len(PATH), **changes: object) -> HopEvidence:
    """Of a hop, along the first nodes of the text."""
    streams, nodes = [tokens_sent(), *TEXT.messages], PATH[:count]
    made = HopEvidence(
        TEXT.keys[place].seal(TEXT.settlements[place], identity(place)),
        ShownStream.of(streams[place], nodes),
        ShownStream.of(streams[place + 1], nodes),
        nodes,
        TEXT.told.tokens[:count] if place == 0 else (),
        None if place == 0 else rows(place - 1, count),
        None if place == 2 else rows(place, count),
        SAMPLING if place == 2 else None,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, len(PATH)])
@pytest.mark.parametrize("place", range(3))
def test_what_a_hop_signed_is_read_and_claimed(place: int, count: int) -> None:
    checked = check_hop(evidence(place, count).dump())
    stretch = hop_claim(checked).stretch
    assert stretch is not None
    assert (checked.settlement.peer, len(stretch)) == (identity(place).peer_id, count)
    assert (stretch.leaving is None) == (place == 2)
    if place == 2 and count == len(PATH):
        assert [(pick.after + 1, pick.token) for pick in stretch.picks] == [
            (position, token) for position, token in enumerate(TEXT.told.tokens) if position >= 3
        ]


def test_evidence_that_is_cut_shows_only_digests_of_what_is_behind() -> None:
    cut, whole = evidence(1, 2).dump(), evidence(1).dump()
    assert len(cut) < len(whole)
    assert check_hop(cut).evidence.sent.rest


ALTERED = {
    "entering rows": lambda: evidence(1, entering=rows(1, len(PATH))),
    "leaving rows": lambda: evidence(1, leaving=rows(0, len(PATH))),
    "another path": lambda: evidence(1, nodes=(*PATH[:1], PATH[2], PATH[1], *PATH[3:])),
    "tokens": lambda: evidence(0, tokens=(9, *TEXT.told.tokens[1 : len(PATH)])),
    "another's signature": lambda: evidence(1, settlement=evidence(2).settlement),
    "messages that are left out": lambda: evidence(1, sent=ShownStream(evidence(1).sent.messages[1:])),
    "messages that came twice": lambda: evidence(1, sent=ShownStream(evidence(1).sent.messages * 2)),
    "one's rows as the other's": lambda: evidence(1, received=evidence(1).sent, entering=rows(1, len(PATH))),
    "no rows": lambda: evidence(1, leaving=None),
    "sampling of no tail": lambda: evidence(1, sampling=SAMPLING),
}


@pytest.mark.parametrize("name", ALTERED)
def test_what_the_hop_did_not_sign_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        check_hop(ALTERED[name]().dump())


def test_picks_by_another_sampling_than_was_signed_claim_nothing() -> None:
    assert check_hop(evidence(2, sampling=Sampling(6, 0.7)).dump()).picks == ()


def test_a_repaired_hop_cannot_be_accused_by_two_of_its_words() -> None:
    """Streams of two generations may bring one node twice, with rows of which each was right in its time."""
    settlement = TEXT.settlements[1]
    twice = replace(settlement, received=(*settlement.received, replace(settlement.received[0], since=1)))
    with pytest.raises(RemoteProtocolError, match="not one whole stream"):
        check_hop(evidence(1, settlement=TEXT.keys[1].seal(twice, identity(1))).dump())


def test_a_snapshot_behind_other_messages_is_refused() -> None:
    """It brings each node once more, perhaps with other rows than those that the hop computed with."""
    shown = evidence(1)
    late = replace(shown.received.messages[-1], is_snapshot=True)
    with pytest.raises(RemoteProtocolError, match="snapshot"):
        check_hop(replace(shown, received=ShownStream((*shown.received.messages[:-1], late))).dump())


def test_bytes_of_strangers_are_refused_and_never_anything_else() -> None:
    """Cuts, changed bytes and absurd lengths; of changes, those that nothing signs alone may pass."""
    rng, whole = random.Random(1), evidence(1).dump()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for one in (bytes(data), whole[: rng.randrange(len(whole))]):
            if one != whole:
                with pytest.raises(RemoteProtocolError):
                    check_hop(one)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack(">I", (1 << 32) - 1),
        struct.pack(">I", 0) * 9,
        struct.pack(">I", 0) * 100_000,
        struct.pack(">I", 70_000) + bytes(70_000) + struct.pack(">I", 0) * 7,
    ],
)
def test_lengths_are_bounded_before_anything_is_read(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        check_hop(MAGIC + body)


def test_more_messages_or_positions_than_are_taken_are_refused() -> None:
    empty = Committed(1, False, b"", b"")
    with pytest.raises(RemoteProtocolError, match="pieces"):
        check_hop(evidence(1, sent=ShownStream((empty,) * (MAX_SHOWN + 1))).dump())
    with pytest.raises(RemoteProtocolError, match="numbers"):
        check_hop(evidence(1, nodes=(TreeNodeId(1),) * (MAX_SHOWN + 1)).dump())
