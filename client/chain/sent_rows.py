"""Rows that hops sent, by what they settle and show (PROTOCOL S4, S5): what audits read.

A hop signs what it sent, and the next one what it received. Only rows that both agree on are compared: what a hop shows
is held against the leaves of the stream that its neighbour signed too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import grpc.aio

from client.chain.audit import HopClaim, Sender
from client.chain.settle import Settler, TextLog
from swarm.base.errors import HopClosed, HopMisbehaved, LinkDiffers, RemoteProtocolError, SwarmError
from swarm.base.ids import SessionId, TreeNodeId
from swarm.protocol.limits import HASH_BYTES
from swarm.protocol.messages import RouteHop, Rows
from swarm.protocol.session import CommittedToken
from swarm.trust.commitment import ROW, Committed, PlacedNode, first_head, leaf, next_head
from swarm.trust.hop_evidence import HopEvidence, ShownStream, check_hop
from swarm.trust.settlement import SettledStream, Settlement, opened

TEXTS_KEPT = 4
"""Texts whose leaves are kept in memory, at most; only one is audited at a time."""
HOPS_KEPT = 6
"""The same of hops that settled: of an audit the hop, its neighbours, and those that compute its part again."""

KEEP_S = 3.0
"""How long a hop of an audited text may take to sign, and to show what: it keeps its session waiting."""
SHOW_S = 30.0
"""How long it may take to give its rows."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class _SettledHop:
    """What one hop signed, and the messages of it that are known.

    Attributes:
        sealed: the settlement as the hop signed it.
        settlement: opened.
        received: all that came by its one stream; None where it is not known.
        sent: all that left by its one stream; None where it is not known.
    """

    sealed: bytes
    settlement: Settlement
    received: tuple[Committed, ...] | None = None
    sent: tuple[Committed, ...] | None = None


