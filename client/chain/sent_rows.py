"""Rows that hops sent, by what they settle and show (PROTOCOL S4, S5): what audits read.

A hop signs what it sent, and the next one what it received. Only rows that both agree on are compared: what a hop shows
is held against the leaves of the stream that its neighbour signed too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import grpc.aio

from client.chain.audit import Sender
from client.chain.settle import Settler, TextLog
from swarm.base.errors import HopClosed, RemoteProtocolError, SwarmError
from swarm.base.ids import SessionId, TreeNodeId
from swarm.protocol.limits import HASH_BYTES
from swarm.protocol.messages import Rows
from swarm.protocol.session import CommittedToken
from swarm.trust.commitment import ROW, Committed, PlacedNode, first_head, leaf, next_head
from swarm.trust.settlement import SettledStream, Settlement, opened

TEXTS_KEPT = 4
"""Texts whose leaves are kept in memory, at most; only one is audited at a time."""


class SettledRows:
    """A `RowSource`: hops sign what they sent, and show its rows for a while."""

    def __init__(self) -> None:
        """Know no leaves."""
        self._leaves: OrderedDict[tuple[SessionId, str], Mapping[TreeNodeId, bytes]] = OrderedDict()

    async def keep(self, senders: Sequence[Sender]) -> None:
        """Have hops settle; from then on they keep what they sent, for a while after the session too.

        Raises:
            HopClosed: one does not.
            RemoteProtocolError: two neighbours signed different rows of their link, or leaves are not what was signed.
        """
        signed = [await self._settled(sender) for sender in senders]
        for (before, own), (_, next_own) in pairwise(zip(senders, signed, strict=True)):
            place, sent, received = _link(own, next_own)
            messages = await _settler(before).leaves(before.hop, place, sent.count)
            heads = _heads(before.key.session, own, sent, messages)
            if heads[-1] != sent.head:
                raise RemoteProtocolError("leaves", f"{own.peer} signed others than it shows")
            if received.count >= len(heads) or heads[received.count] != received.head:
                raise RemoteProtocolError(
                    "heads", f"{own.peer} and {next_own.peer} signed different rows of their link"
                )
            self._note(before, messages[: received.count])

    async def sent(self, sender: Sender, committed: Sequence[CommittedToken]) -> Rows | None:
        """What it shows of a text, held against the leaves where two signed them; None where it is gone."""
        nodes = [token.id for token in committed]
        try:
            parts = await _settler(sender).rows(sender.hop, 0, nodes)
        except (SwarmError, grpc.aio.AioRpcError):
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

    async def _settled(self, sender: Sender) -> Settlement:
        log = TextLog()
        await Settler(sender.key, log, lambda _: sender.connection).settle([sender.hop])
        if not log.settled:
            why = log.refused.get(sender.hop.peer, "")
            raise HopClosed(sender.hop.peer, str(sender.hop.span), f"does not settle: {why}")
        return opened(log.settled[0])

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
