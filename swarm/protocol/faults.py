"""Errors as they travel: exception → Fault → exception, so that a hop's typed error reaches the client as itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from swarm.base.declared import one_line
from swarm.base.errors import (
    Busy,
    ContextFull,
    HopClosed,
    HopError,
    HopLeaving,
    HopMisbehaved,
    HopRefused,
    HopTimeout,
    ModelMismatch,
    ProtocolError,
    RemoteProtocolError,
    ReplicasDiffer,
    SwarmError,
    Unreachable,
)
from swarm.base.ids import PeerId, SessionId
from swarm.protocol.limits import PEER_ID, TEXT_CHARACTERS
from swarm.protocol.messages import Fault, FaultKind

MAX_REASON_CHARS = 500
_DOMAIN = b"canopy-fault\n"

_KINDS: list[tuple[type[SwarmError], FaultKind]] = [
    (ProtocolError, FaultKind.PROTOCOL),
    (Busy, FaultKind.BUSY),
    (Unreachable, FaultKind.UNREACHABLE),
    (HopTimeout, FaultKind.TIMEOUT),
    (HopClosed, FaultKind.CLOSED),
    (HopMisbehaved, FaultKind.CLOSED),
    (HopLeaving, FaultKind.DRAINING),
    (ReplicasDiffer, FaultKind.DIFFERENT),
    (ContextFull, FaultKind.CONTEXT_FULL),
    (ModelMismatch, FaultKind.MODEL_MISMATCH),
]


SignatureCheck = Callable[[Fault, SessionId, Iterable[bytes]], bool | None]
"""Whether a fault is what its reporter said of a session, by sealed records; None where none is the reporter's."""


def fault_of(error: Exception, generation: int, peer: PeerId) -> Fault:
    """The message for an error, which nobody has signed yet.

    Anything that is not a SwarmError is internal: its text stays in the log of the machine where it happened.

    Args:
        error: what was raised.
        generation: of the session's route.
        peer: the machine where it was raised; for a HopError the fault names that error's machine instead, unless
            that is no name at all.
    """
    kind = next((kind for known, kind in _KINDS if isinstance(error, known)), FaultKind.INTERNAL)
    field = error.field if isinstance(error, ProtocolError) else ""
    reason = str(error) if isinstance(error, SwarmError) else f"internal error ({type(error).__name__})"
    if isinstance(error, ProtocolError | HopError):
        reason = error.reason
    is_named = isinstance(error, HopError) and PEER_ID.fullmatch(error.peer) is not None
    about = PeerId(error.peer) if isinstance(error, HopError) and is_named else peer
    fault = Fault(generation, about, kind, one_line(field, TEXT_CHARACTERS), one_line(reason, MAX_REASON_CHARS))
    if isinstance(error, Busy):
        again_s, place = error.retry_after_s, error.position
        return replace(fault, retry_after_s=again_s, expected_s=error.expected_s, position=place)
    return fault


def statement(fault: Fault, session: SessionId) -> bytes:
    """What the reporter of a fault signs: all that the fault says, and of which session."""
    generation = str(fault.generation)
    words = (generation, fault.reporter or "", fault.peer, fault.kind.value, fault.field, fault.reason)
    parts = (session, *(word.encode("utf-8", "replace") for word in words))
    return _DOMAIN + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def sign_fault(fault: Fault, session: SessionId, peer: PeerId, sign: Callable[[bytes], bytes]) -> Fault:
    """The fault as a machine reports it; `sign` signs with that peer's identity."""
    said = replace(fault, reporter=peer)
    return replace(said, signature=sign(statement(said, session)))


def error_of(fault: Fault, span: str) -> HopError:
    """The exception that a fault stands for.

    Args:
        fault: as it arrived.
        span: the layers that the fault's peer has in this chain, half-open, for the message.
    """
    match fault.kind:
        case FaultKind.PROTOCOL:
            said = RemoteProtocolError(fault.field or "sweep", f"refused by node {fault.peer}: {fault.reason}")
            return HopRefused(fault.peer, span, said)
        case FaultKind.CONTEXT_FULL:
            return HopRefused(fault.peer, span, ContextFull(fault.reason))
        case FaultKind.MODEL_MISMATCH:
            return HopRefused(fault.peer, span, ModelMismatch(fault.reason))
        case FaultKind.BUSY:
            busy = Busy(fault.peer, span, fault.reason)
            return busy.asking_again(fault.retry_after_s, fault.position, fault.expected_s)
        case FaultKind.UNREACHABLE:
            return Unreachable(fault.peer, span, fault.reason)
        case FaultKind.TIMEOUT:
            return HopTimeout(fault.peer, span, fault.reason)
        case FaultKind.DRAINING:
            return HopLeaving(fault.peer, span, fault.reason)
        case FaultKind.DIFFERENT:
            return ReplicasDiffer(fault.peer, span, fault.reason)
        case FaultKind.CLOSED | FaultKind.INTERNAL:
            return HopClosed(fault.peer, span, fault.reason)
