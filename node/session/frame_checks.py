"""Frame validation beyond the session's rules: rows, codec, sampling. Pure: changes no session."""

from __future__ import annotations

from node.model.span import SpanModel
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.inference.row_codec import check_width
from swarm.inference.sampling import check as check_sampling
from swarm.protocol.messages import Codec, Rows, Sampling, Snapshot, SweepFrame


def check_sweep(frame: SweepFrame, model: SpanModel, codec: Codec, *, is_first: bool) -> None:
    """Refuse a sweep whose rows or sampling this hop cannot serve.

    Raises:
        RemoteProtocolError: names the field.
    """
    _check_sampling(frame.sweep.sampling, model)
    for guess in frame.sweep.guesses:
        if (problem := guess.problem(model.vocab_size)) is not None:
            raise RemoteProtocolError("guesses", problem)
    check_rows(frame.rows, model, codec, is_first=is_first)


def check_snapshot(snapshot: Snapshot, model: SpanModel, codec: Codec, *, is_first: bool) -> None:
    """Refuse a snapshot whose rows or sampling this hop cannot serve.

    Raises:
        RemoteProtocolError: names the field.
    """
    _check_sampling(snapshot.sampling, model)
    check_rows(snapshot.rows, model, codec, is_first=is_first)


def _check_sampling(sampling: Sampling | None, model: SpanModel) -> None:
    if sampling is not None:
        try:
            check_sampling(sampling, model.vocab_size)
        except ConfigError as error:
            raise RemoteProtocolError("sampling", str(error)) from None


def check_rows(rows: Rows | None, model: SpanModel, codec: Codec, *, is_first: bool) -> None:
    """Refuse rows at hop 0, which embeds ids, and rows of another width or codec at later hops.

    Raises:
        RemoteProtocolError: names the field.
    """
    if (rows is None) != is_first:
        raise RemoteProtocolError("rows", "hop 0 embeds ids, later hops take rows")
    if rows is not None:
        check_width(rows, model.hidden_size)
        if rows.codec is not codec:
            raise RemoteProtocolError("codec", f"{rows.codec.value} rows in a session of {codec.value}")
