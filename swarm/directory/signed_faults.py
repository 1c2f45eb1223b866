"""Who says that something is wrong: faults signed by their reporters, so that no hop on the way speaks for another."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.base.ids import SessionId
from swarm.directory.node_record import signer_key
from swarm.directory.sealing import RecordError
from swarm.protocol.faults import statement
from swarm.protocol.messages import Fault
from swarm.protocol.peer_keys import verify


def is_signed(fault: Fault, session: SessionId, records: Iterable[bytes]) -> bool | None:
    """Whether a fault is what its reporter said of this session.

    Args:
        records: sealed records, of which the reporter's own holds its public key.

    Returns:
        None where no record is the reporter's, so that nobody can tell.
    """
    if not fault.reporter or not fault.signature:
        return False
    for record in records:
        try:
            peer, key = signer_key(record)
        except RecordError:
            continue
        if peer == fault.reporter:
            return verify(peer, key, statement(fault, session), fault.signature)
    return None
