"""Frame validation beyond the session's rules: rows, codec, sampling. Pure: changes no session."""

from __future__ import annotations

from node.engine.sweep_run import HopRole
from node.model.span import SpanModel
from swarm.errors import RemoteProtocolError, SwarmError
from swarm.inference.row_codec import check_width
from swarm.protocol.frames import FrameLimits
from swarm.protocol.limits import HeadLimits
from swarm.protocol.messages import Credits, Rows, Sampling, Snapshot, SweepFrame


class FrameRefused(SwarmError):
    """A frame that the session did not take; its neighbours know already."""


def limits_of(credits: Credits, role: HopRole, hidden_size: int) -> FrameLimits:
    """The largest frame that a session may send: all nodes that it may hold, with their rows as it agreed on them."""
    counts = HeadLimits(credits.window_tokens, credits.sweeps, credits.nodes)
    row_bytes = role.codec.row_bytes(role.width(role.span.start, hidden_size))
    return FrameLimits.of_session(counts, row_bytes * (credits.window_tokens + credits.nodes))


def check_sweep(frame: SweepFrame, model: SpanModel, role: HopRole) -> None:
    """Refuse a sweep whose rows or sampling this hop cannot serve.

    Raises:
        RemoteProtocolError: names the field.
    """
    _check_sampling(frame.sweep.sampling, model)
    for guess in frame.sweep.guesses:
        if (problem := guess.problem(model.vocab_size)) is not None:
            raise RemoteProtocolError("guesses", problem)
    check_rows(frame.rows, model, role)


def check_snapshot(snapshot: Snapshot, model: SpanModel, role: HopRole) -> None:
    """Refuse a snapshot whose rows or sampling this hop cannot serve.

    Raises:
        RemoteProtocolError: names the field.
    """
    _check_sampling(snapshot.sampling, model)
    check_rows(snapshot.rows, model, role)


def _check_sampling(sampling: Sampling | None, model: SpanModel) -> None:
    if sampling is not None and (problem := sampling.beyond(model.vocab_size)) is not None:
        raise RemoteProtocolError("sampling", " ".join(problem))


def check_rows(rows: Rows | None, model: SpanModel, role: HopRole) -> None:
    """Refuse rows at hop 0, which embeds ids, and rows of another width or codec than the session's at later hops.

    Raises:
        RemoteProtocolError: names the field.
    """
    if (rows is None) != (role.span.start == 0):
        raise RemoteProtocolError("rows", "hop 0 embeds ids, later hops take rows")
    if rows is not None:
        check_width(rows, role.width(role.span.start, model.hidden_size))
        if rows.codec is not role.codec:
            raise RemoteProtocolError("codec", f"{rows.codec.value} rows in a session of {role.codec.value}")
