"""The streams that bring one session's sweeps and hear of its faults: one neighbour's or two replicas' (R3, H2).

Each stream is known by its sender's peer id, "" for the client. Only the newest generation's streams are heard.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

import torch

from node.session.admission import Caller
from node.session.counters import NodeCounters
from swarm.base.errors import HopClosed, RemoteProtocolError, ReplicasDiffer
from swarm.base.ids import PeerId, TreeNodeId
from swarm.compute.row_codec import decode_rows
from swarm.link.hedged_link import CLIENT, senders
from swarm.link.link import RECEIPT_S
from swarm.protocol import wire
from swarm.protocol.faults import fault_of
from swarm.protocol.limits import MAX_GENERATION_STEP
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Codec,
    Credits,
    Fault,
    Ready,
    Reroute,
    Rows,
    SweepFrame,
    Upstream,
)

# The downstream side of a link: what this node sends back to the peer that opened the stream. Never waits.

OUTBOX_MESSAGES = 256


class UpstreamStream:
    """One incoming stream's way back; an unread outbox ends the stream.

    Receipts gather for a moment: one for each sweep would cost every hop two wake-ups while it computes.

    Attributes:
        receipt: makes a receipt from the number of parts that arrived.
        ended: set at the end; what is queued then still leaves.
    """

    def __init__(self) -> None:
        self.receipt: Callable[[int], Ack] = lambda parts: Ack(0, parts)
        self._parts = 0
        self._receipt_due: asyncio.TimerHandle | None = None
        self._outbox: asyncio.Queue[Upstream | None] = asyncio.Queue(OUTBOX_MESSAGES + 1)
        self.ended = asyncio.Event()

    def send(self, message: Upstream) -> None:
        """Queue a message; nothing is sent after the end."""
        if self.ended.is_set():
            return
        if self._outbox.qsize() >= OUTBOX_MESSAGES:
            self.end()
            return
        self._outbox.put_nowait(message)

    def count_part(self) -> None:
        """A part arrived; its receipt follows soon."""
        self._parts += 1
        if self._receipt_due is None:
            self._receipt_due = asyncio.get_running_loop().call_later(RECEIPT_S, self._send_receipt)

    def _send_receipt(self) -> None:
        self._receipt_due = None
        self.send(self.receipt(self._parts))

    def end(self) -> None:
        """Finish the stream when what is queued has left."""
        if not self.ended.is_set():
            self.ended.set()
            if self._receipt_due is not None:
                self._receipt_due.cancel()
            self._outbox.put_nowait(None)

    async def drain(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write until the end."""
        while (message := await self._outbox.get()) is not None:
            await write(wire.encode_upstream(message))


# Hedge comparison: are the rows the same that two replicas computed for one sweep?
#
# Which rows are compared is drawn here, by chance, when the first of the two has sent its sweep: neither can know.
# A row is one vector, so its error is one number: the root mean square of the difference over that of the row. A
# maximum over the largest value of a sweep would let all values change that are not the largest.

SWEEPS = 64
"""Of so many late sweeps some rows of the first replica are kept."""
ROWS = 16
"""Of each sweep, so many rows are kept and compared."""
MAX_DIFFERENCE = {Codec.FP32: 1e-4, Codec.FP16: 1e-2, Codec.BF16: 3e-2, Codec.INT8: 3e-2}
"""Of a row's own root mean square: above what the order of additions changes
(docs/decisions/0034-blame-is-on-links.md)."""


