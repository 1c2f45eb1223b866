"""How much a frame's head holds, counted on the parsed message before any of it is decoded."""

from __future__ import annotations

from swarm.protocol import checks
from swarm.protocol.draft_distribution import MAX_CANDIDATES, MAX_DRAWS
from swarm.protocol.limits import HeadLimits
from swarm.protocol.picks import check_rules
from swarm.protocol.v1 import node_pb2 as pb


def check_counts(frame: pb.Frame, limits: HeadLimits) -> None:
    """Refuse more than a session's credits before it is turned into values one by one.

    Args:
        frame: parsed; nothing of it is checked yet.
        limits: what it may hold.

    Raises:
        RemoteProtocolError: the field that holds more.
    """
    match frame.WhichOneof("kind"):
        case "sweep":
            _check_sweep(frame.sweep.sweep, limits)
        case "ruled_sweep":
            _check_sweep(frame.ruled_sweep.sweep, limits)
        case "snapshot" | "ruled_snapshot" as kind:
            snapshot = frame.snapshot if kind == "snapshot" else frame.ruled_snapshot
            check_rules(snapshot.sampling)
            checks.at_most(snapshot.headers, limits.sweeps, "headers")
            checks.at_most(snapshot.ids, limits.window_tokens + limits.nodes, "ids")
            for field in ("tokens", "sequences", "parents"):
                checks.same_length(len(getattr(snapshot, field)), len(snapshot.ids), field, "ids")
            for header in snapshot.headers:
                _check_sweep(header, limits)
            checks.number(sum(len(header.tokens) for header in snapshot.headers), "headers", limits.nodes + 1)
        case _:
            pass


def _check_sweep(sweep: pb.Sweep, limits: HeadLimits) -> None:
    checks.at_most(sweep.tokens, limits.nodes, "tokens")
    checks.same_length(len(sweep.parents), len(sweep.tokens), "parents", "tokens")
    check_rules(sweep.sampling)
    for guess in checks.at_most(sweep.guesses, len(sweep.tokens), "guesses"):
        checks.at_most(guess.tokens, MAX_CANDIDATES, "guesses")
        checks.at_most(guess.weights, MAX_CANDIDATES, "guesses")
        checks.at_most(guess.draws, MAX_DRAWS, "guesses")
