"""All that machines behind a chain's first one are sent over their links, and what middle ones hold (PROTOCOL P17)."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from node.session.hop_session import HopSession
from node.session.service import NodeService
from node.session.upstreams import UpstreamStream
from swarm.protocol import wire
from swarm.protocol.frames import FrameAssembler
from swarm.protocol.messages import Attach, Frame, Sampling, Snapshot, Sweep, SweepFrame, Tell, Upstream
from swarm.protocol.wire import decode_part

SEED = 0xC0FFEE_5EED_1DEA
BIASED, BIAS = 3_977, 0.5 + 1 / 3
"""A token of which texts think better, and by how much."""
WORDS = r"( [a-z]{2,9}){30}"
"""A grammar."""


@dataclass(slots=True)
class Overheard:
    """What machines behind the first one were sent over their links, and what they said.

    Attributes:
        parts: of frames, in order.
        frames: what they held.
        said: messages upstream.
        tells: what tails heard from their clients.
        middle: sessions that were between the ends.
    """

    parts: list[bytes] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    said: list[Upstream] = field(default_factory=list)
    tells: list[Tell] = field(default_factory=list)
    middle: dict[int, HopSession] = field(default_factory=dict)

    def check(self, tokens: Sequence[int]) -> None:
        """Nothing of it is an id or a setting; and there was something to find, at the tail."""
        told = [token for tell in self.tells for token in tell.tokens]
        assert set(tokens[:-1]) <= set(told), "the tail was told itself"
        assert any(tell.sampling is not None for tell in self.tells)
        sweeps = [frame.sweep for frame in self.frames if isinstance(frame, SweepFrame)]
        assert sum(sweep.count for sweep in sweeps) > len(tokens) // 2
        snapshots = [frame for frame in self.frames if isinstance(frame, Snapshot)]
        for sweep in (*sweeps, *(header for snapshot in snapshots for header in snapshot.headers)):
            assert (sweep.tokens, sweep.sampling, sweep.want, sweep.guesses) == ((), None, None, ())
        for snapshot in snapshots:
            assert (snapshot.tokens, snapshot.sampling) == ((), Sampling())
        assert not self.found(told)
        self._check_memory()

    def found(self, tokens: Sequence[int]) -> set[str]:
        """Which secrets the bytes have: in frames, as protobuf has them, or in what was said upstream."""
        sent = b"".join(self.parts) + b"".join(wire.encode_upstream(message) for message in self.said)
        heads = b"".join(_heads(self.parts))
        assert len(heads) > 1_000
        seeds = [_varint(SEED), SEED.to_bytes(8, "little"), SEED.to_bytes(8, "big"), str(SEED).encode()]
        found = {"seed"} if any(seed in sent for seed in seeds) else set()
        found |= {"grammar"} if WORDS.encode() in sent else set()
        found |= {"bias"} if struct.pack("<d", BIAS) in sent else set()
        for place in range(len(tokens) - 3):
            run = tokens[place : place + 4]
            is_telling = min(run) >= 128 and len(set(run)) == len(run)  # else it could stand there by chance
            if is_telling and any(coded in sent for coded in _codings(run)):
                found.add("ids")
        return found

    def _check_memory(self) -> None:
        """A middle machine's logs, journals and queues know structure alone."""
        assert self.middle
        for hop in self.middle.values():
            for state in (hop.log.received, hop.log.executed):
                assert all(one.told is None for one in state.committed)
                assert all(one.told is None for one in state.live.values())
                assert state.sampling == Sampling()
            held = [one for one in _reachable([hop.log, hop.journal]) if isinstance(one, Sweep | Snapshot)]
            for one in held:
                assert one.tokens == ()
                assert one.sampling in (None, Sampling())


def _heads(parts: Sequence[bytes]) -> Iterator[bytes]:
    """The protobuf of frames, without the values of rows; each frame here fits into one part."""
    for part in map(decode_part, parts):
        yield part.data[: part.head_bytes]


def _varint(value: int) -> bytes:
    return wire._varint(value)


def _codings(run: Sequence[int]) -> list[bytes]:
    """Ids in a row, as protobuf packs them, as words of memory, as text."""
    words = [b"".join(token.to_bytes(size, "little") for token in run) for size in (2, 4, 8)]
    return [b"".join(map(_varint, run)), *words, ", ".join(map(str, run)).encode(), ",".join(map(str, run)).encode()]


def _reachable(roots: list[object]) -> list[object]:
    """All objects that can be reached from some; not through classes, modules or functions."""
    found: dict[int, object] = {}
    while roots:
        one = roots.pop()
        is_data = type(one).__module__.split(".")[0] in ("builtins", "collections", "swarm")
        if id(one) not in found and is_data and not isinstance(one, type) and not callable(one):
            found[id(one)] = one
            roots += gc.get_referents(one)
    return list(found.values())


@pytest.fixture
def overheard(monkeypatch: pytest.MonkeyPatch) -> Overheard:
    """Hears behind every first machine; who is first is known by the frames, to whom none with rows come."""
    made = Overheard()
    decode, send, tell, receive = NodeService._decode, UpstreamStream.send, HopSession.tell, HopSession.attach
    read = NodeService._read_session
    behind: dict[int, bool] = {}

    async def reading(
        service: NodeService, requests: AsyncIterator[bytes], hop: HopSession, upstream: UpstreamStream
    ) -> None:
        behind[id(asyncio.current_task())] = hop._attach.index > 0
        await read(service, requests, hop, upstream)

    async def decoding(service: NodeService, assembler: FrameAssembler, part: bytes, owner: str) -> Frame | None:
        message = await decode(service, assembler, part, owner)
        if behind[id(asyncio.current_task())]:
            made.parts.append(part)
            made.frames += [] if message is None else [message]
        return message

    def saying(upstream: UpstreamStream, message: Upstream) -> None:
        made.said.append(message)
        send(upstream, message)

    def telling(hop: HopSession, message: Tell, address: str) -> None:
        made.tells.append(message)
        tell(hop, message, address)

    def attaching(hop: HopSession, upstream: UpstreamStream, attach: Attach, sender: str) -> None:
        if 0 < hop._attach.index < len(hop._attach.route) - 1:
            made.middle[id(hop)] = hop
        receive(hop, upstream, attach, sender)

    monkeypatch.setattr(NodeService, "_read_session", reading)
    monkeypatch.setattr(NodeService, "_decode", decoding)
    monkeypatch.setattr(UpstreamStream, "send", saying)
    monkeypatch.setattr(HopSession, "tell", telling)
    monkeypatch.setattr(HopSession, "attach", attaching)
    return made