class HedgeRows:
    """Rows of the latest sweeps as the faster replica sent them."""

    def __init__(self, rng: random.Random | None = None, row_parts: int = 1) -> None:
        """Keep nothing yet.

        Args:
            row_parts: vectors of the model's width that a row consists of (P14); each is compared by itself.
        """
        self._rng = rng or random.SystemRandom()
        self._row_parts = row_parts
        self._kept: OrderedDict[int, dict[TreeNodeId, bytes]] = OrderedDict()

    def keep(self, frame: SweepFrame) -> None:
        """A sweep came for the first time."""
        assert frame.rows is not None, "a hop after a replica is not the first one"
        places = _places(frame)
        drawn = self._rng.sample(sorted(places), min(ROWS, len(places)))
        self._kept[frame.sweep.sequence] = _rows(frame.rows, {node: places[node] for node in drawn})
        while len(self._kept) > SWEEPS:
            self._kept.popitem(last=False)

    def compare(self, frame: SweepFrame) -> float | None:
        """A sweep came again: how far its rows are from the first ones, the worst row relative to its own size.

        None: it was not kept, or was compared already.
        """
        first = self._kept.pop(frame.sweep.sequence, None)
        if first is None or frame.rows is None:
            return None
        places = _places(frame)
        nodes = sorted(first.keys() & places.keys())
        if not nodes:
            return 0.0
        again = _rows(frame.rows, {node: places[node] for node in nodes})
        try:
            ours, theirs = (
                decode_rows(replace(frame.rows, count=len(nodes), data=b"".join(side)), torch.float32).reshape(
                    len(nodes) * self._row_parts, -1
                )
                for side in ([rows[node] for node in nodes] for rows in (first, again))
            )
        except RemoteProtocolError:  # a value is not a number
            return math.inf
        size = torch.maximum(ours.square().mean(dim=1), theirs.square().mean(dim=1)).sqrt().clamp_min(1e-30)
        return float(((ours - theirs).square().mean(dim=1).sqrt() / size).max())


def _places(frame: SweepFrame) -> dict[TreeNodeId, int]:
    """The rows of a sweep, by node."""
    ids = range(frame.sweep.first_id, frame.sweep.end_id)
    nodes = [TreeNodeId(node) for offset, node in enumerate(ids) if frame.kept is None or frame.kept[offset]]
    return {node: place for place, node in enumerate(nodes)}


def _rows(rows: Rows, places: dict[TreeNodeId, int]) -> dict[TreeNodeId, bytes]:
    """The bytes of these rows."""
    size, data = rows.codec.row_bytes(rows.width), memoryview(rows.data)
    return {node: bytes(data[place * size : (place + 1) * size]) for node, place in places.items()}


def sender_of(attach: Attach, caller: Caller) -> str:
    """Whoever opened a stream, as one of those who may send this hop its sweeps.

    Raises:
        RemoteProtocolError: it is not the hop before, nor its replica; at hop 0, not the session's client.
    """
    if attach.index == 0 and caller == attach.session:
        return CLIENT
    if isinstance(caller, str) and caller in senders(attach.route, attach.index, attach.hedge):
        return caller
    before = "the session's client" if attach.index == 0 else attach.route[attach.index - 1].peer
    raise RemoteProtocolError("attach", f"comes from somebody else than {before}")


MAX_SIGNED = 32
"""Signatures cost a millisecond of the event loop; so many faults in one generation, and none is news any more."""


