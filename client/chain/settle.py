"""What a client keeps of a session so that its text can be proved, and how it asks hops to sign (PROTOCOL S3–S5).

`differing_link` compares what neighbours say of a link while a text runs. A difference blames the link, never a
machine. `TextLog` keeps what was told; `Settler` asks every hop for its signature, and for the leaves that open it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc.aio
import msgpack

from swarm.base.errors import HopClosed, RemoteProtocolError, SwarmError
from swarm.base.ids import PeerId, TreeNodeId
from swarm.link.dial import Connection
from swarm.link.link import introduce
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.limits import MAX_SHOWN_NODES
from swarm.protocol.messages import (
    Codec,
    HopTime,
    RouteHop,
    Rows,
    Settle,
    Show,
    Shown,
    ShowReply,
    Snapshot,
    Sweep,
    SweepFrame,
)
from swarm.protocol.session import SessionState
from swarm.trust.commitment import COMMITTED, Committed
from swarm.trust.evidence import (
    VERSION,
    Checked,
    SentRows,
    StreamLeaves,
    TextEvidence,
    ToldRoute,
    ToldStream,
    ToldSweep,
    ToldText,
    rows_in,
    signed_part,
    told_bytes,
    verify_signatures,
)
from swarm.trust.settlement import Settlement, check_date, opened

SETTLE_S = 5.0
"""How long a hop may take to sign, or to give a part of what it signed."""
PAUSE_S, MAX_PAUSES = 1.0, 10
"""How long, and how often, a hop is waited for that shows no more at a time."""
DISMISSED_S = 0.5
"""The same of a machine that a chain leaves: the text goes on only then."""

logger = logging.getLogger(__name__)
_Replies = list[tuple[int, tuple[Committed, ...]]]
"""Messages of a tail's streams, each by its place in the settlement."""
_HopWord = tuple[bytes, _Replies]


def differing_link(times: Sequence[HopTime]) -> int | None:
    """The place of the first hop that says it received something else than the hop before says it sent.

    Only what both say of one stream up to one sweep is compared.
    """
    for place in range(1, len(times)):
        before, heads = times[place - 1].heads, times[place].heads
        if before is None or heads is None or before.sequence != heads.sequence:
            continue
        if before.sent_since == heads.received_since and before.sent != heads.received:
            return place
    return None


@dataclass(slots=True)
class TextLog:
    """What was told in one session, from its first sweep on.

    Attributes:
        adopted: tokens that machines held already.
        sweeps: all of them, in order.
        routes: by generation.
        streams: messages to each hop 0, by the generation in which its stream was attached, and its name.
        settled: what machines signed so far.
        replies: of tails that the chain left.
        refused: machines that did not sign, and why.
    """

    adopted: tuple[int, ...] = ()
    sweeps: list[Sweep] = field(default_factory=list)
    routes: dict[int, tuple[RouteHop, ...]] = field(default_factory=dict)
    streams: dict[tuple[int, PeerId], list[tuple[int, bool]]] = field(default_factory=dict)
    settled: list[bytes] = field(default_factory=list)
    replies: list[StreamLeaves] = field(default_factory=list)
    refused: dict[PeerId, str] = field(default_factory=dict)

    def begin(self, state: SessionState) -> None:
        """The session begins with this."""
        self.adopted = tuple(token.token for token in state.committed)

    def sent(self, hop: RouteHop, since: int, message: SweepFrame | Snapshot) -> None:
        """A message left for hop 0."""
        is_snapshot = isinstance(message, Snapshot)
        sequence = message.sequence if isinstance(message, Snapshot) else message.sweep.sequence
        self.streams.setdefault((since, hop.peer), []).append((sequence, is_snapshot))

    def told(self, key: SessionKey, fingerprint: str, prompt: Sequence[int], answer: Sequence[int]) -> ToldText:
        """All of it, and the text that it led to."""
        return ToldText(
            VERSION,
            key.public_key,
            fingerprint,
            self.adopted,
            tuple(ToldRoute(generation, hops) for generation, hops in sorted(self.routes.items())),
            tuple(ToldStream(since, peer, tuple(sent)) for (since, peer), sent in self.streams.items()),
            tuple(map(ToldSweep.of, self.sweeps)),
            len(prompt),
            (*prompt, *answer),
        )


