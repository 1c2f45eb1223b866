"""Errors as they travel: exception → Fault → exception, so that a hop's typed error reaches the client as itself."""

from __future__ import annotations

from swarm.errors import (
    Busy,
    ContextFull,
    HopClosed,
    HopError,
    HopLeaving,
    HopTimeout,
    ModelMismatch,
    ProtocolError,
    RemoteProtocolError,
    ReplicasDiffer,
    SwarmError,
    Unreachable,
)
from swarm.ids import PeerId
from swarm.protocol.messages import Fault, FaultKind

MAX_REASON_CHARS = 500

_KINDS: list[tuple[type[SwarmError], FaultKind]] = [
    (ProtocolError, FaultKind.PROTOCOL),
    (Busy, FaultKind.BUSY),
    (Unreachable, FaultKind.UNREACHABLE),
    (HopTimeout, FaultKind.TIMEOUT),
    (HopClosed, FaultKind.CLOSED),
    (HopLeaving, FaultKind.DRAINING),
    (ReplicasDiffer, FaultKind.DIFFERENT),
    (ContextFull, FaultKind.CONTEXT_FULL),
    (ModelMismatch, FaultKind.MODEL_MISMATCH),
]


def fault_of(error: Exception, generation: int, peer: PeerId) -> Fault:
    """The message for an error.

    Anything that is not a SwarmError is internal: its text stays in the log of the machine where it happened.

    Args:
        error: what was raised.
        generation: of the session's route.
        peer: the machine where it was raised; for a HopError the fault names that error's machine instead.
    """
    kind = next((kind for known, kind in _KINDS if isinstance(error, known)), FaultKind.INTERNAL)
    field = error.field if isinstance(error, ProtocolError) else ""
    reason = str(error) if isinstance(error, SwarmError) else f"internal error ({type(error).__name__})"
    if isinstance(error, ProtocolError | HopError):
        reason = error.reason
    about = PeerId(error.peer) if isinstance(error, HopError) else peer
    return Fault(generation, about, kind, field, reason[:MAX_REASON_CHARS])


def error_of(fault: Fault, span: str) -> SwarmError:
    """The exception that a fault stands for.

    Args:
        fault: as it arrived.
        span: the layers that the fault's peer has in this chain, half-open, for the message.
    """
    match fault.kind:
        case FaultKind.PROTOCOL:
            return RemoteProtocolError(fault.field or "sweep", f"refused by node {fault.peer}: {fault.reason}")
        case FaultKind.CONTEXT_FULL:
            return ContextFull(fault.reason)
        case FaultKind.MODEL_MISMATCH:
            return ModelMismatch(fault.reason)
        case FaultKind.BUSY:
            return Busy(fault.peer, span, fault.reason)
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