class UpstreamSet:
    """The streams into one session of `peer`.

    Attributes:
        heard: the newest generation; -1 before the first.
        ready_for: the last generation of which all hops behind are attached; -1 before the first.
    """

    def __init__(
        self,
        peer: PeerId,
        counters: NodeCounters,
        receipt: Callable[[int], Ack],
        sign: Callable[[Fault], Fault],
        row_parts: int = 1,
    ) -> None:
        """Hear nobody yet.

        Args:
            receipt: makes a receipt from the number of parts that arrived on a stream.
            sign: signs what this machine reports of the session.
        """
        self.heard = self.ready_for = -1
        self._peer = peer
        self._counters = counters
        self._receipt = receipt
        self._sign = sign
        self._signed_in, self._signed = -1, 0
        self._by_sender: dict[str, UpstreamStream] = {}
        self._rows = HedgeRows(row_parts=row_parts)
        self._reported_in = -1

    def __contains__(self, upstream: UpstreamStream) -> bool:
        return upstream in self._by_sender.values()

    def __len__(self) -> int:
        return len(self._by_sender)

    def attach(self, upstream: UpstreamStream, attach: Attach, sender: str, received: int, credits: Credits) -> bool:
        """Hear this stream; whether it brings a new generation, and not just a replica of the one that brought it.

        Args:
            received: the last sequence that this hop received.

        Raises:
            HopClosed: a newer generation holds the session.
            RemoteProtocolError: the generation is too far ahead, or the one sender that it has is heard already: then
                something is wrong with the link to it, whose both ends carry that.
        """
        expected = senders(attach.route, attach.index, attach.hedge)
        is_new = self._is_news(attach.generation)
        if attach.generation < self.heard:
            span = str(attach.route[attach.index].span)
            raise HopClosed(self._peer, span, f"generation {attach.generation} is not newer")
        if not is_new and len(expected) == 1:
            raise RemoteProtocolError("generation", f"{attach.generation} is attached already")
        self.heard = attach.generation
        self._keep(expected)
        self.drop(self._by_sender.get(sender))
        self._by_sender[sender] = upstream
        upstream.receipt = self._receipt
        upstream.send(Attached(attach.generation, received or None, reads_packed=True))
        if not is_new:
            self._repeat_ready(upstream, credits)
        return is_new

    def reroute(self, upstream: UpstreamStream, reroute: Reroute, index: int, credits: Credits) -> bool:
        """Hear of a new route, in which this hop stands at `index`; whether it is news.

        Raises:
            RemoteProtocolError: the generation is too far ahead.
        """
        if not self._is_news(reroute.generation):
            self._repeat_ready(upstream, credits)
            return False
        self.heard = reroute.generation
        self._keep(senders(reroute.route, index, reroute.hedge))
        return True

    def drop(self, upstream: UpstreamStream | None) -> None:
        """End a stream and forget it."""
        if upstream is not None:
            upstream.end()
            self._by_sender = {sender: known for sender, known in self._by_sender.items() if known is not upstream}

    def end(self) -> None:
        """Finish all streams; what is queued leaves."""
        self._keep(())

    def send(self, message: Upstream) -> None:
        """Send a message on all streams."""
        for upstream in self._by_sender.values():
            upstream.send(message)

    def report(self, error: Exception) -> None:
        """Send a fault on all streams: signed, but for those beyond `MAX_SIGNED` of a generation."""
        fault = fault_of(error, self.heard, self._peer)
        if self._signed_in < self.heard:
            self._signed_in, self._signed = self.heard, 0
        if self._by_sender and self._signed < MAX_SIGNED:
            self._signed += 1
            fault = self._sign(fault)
        self.send(fault)

    def be_ready(self, credits: Credits) -> None:
        """Report that all hops behind are attached."""
        self.ready_for = self.heard
        self.send(Ready(self.heard, credits))

    def note(self, frame: SweepFrame) -> None:
        """A sweep came for the first time: its replica's is compared with it."""
        if len(self) > 1:
            self._rows.keep(frame)

    def is_duplicate(self, upstream: UpstreamStream, frame: SweepFrame) -> bool:
        """Whether a sweep came again only because a replica brings it too (H3); rows that differ are reported once."""
        difference = self._rows.compare(frame)
        if difference is None:
            return False
        self._counters.doubles += 1
        assert frame.rows is not None, "it was compared"
        if difference > MAX_DIFFERENCE[frame.rows.codec]:
            self._counters.differences += 1
            if self._reported_in < self.heard:
                self._reported_in = self.heard
                reason = f"its rows differ from its replica's by {difference:.1e} of their size"
                self.report(ReplicasDiffer(self._sender(upstream), "?", reason))
        return True

    def skips(self, upstream: UpstreamStream, frame: SweepFrame, received: int) -> bool:
        """Whether one of two replicas left sweeps out, and is heard no more (H4)."""
        if len(self) < 2 or frame.sweep.sequence <= received + 1:
            return False
        sender = self._sender(upstream)
        self.drop(upstream)
        self.report(HopClosed(sender, "?", "fell out of step with its replica"))
        return True

    def _is_news(self, generation: int) -> bool:
        if self.heard >= 0 and generation > self.heard + MAX_GENERATION_STEP:
            raise RemoteProtocolError("generation", f"{generation} is more than {MAX_GENERATION_STEP} ahead")
        return generation > self.heard

    def _keep(self, expected: Collection[str]) -> None:
        for sender in self._by_sender.keys() - set(expected):
            self.drop(self._by_sender[sender])

    def _sender(self, upstream: UpstreamStream) -> str:
        return next(sender for sender, known in self._by_sender.items() if known is upstream)

    def _repeat_ready(self, upstream: UpstreamStream, credits: Credits) -> None:
        """Send one of two replicas the Ready that the other got."""
        if self.ready_for == self.heard:
            upstream.send(Ready(self.heard, credits))