@dataclass(frozen=True, slots=True)
class ChainProof:
    """What the hops of a chain signed of a text.

    Attributes:
        data: the evidence file (`swarm.trust.evidence`).
        checked: what its signatures cover.
        refused: machines that did not sign or did not show, and why.
    """

    data: bytes
    checked: Checked
    refused: tuple[tuple[PeerId, str], ...] = ()


class Settler:
    """Asks the hops of one session."""

    def __init__(self, key: SessionKey, log: TextLog, connect: Callable[[RouteHop], Connection]) -> None:
        """Ask nobody yet.

        Args:
            key: of the session.
            log: takes what they say.
            connect: gives the connection to a hop of the route; raises SwarmError where it cannot be dialled.
        """
        self._key, self._log, self._connect = key, log, connect

    async def settle(self, hops: Sequence[RouteHop], timeout_s: float = SETTLE_S) -> None:
        """Have hops sign, and tails show what they picked; who does not is noted."""
        log = self._log
        for signed in await asyncio.gather(*(self._settle(hop, timeout_s) for hop in hops)):
            if signed is not None:
                sealed, replies = signed
                log.replies += [StreamLeaves(len(log.settled), *one) for one in replies]
                log.settled.append(sealed)

    async def _settle(self, hop: RouteHop, timeout_s: float) -> _HopWord | None:
        try:
            async with asyncio.timeout(timeout_s):
                request = wire.encode_settle(Settle(self._key.session))
                answer = wire.decode_settled(await self._call(hop, wire.SETTLE, request))
                if not answer.held:
                    raise HopClosed(hop.peer, str(hop.span), "no longer holds this session")
                settlement = opened(answer.sealed)
                check_date(settlement, time.time())
                if (settlement.peer, settlement.span, settlement.session) != (hop.peer, hop.span, self._key.session):
                    raise RemoteProtocolError("settlement", "is of another machine or session")
                replies = await self._replies(hop, settlement) if settlement.is_tail else []
        except (SwarmError, grpc.aio.AioRpcError, TimeoutError) as error:
            self._log.refused[hop.peer] = _reason(error)
            return None
        self._log.refused.pop(hop.peer, None)
        return answer.sealed, replies

    async def _replies(self, hop: RouteHop, settlement: Settlement) -> _Replies:
        return [(place, await self.leaves(hop, place, one.count)) for place, one in enumerate(settlement.sent)]

    async def leaves(self, hop: RouteHop, stream: int, count: int, *, sent: bool = True) -> tuple[Committed, ...]:
        """The messages of one stream that a hop sent, or received.

        Raises:
            SwarmError: it does not show them.
        """
        found: list[Committed] = []
        while len(found) < count:
            part = await self._show(hop, Show(self._key.session, sent, stream, first=len(found)))
            messages = [COMMITTED.decode(one) for one in _unpacked(part.data)]
            if not messages:
                raise RemoteProtocolError("leaves", f"end after {len(found)} of {count} messages")
            found += messages
        return tuple(found[:count])

    async def rows(self, hop: RouteHop, settlement: int, nodes: Sequence[TreeNodeId]) -> list[SentRows]:
        """The rows of nodes that a hop sent.

        Raises:
            SwarmError: it does not show them.
        """
        found: list[SentRows] = []
        while nodes:
            asked = tuple(nodes[:MAX_SHOWN_NODES])
            part = await self._show(hop, Show(self._key.session, sent=True, nodes=asked))
            match _unpacked(part.data):
                case [str(), int(count), int(width), bytes(data)] if 0 < count <= len(asked):
                    found.append(SentRows(settlement, width, asked[:count], data))
                    nodes = nodes[count:]
                case _:
                    raise RemoteProtocolError("rows", "are no rows")
        return found

    async def final(self, tail: RouteHop, nodes: Sequence[TreeNodeId]) -> Rows:
        """The final rows after which a tail picked, asked for once it has said what it picked.

        Raises:
            SwarmError: it does not show them.
        """
        part = await self._show(tail, Show(self._key.session, sent=True, nodes=tuple(nodes)))
        match _unpacked(part.data):
            case [str(codec), int(count), int(width), bytes(data)] if count == len(nodes):
                with suppress(ValueError):
                    return Rows(Codec(codec), count, width, data)
        raise RemoteProtocolError("rows", "are not those that were asked for")

    async def _show(self, hop: RouteHop, asked: Show) -> ShowReply:
        answer = wire.decode_shown(await self._asked(hop, wire.encode_show(asked)))
        if answer.state is not Shown.HERE:
            why = "dropped it for want of memory" if answer.state is Shown.DROPPED else "settled no such thing"
            raise HopClosed(hop.peer, str(hop.span), why)
        return answer

    async def _asked(self, hop: RouteHop, request: bytes) -> bytes:
        """What a hop shows; where it has shown much lately, a little later."""
        for _ in range(MAX_PAUSES):
            try:
                return await self._call(hop, wire.SHOW, request)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await asyncio.sleep(PAUSE_S)
        raise HopClosed(hop.peer, str(hop.span), "shows no more of what it settled")

    async def _call(self, hop: RouteHop, method: str, request: bytes) -> bytes:
        connection = self._connect(hop)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.channel.unary_unary(method)
        metadata = introduce(self._key, connection.endpoint, method, request)
        return await call(request, timeout=SETTLE_S, metadata=metadata)

    async def evidence(self, told: ToldText, hops: Sequence[RouteHop], *, with_rows: bool) -> ChainProof:
        """The evidence of a text whose hops have settled; with rows, hops show what they sent along it.

        Raises:
            EvidenceError: machines signed something else than they said while the text ran.
        """
        log, text = self._log, told_bytes(told)
        signature = self._key.sign(signed_part(text))
        evidence = TextEvidence(told, text, signature, tuple(log.settled), tuple(log.replies))
        checked = await asyncio.to_thread(verify_signatures, evidence)
        if with_rows:
            evidence = await self._with_rows(evidence, checked, hops)
            checked = await asyncio.to_thread(verify_signatures, evidence)
        refused = tuple(sorted(log.refused.items()))
        return ChainProof(await asyncio.to_thread(evidence.dump), checked, refused)

    async def _with_rows(self, evidence: TextEvidence, checked: Checked, hops: Sequence[RouteHop]) -> TextEvidence:
        leaves, rows = list[StreamLeaves](), list[SentRows]()
        for place, settlement in enumerate(checked.settlements):
            hop = RouteHop(PeerId(settlement.peer), settlement.span)
            if settlement.is_tail or hop not in hops:
                continue
            try:
                own = [
                    StreamLeaves(place, number, await self.leaves(hop, number, one.count))
                    for number, one in enumerate(settlement.sent)
                ]
                sent = {node for part in own for message in part.messages for node in message.ids}
                found = await self.rows(hop, place, [node for node in checked.path if node in sent])
                for part in found:
                    rows_in(part, settlement)
            except (SwarmError, grpc.aio.AioRpcError, TimeoutError) as error:
                self._log.refused[hop.peer] = _reason(error)
                continue
            leaves += own
            rows += found
        return TextEvidence(
            evidence.told,
            evidence.text,
            evidence.signature,
            evidence.settlements,
            evidence.replies,
            tuple(leaves),
            tuple(rows),
        )


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        is_old = error.code() is grpc.StatusCode.UNIMPLEMENTED
        return "is of a release that does not settle" if is_old else f"does not answer ({error.code().name})"
    return str(error) or "did not answer in time"


def _unpacked(data: bytes) -> list[object]:
    try:
        found = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("data", "is malformed") from error
    if not isinstance(found, list):
        raise RemoteProtocolError("data", "is no list")
    return found
