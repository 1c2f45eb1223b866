"""Frames that a node must withstand: sessions that are mostly right, and what goes wrong in them. Pure, seeded, no I/O.

A `GarbageWriter` speaks for one session. It keeps the session's rules beside the node, so that what it says is near the
border between right and wrong, and not only noise that the first check refuses.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.redteam.fuzzing.mutations import mutate_wire
from swarm.base.errors import ConfigError, ContextFull, LocalProtocolError, RemoteProtocolError
from swarm.base.ids import PeerId, TreeNodeId
from swarm.base.layers import Span
from swarm.compute.row_codec import encode_rows
from swarm.compute.sampling import check as check_sampling
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import split
from swarm.protocol.messages import (
    Attach,
    Close,
    Codec,
    Fault,
    FaultKind,
    Frame,
    Open,
    Ping,
    Reply,
    Reroute,
    RouteHop,
    Rows,
    Sampling,
    Sweep,
    SweepFrame,
    Want,
)
from swarm.protocol.session import Limits, SessionState

T = TypeVar("T")

WINDOW, SWEEPS, NODES = 64, 4, 48
HUGE = (2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1)


class FrameKind(enum.StrEnum):
    """What is sent; the later ones end their stream or session."""

    ATTACH = "attach"
    VALID = "valid sweep"
    HEADER = "wrong header field"
    SAMPLING = "odd sampling or wants"
    SHAPE = "rows of a wrong shape"
    REPLAY = "replay"
    PING = "ping"
    MISPLACED = "message out of place"
    VALUES = "rows that are not finite"
    PART = "part out of place or too large"
    BITS = "flipped bits"
    FIELDS = "changed fields"
    NOISE = "random bytes"
    HALF = "half a frame"


ENDING = (FrameKind.MISPLACED, FrameKind.VALUES, FrameKind.PART, FrameKind.BITS, FrameKind.NOISE, FrameKind.HALF)
GOING_ON = (
    *(FrameKind.VALID, FrameKind.HEADER, FrameKind.SAMPLING, FrameKind.SHAPE, FrameKind.REPLAY, FrameKind.PING),
    FrameKind.FIELDS,
)
WEIGHTS = (16, 46, 8, 14, 8, 8, 4)


@dataclass(frozen=True, slots=True)
class ServedModel:
    fingerprint: str
    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Role:
    """Which hop of a route the node under attack is."""

    route: tuple[RouteHop, ...]
    index: int

    @property
    def takes_rows(self) -> bool:
        """Whether sweeps come with hidden rows: from another hop, as this program pretends to be."""
        return self.index > 0


class GarbageWriter:
    def __init__(self, rng: random.Random, model: ServedModel, role: Role) -> None:
        self.rng = rng
        self.role = role
        self.key = SessionKey(Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)))
        self.answered = 0
        self._model = model
        self._state = SessionState(Limits(model.vocab_size, WINDOW, SWEEPS, NODES))
        self._said: list[SweepFrame] = []

    @property
    def must_wait(self) -> bool:
        """Whether an honest client would wait for a reply now."""
        return self._state.sequence - self.answered >= SWEEPS

    def attach(self, *, right: bool) -> Attach:
        """The first message, usually right, or in any case."""
        open_ = Open(self._model.fingerprint, WINDOW, SWEEPS, NODES, Codec.FP32)
        first = self.key.command(Attach(self.key.session, 0, self.role.route, self.role.index, open_))
        return first if right or self.rng.random() < 0.9 else self._wrong_attach(first)

    def say(self, kind: FrameKind) -> list[bytes]:
        """The parts of one message of this kind."""
        makers: dict[FrameKind, Callable[[], list[bytes]]] = {
            FrameKind.VALID: lambda: self._sweep(self._right()),
            FrameKind.HEADER: lambda: self._sweep(self._wrong(self._right())),
            FrameKind.SAMPLING: lambda: self._sweep(self._odd(self._right())),
            FrameKind.SHAPE: lambda: _parts(self._misshapen(self._right())),
            FrameKind.REPLAY: self._replay,
            FrameKind.PING: lambda: _parts(Ping(self.rng.choice((0, 1, *HUGE)))),
            FrameKind.MISPLACED: self._misplaced,
            FrameKind.VALUES: self._not_finite,
            FrameKind.PART: self._bad_part,
            FrameKind.BITS: self._flipped,
            FrameKind.FIELDS: self._changed,
            FrameKind.NOISE: lambda: [self.rng.randbytes(self.rng.choice((0, 1, 7, 60, 3_000)))],
            FrameKind.HALF: lambda: [wire.encode_part(400, 0, (self.rng.randbytes(100), b""))],
        }
        try:
            return makers[kind]()
        except LocalProtocolError:  # our own encoder refuses to say that: it is left to flipped bits
            return self._flipped()

    def _right(self) -> Sweep:
        """The next sweep as a client might send it."""
        rng, state = self.rng, self._state
        commit = rng.choice(list(state.live)) if state.live and rng.random() < 0.7 else None
        truncate = rng.randint(0, len(state.committed)) if commit is None and rng.random() < 0.2 else None
        if len(state.committed) > WINDOW // 2:
            commit, truncate = None, 0
        path = () if commit is None else state.path_to(commit)
        first = state.next_id
        below: list[TreeNodeId | None] = [None]
        if truncate is None:
            below += state.below(commit)
        count = rng.choice((0, 1, 1, 2, 5, 12))
        parents: list[TreeNodeId | None] = []
        for offset in range(count):
            parents.append(rng.choice(below))
            below.append(TreeNodeId(first + offset))
        return Sweep(
            sequence=state.sequence + 1,
            committed=(len(state.committed) if truncate is None else truncate) + len(path),
            first_id=first,
            tokens=tuple(rng.randrange(self._model.vocab_size) for _ in range(count)),
            parents=tuple(parents),
            picks_from=TreeNodeId(first + rng.randint(0, count)),
            acked=self.answered,
            truncate_to=truncate,
            commit_to=commit,
        )

    def _wrong(self, sweep: Sweep) -> Sweep:
        """One header field near or far beyond its range."""
        rng = self.rng
        field = rng.choice(
            ("sequence", "committed", "first_id", "picks_from", "acked", "commit_to", "truncate_to", "generation")
            + (("token", "parent", "replicas") if sweep.tokens else ("crowd",))
        )
        place = rng.randrange(len(sweep.tokens) or 1)
        match field:
            case "token":
                token = rng.choice((self._model.vocab_size, 2**31 - 1, rng.randrange(2**31)))
                return replace(sweep, tokens=_put(sweep.tokens, place, token))
            case "parent":
                parent = TreeNodeId(rng.choice((sweep.first_id + place, sweep.first_id + place + 1, 0, *HUGE[2:])))
                return replace(sweep, parents=_put(sweep.parents, place, parent))
            case "replicas":
                return replace(sweep, tokens=(7,) * len(sweep.tokens), parents=(None,) * len(sweep.tokens))
            case "crowd":
                count = rng.choice((NODES + 1, 500))
                tokens, parents = tuple(range(count)), (None,) * count
                return replace(sweep, tokens=tokens, parents=parents, picks_from=sweep.first_id)
            case _:
                near = (getattr(sweep, field) or 0) + rng.choice((-2, -1, 1, 2, 7))
                change: dict[str, Any] = {field: rng.choice((max(near, 0), 0, *HUGE[2:]))}
                return replace(sweep, **change)

    def _odd(self, sweep: Sweep) -> Sweep:
        rng = self.rng
        if rng.random() < 0.2:
            return replace(sweep, want=Want(log_probs=rng.random() < 0.5, hidden_rows=rng.random() < 0.5))
        sampling = Sampling(
            seed=rng.choice((0, 1, 2**64 - 1)),
            temperature=rng.choice((0.0, 1e-300, 1e-3, 1.0, 1e9)),
            top_k=rng.choice((None, 1, 50, 2**31 - 1)),
            top_p=rng.choice((None, 0.0, 1e-12, 0.9, 1.0)),
            min_p=rng.choice((None, 0.0, 0.5, 1.0)),
        )
        return replace(sweep, sampling=sampling)

    def _sweep(self, sweep: Sweep) -> list[bytes]:
        """Say a sweep with the rows that belong to it, and remember it when the node must take it."""
        frame = SweepFrame(sweep, None, self._rows(len(sweep.tokens)) if self.role.takes_rows else None)
        parts = _parts(frame)
        if sweep.acked <= self.answered:
            try:
                if sweep.sampling is not None:
                    check_sampling(sweep.sampling, self._model.vocab_size)
                self._state.apply(sweep)
                self._said.append(frame)
            except (RemoteProtocolError, ContextFull, ConfigError):
                pass
        return parts

    def _rows(self, count: int, width: int | None = None, codec: Codec = Codec.FP32) -> Rows:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**32))
        return encode_rows(torch.randn(count, width or self._model.width, generator=generator), codec)

    def _misshapen(self, sweep: Sweep) -> SweepFrame:
        """Rows where none belong, none where some do, or of another count, width or codec."""
        rng, count = self.rng, len(sweep.tokens)
        if not self.role.takes_rows:
            return SweepFrame(sweep, None, self._rows(count))
        kept = tuple(rng.random() < 0.5 for _ in range(rng.choice((count, count + 1, count + 9))))
        return rng.choice(
            (
                lambda: SweepFrame(sweep),
                lambda: SweepFrame(sweep, None, self._rows(count, rng.choice((1, self._model.width - 1)))),
                lambda: SweepFrame(sweep, None, self._rows(count, codec=Codec.FP16)),
                lambda: SweepFrame(sweep, None, self._rows(count + 1)),
                lambda: SweepFrame(sweep, kept, self._rows(sum(kept) + 1)),
                lambda: SweepFrame(sweep, kept, self._rows(sum(kept))) if len(kept) > count else SweepFrame(sweep),
            )
        )()

    def _not_finite(self) -> list[bytes]:
        """Values that no hidden state has, some of them finite."""
        count = 2
        values = torch.zeros(count, self._model.width)
        values[self.rng.randrange(count), self.rng.randrange(self._model.width)] = self.rng.choice(
            (math.nan, math.inf, -math.inf, 3e38, -3e38)
        )
        state = self._state
        first = state.next_id
        sweep = Sweep(state.sequence + 1, 0, first, (1, 2), (None, first), first, acked=self.answered, truncate_to=0)
        return _parts(SweepFrame(sweep, None, encode_rows(values, Codec.FP32)))

    def _replay(self) -> list[bytes]:
        if not self._said:
            return _parts(Ping(3))
        frame = self.rng.choice(self._said[-6:])
        if self.rng.random() < 0.5:
            tokens = tuple(self.rng.randrange(self._model.vocab_size) for _ in frame.sweep.tokens)
            frame = replace(frame, sweep=replace(frame.sweep, tokens=tokens))
        return _parts(frame)

    def _misplaced(self) -> list[bytes]:
        messages: tuple[Frame, ...] = (
            Reply(1, 0, ()),
            Reroute(1, self.role.route, Open("", 1, 1, 1, Codec.FP32, bytes(32)), signature=bytes(64)),
            Fault(0, PeerId("x"), FaultKind.BUSY, "", "says who?"),
            self.key.command(
                Attach(self.key.session, 1, self.role.route, self.role.index, Open("", 1, 1, 1, Codec.FP32))
            ),
        )
        return _parts(self.rng.choice(messages))

    def _bad_part(self) -> list[bytes]:
        rng = self.rng
        big = rng.randbytes(64)
        return [
            rng.choice(
                (
                    wire.encode_part(5, 0, (b"", b"")),
                    wire.encode_part(0, 0, (b"no", b"frame")),
                    wire.encode_part(3, 0, (b"12345678", b"")),
                    wire.encode_part(5 << 20, 0, (big, b"")),
                    wire.encode_part(5, 1 << 40, (big, b"")),
                    wire.encode_part(len(big), NODES * self._model.width * 4 + 1, (big, b"")),
                )
            )
        ]

    def _flipped(self) -> list[bytes]:
        """A right message with a few bits changed, either anywhere or within a head that is announced rightly."""
        rng = self.rng
        messages: tuple[Frame, ...] = (SweepFrame(self._right()), Ping(9), Close("done"))
        head = bytearray(wire.encode_frame(rng.choice(messages)))
        if rng.random() < 0.3:
            head = bytearray(wire.encode_part(len(head), 0, (bytes(head), b"")))
            return [_spoilt(rng, head)]
        spoilt = _spoilt(rng, head)
        return [wire.encode_part(len(spoilt), 0, (spoilt, b""))]

    def _changed(self) -> list[bytes]:
        """A right message that still is one of protobuf's, and says something else."""
        messages: tuple[Frame, ...] = (SweepFrame(self._right()), Ping(9), Close("done"))
        changed = mutate_wire(self.rng, wire.encode_frame(self.rng.choice(messages))) or b"\x00"
        return [wire.encode_part(len(changed), 0, (changed, b""))]

    def _wrong_attach(self, right: Attach) -> Attach:
        rng, open_ = self.rng, right.open
        other = RouteHop(PeerId("nobody"), Span(0, rng.choice((1, 4, 12, 99))))
        if rng.random() < 0.2:
            return replace(right, signature=rng.randbytes(64))
        wrong = rng.choice(
            (
                replace(right, route=(*right.route, other)),
                replace(right, route=(other,), index=0),
                replace(right, route=right.route[::-1]),
                replace(right, route=right.route * 2),
                replace(right, open=replace(open_, fingerprint="00" * 32)),
                replace(right, open=replace(open_, window_tokens=rng.choice((0, 4_000, 2**31)))),
                replace(right, open=replace(open_, nodes=0)),
                replace(right, open=replace(open_, sweeps=0)),
            )
        )
        return self.key.command(wrong)


def _parts(message: Frame) -> list[bytes]:
    return list(split(message))


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _spoilt(rng: random.Random, data: bytearray) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data[: rng.randrange(len(data)) + 1] if rng.random() < 0.2 else data) or b"\x00"