async def _in_time(hop: RouteHop, shown: Awaitable[T], limit_s: float) -> T:
    """What a hop shows.

    Raises:
        HopClosed: it takes too long, or does not answer: else a liar would rather be slow than seen.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await shown
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        raise HopClosed(hop.peer, str(hop.span), f"does not show what it signed: {error or 'too late'}") from None


def _known(one: _SettledHop | BaseException) -> _SettledHop:
    if isinstance(one, BaseException):
        raise one
    return one


class SettledRows:
    """A `RowSource`: hops sign what they sent, and show its rows for a while."""

    def __init__(self) -> None:
        """Know no leaves."""
        self._leaves: OrderedDict[tuple[SessionId, str], Mapping[TreeNodeId, bytes]] = OrderedDict()
        self._hops: OrderedDict[tuple[SessionId, str], _SettledHop] = OrderedDict()

    async def keep(self, senders: Sequence[Sender]) -> None:
        """Have hops settle; from then on they keep what they sent, for a while after the session too.

        Raises:
            HopError: one does not, or not in time, or signed other leaves than it shows.
            LinkDiffers: two neighbours signed different rows of their link.
        """
        signed = [_known(one) for one in await asyncio.gather(*map(self._settled, senders), return_exceptions=True)]
        for (before, first), (_, behind) in pairwise(zip(senders, signed, strict=True)):
            own, next_own = first.settlement, behind.settlement
            place, sent, received = _link(own, next_own)
            messages = await _in_time(before.hop, _settler(before).leaves(before.hop, place, sent.count), KEEP_S)
            heads = _heads(before.key.session, own, sent, messages)
            if heads[-1] != sent.head:
                raise HopMisbehaved(before.hop.peer, str(before.hop.span), "signed other leaves than it shows")
            if received.count >= len(heads) or heads[received.count] != received.head:
                why = f"and {next_own.peer} signed different rows of their link"
                raise LinkDiffers(own.peer, str(own.span), why).on_link(next_own.peer, is_even=True)
            self._note(before, messages[: received.count])
            first.sent, behind.received = messages, messages[: received.count]
        if len(senders) < 3:  # the first one is the audited one: what it received, nobody but itself shows
            await self._show_ends(senders[0], signed[0])
        for sender, one in zip(senders, signed, strict=True):
            self._hops[sender.key.session, sender.hop.peer] = one
        while len(self._hops) > HOPS_KEPT:
            self._hops.popitem(last=False)

    async def _show_ends(self, sender: Sender, own: _SettledHop) -> None:
        """Ask a hop for messages of its streams that no neighbour showed; it does not need to answer."""
        with suppress(SwarmError, grpc.aio.AioRpcError):
            settler, settlement = _settler(sender), own.settlement
            count = settlement.received[0].count
            received = await _in_time(sender.hop, settler.leaves(sender.hop, 0, count, sent=False), KEEP_S)
            if own.sent is None and not settlement.is_tail:
                own.sent = await settler.leaves(sender.hop, 0, settlement.sent[0].count)
            own.received = received

    def evidence(self, sender: Sender, claim: HopClaim) -> bytes | None:
        """What a hop that was kept signed of a text, as a file that anybody with its layers can recompute.

        Returns:
            None where the hop did not show all of it, or signed something else.
        """
        own = self._hops.get((sender.key.session, sender.hop.peer))
        if own is None or own.received is None or own.sent is None:
            return None
        nodes = tuple(token.id for token in claim.committed)
        begins, is_tail = own.settlement.span.start == 0, own.settlement.is_tail
        made = HopEvidence(
            own.sealed,
            ShownStream.of(own.received, nodes),
            ShownStream.of(own.sent, nodes),
            nodes,
            tuple(token.token for token in claim.committed) if begins else (),
            None if begins or claim.entering is None else claim.entering.first(len(nodes)),
            None if is_tail or claim.leaving is None else claim.leaving.first(len(nodes)),
            claim.sampling if is_tail else None,
        ).dump()
        try:
            check_hop(made)
        except RemoteProtocolError as error:
            logger.info("no evidence of %s: %s", sender.hop.peer, error)
            return None
        return made

    async def sent(self, sender: Sender, committed: Sequence[CommittedToken]) -> Rows | None:
        """What it shows of a text, held against the leaves where two signed them; None where it is gone."""
        nodes = [token.id for token in committed]
        try:
            parts = await _in_time(sender.hop, _settler(sender).rows(sender.hop, 0, nodes), SHOW_S)
        except (SwarmError, grpc.aio.AioRpcError) as error:
            logger.info("node %s shows no rows: %s", sender.hop.peer, error)
            return None
        widths = {part.width for part in parts}
        data = b"".join(part.data for part in parts)
        rows = Rows(sender.codec, len(nodes), max(widths, default=0), data)
        if len(widths) != 1 or rows.size_bytes != len(data):
            return None
        leaves = self._leaves.get((sender.key.session, sender.hop.peer))
        is_signed = leaves is None or all(
            leaves.get(node) == leaf(sender.key.session, _placed(nodes, place), ROW, rows.row(place).data)
            for place, node in enumerate(nodes)
        )
        return rows if is_signed else None

    async def _settled(self, sender: Sender) -> _SettledHop:
        log = TextLog()
        await Settler(sender.key, log, lambda _: sender.connection).settle([sender.hop], KEEP_S)
        if not log.settled:
            why = log.refused.get(sender.hop.peer, "")
            raise HopClosed(sender.hop.peer, str(sender.hop.span), f"does not settle: {why}")
        replies, settlement = log.replies[0].messages if log.replies else None, opened(log.settled[0])
        if settlement.numeric_class != sender.signed_class:
            why = f"signs that it computes in {settlement.numeric_class}, and its record says {sender.signed_class}"
            raise HopClosed(sender.hop.peer, str(sender.hop.span), why)
        return _SettledHop(log.settled[0], settlement, sent=replies)

    def _note(self, sender: Sender, messages: Sequence[Committed]) -> None:
        found: dict[TreeNodeId, bytes] = {}
        for message in messages:
            for place, node in enumerate(message.ids):
                found[node] = message.leaves[place * HASH_BYTES : (place + 1) * HASH_BYTES]
        self._leaves[sender.key.session, sender.hop.peer] = found
        while len(self._leaves) > TEXTS_KEPT:
            self._leaves.popitem(last=False)


def _settler(sender: Sender) -> Settler:
    return Settler(sender.key, TextLog(), lambda _: sender.connection)


def _link(own: Settlement, behind: Settlement) -> tuple[int, SettledStream, SettledStream]:
    """The stream between two neighbours, by its place among those that the first one sent, as each of them signs it.

    Raises:
        RemoteProtocolError: they do not know one.
    """
    for place, sent in enumerate(own.sent):
        for received in behind.received:
            is_one = (sent.since, sent.other, received.other) == (received.since, behind.peer, own.peer)
            if is_one and not sent.is_broken and not received.is_broken:
                return place, sent, received
    raise RemoteProtocolError("streams", f"{own.peer} and {behind.peer} signed no stream between them")


def _heads(session: SessionId, own: Settlement, sent: SettledStream, messages: Sequence[Committed]) -> list[bytes]:
    """Heads of a stream after each number of messages."""
    heads = [first_head(session, sent.since, own.peer, sent.other)]
    for message in messages:
        heads.append(next_head(heads[-1], message))
    return heads


def _placed(nodes: Sequence[TreeNodeId], place: int) -> PlacedNode:
    return PlacedNode(nodes[place], place, nodes[place - 1] if place else None)
