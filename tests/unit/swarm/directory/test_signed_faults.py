"""A fault is what its reporter said of one session, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.base.errors import Busy
from swarm.base.ids import PeerId, SessionId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.node_record import seal
from swarm.directory.signed_faults import is_signed
from swarm.protocol.faults import fault_of, sign_fault
from swarm.protocol.messages import Fault, FaultKind
from tests.sample_records import sample_record

SESSION = SessionId(b"s" * 16)
IDENTITY, OTHER = Identity.ephemeral(), Identity.ephemeral()
FAULT = sign_fault(
    fault_of(Busy(IDENTITY.peer_id, "0-4", "full"), 3, IDENTITY.peer_id), SESSION, IDENTITY.peer_id, IDENTITY.sign
)


def record_of(identity: Identity) -> bytes:
    return seal(sample_record(identity.peer_id, span=Span(0, 4), expires_at=2e9), identity)


RECORDS = (b"no record", record_of(OTHER), record_of(IDENTITY))


def test_who_said_it_is_known_by_its_record() -> None:
    assert is_signed(FAULT, SESSION, RECORDS)
    assert is_signed(FAULT, SESSION, RECORDS[:2]) is None, "nobody can tell"


@pytest.mark.parametrize(
    "altered",
    [
        replace(FAULT, generation=4),
        replace(FAULT, peer=OTHER.peer_id),
        replace(FAULT, kind=FaultKind.MODEL_MISMATCH),
        replace(FAULT, field="full", reason=""),
        replace(FAULT, reason="full of it"),
        replace(FAULT, reporter=OTHER.peer_id),
        replace(FAULT, signature=OTHER.sign(b"canopy-fault")),
        replace(FAULT, signature=b""),
        replace(FAULT, reporter=None),
    ],
)
def test_nothing_of_it_can_be_altered(altered: Fault) -> None:
    assert is_signed(altered, SESSION, RECORDS) is False


def test_it_says_nothing_of_another_session() -> None:
    assert is_signed(FAULT, SessionId(b"t" * 16), RECORDS) is False


def test_what_is_signed_arrives_as_it_was() -> None:
    """A reason that cannot travel is changed before it is signed."""
    fault = fault_of(Busy(IDENTITY.peer_id, "0-4", "\x1b[2J" + "x" * 5_000), 3, PeerId("a"))
    assert fault.reason.isprintable()
    assert len(fault.reason) == 500
