"""What others report of a machine, computed once more with this node's own layers (PROTOCOL S6).

A report proves what a machine signed, and nothing of whether that is right: only a recomputation here says so. It runs
on the thread that computes, a few rows at a time and half of the time, so no sweep waits for long. One at a time,
within a bounded time. What it finds is told on: `node.life` announces it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from node.session.admission import CLOCKS_DIFFER_S
from node.session.context import NodeContext
from swarm.base.errors import Busy, RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.protocol.limits import MAX_REPORT_BYTES, REFUTED_S
from swarm.protocol.numeric_class import without_rounding
from swarm.trust.bounds import Bounds, Differs, Judgement, Unclear
from swarm.trust.claims import hop_claim
from swarm.trust.hop_evidence import CheckedHop, check_hop
from swarm.trust.replay import ForwardSteps, Stretch, calibrating, judging_twice, undecidable
from swarm.trust.verify import Refutation, in_words

RECEIVE_S: Final = 60.0
"""How long a report may take to come."""
RECOMPUTE_S: Final = 120.0
"""How long a recomputation may take, with the pauses between its forwards."""
SLICES: Final = 16, 5
"""Positions in one forward, of two computations of the same."""
MAX_POSITIONS: Final = 1_024
"""Of a text, that are computed again: so much KV is taken besides that of sessions, where it is free."""
KNOWN: Final = 64
"""Reports that are known again, and spans whose rounding is known."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def received(requests: AsyncIterator[bytes]) -> bytes:
    """A report, from its pieces.

    Raises:
        RemoteProtocolError: it is too large, or takes too long.
    """
    pieces, size = list[bytes](), 0
    try:
        async with asyncio.timeout(RECEIVE_S):
            async for piece in requests:
                size += len(piece)
                if size > MAX_REPORT_BYTES or not piece:
                    raise RemoteProtocolError("report", f"has more than {MAX_REPORT_BYTES} bytes, or an empty piece")
                pieces.append(piece)
    except TimeoutError:
        raise RemoteProtocolError("report", f"did not come within {RECEIVE_S:.0f} s") from None
    return b"".join(pieces)


async def checked(data: bytes) -> CheckedHop:
    """A report whose signatures hold.

    Raises:
        RemoteProtocolError: it is none.
    """
    return await asyncio.to_thread(check_hop, data)


class Refuter:
    """Recomputes reports about one model, one at a time.

    Attributes:
        done: verdicts of the newest reports, by the digest of each.
    """

    def __init__(
        self, context: NodeContext, fingerprint: str, scope: TaskScope, free_tokens: Callable[[], int]
    ) -> None:
        """Compute nothing yet.

        Args:
            fingerprint: of the model.
            scope: owns the work.
            free_tokens: KV that no session has reserved.
        """
        self.done: OrderedDict[str, Judgement] = OrderedDict()
        self._context, self._fingerprint = context, fingerprint
        self._scope, self._free_tokens = scope, free_tokens
        self._bounds: dict[Span, Bounds] = {}
        self._computing: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a report is computed now."""
        return self._computing is not None and not self._computing.done()

    def take(self, data: bytes, report: CheckedHop) -> None:
        """Recompute a report some time; one that is known already, never again.

        Raises:
            Busy: another one is computed now, or there is no room.
            RemoteProtocolError: these layers cannot decide it.
        """
        own, me, digest = report.settlement, self._context, hashlib.sha256(data).hexdigest()
        model, count = me.model, len(report.evidence.nodes)
        if digest in self.done or own.peer == me.peer:
            return
        if own.fingerprint != self._fingerprint or own.num_layers != model.num_layers:
            raise RemoteProtocolError("report", f"is of model {own.fingerprint[:12]}, which is not here")
        if not model.span.contains(own.span):
            raise RemoteProtocolError("report", f"is of layers {own.span}, and {model.span} are here")
        if (reason := undecidable(model.numeric_class, own.numeric_class)) is not None:
            raise RemoteProtocolError("report", reason)
        if not -CLOCKS_DIFFER_S < time.time() - own.at < REFUTED_S:
            raise RemoteProtocolError("report", "is of what was signed more than a day ago, or will be")
        if count > MAX_POSITIONS:
            raise RemoteProtocolError("report", f"is of {count} positions; {MAX_POSITIONS} are computed at most")
        if self.is_busy or self._free_tokens() < count:
            raise Busy(me.peer, str(model.span), "recomputes another report, or has no room for one")
        self._computing = self._scope.spawn(self._recompute(report, digest), "a report")

    async def _recompute(self, report: CheckedHop, digest: str) -> None:
        own = report.settlement
        try:
            async with asyncio.timeout(RECOMPUTE_S):
                verdict = await self._judged(report)
        except TimeoutError:
            verdict = Unclear("it took too long")
        except Exception as error:  # noqa: BLE001 - a stranger's rows in a model: nothing of it may end the node
            verdict = Unclear(str(error) or type(error).__name__)
        self.done[digest] = verdict
        while len(self.done) > KNOWN:
            self.done.popitem(last=False)
        logger.info("a report of %s, layers %s: %s", own.peer, own.span, in_words(verdict))
        if isinstance(verdict, Differs):
            peer, at = PeerId(own.peer), round(time.time(), 3)
            self._context.refuted(Refutation(peer, own.span, own.numeric_class, verdict, digest, at))

    async def _judged(self, report: CheckedHop) -> Judgement:
        stretch = (await asyncio.to_thread(hop_claim, report)).stretch
        assert stretch is not None, "evidence of a hop holds both sides"
        return await self._run(judging_twice(self._context.model, stretch, await self._calibrated(stretch), SLICES))

    async def _calibrated(self, stretch: Stretch) -> Bounds | None:
        """How far the class may be off in these layers; None where that is known of all, or nothing decides."""
        model, layers = self._context.model, stretch.layers
        theirs = stretch.numeric_class
        if Bounds.known(model.signed_class, theirs) or model.numeric_class != without_rounding(theirs):
            return None
        if layers not in self._bounds:
            if len(self._bounds) >= KNOWN:
                self._bounds.clear()
            self._bounds[layers] = await self._run(calibrating(model, layers, chunk=SLICES[0]))
        return self._bounds[layers]

    async def _run(self, steps: ForwardSteps[T]) -> T:
        """Run a computation forward by forward, and leave the thread to others for as long after each."""
        model = self._context.model

        def step() -> tuple[T] | None:
            counted = model.forwards, model.rows_in
            try:
                next(steps)
            except StopIteration as end:
                return (end.value,)
            finally:
                model.forwards, model.rows_in = counted
            return None

        while True:
            began_s = time.perf_counter()
            if (result := await self._context.engine.on_thread(step)) is not None:
                return result[0]
            await asyncio.sleep(time.perf_counter() - began_s)
