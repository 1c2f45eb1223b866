"""One session on this machine: its upstream, its log, its KV, its link to the next hop. Lives in the event loop.

Only the newest generation's upstream is heard (R3). What the sweeps mean is `swarm.session`'s, tensors are
`node.sweep_run`'s; this file moves work between them and says so to the neighbours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from node.engine import Engine
from node.replies import ReplyBuffer
from node.span import SpanModel
from node.sweep_run import HopRole, NoiseSource, SweepRun
from node.tally import Tally
from node.upstream import UpstreamSide
from swarm.arena import Arena
from swarm.codec import check_width
from swarm.dial import Dialer
from swarm.errors import (
    Busy,
    ConfigError,
    HopClosed,
    HopError,
    LocalProtocolError,
    RemoteProtocolError,
    SwarmError,
    Unreachable,
)
from swarm.faults import fault_of
from swarm.hop_log import HopLog
from swarm.ids import PeerId
from swarm.link import Link, open_link
from swarm.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Credits,
    Fault,
    HopTime,
    Ready,
    Reply,
    SweepFrame,
    Upstream,
)
from swarm.registry import Registry
from swarm.sampling import check as check_sampling
from swarm.session import Limits

ORPHAN_S = 5.0
"""How long a session outlives its upstream's stream (R9)."""
IDLE_S = 1_800.0
"""How long a session may stay without a sweep; a chat's user may think meanwhile."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all sessions of a node share."""

    peer: PeerId
    model: SpanModel
    engine: Engine
    registry: Registry
    dialer: Dialer
    tally: Tally
    valid_tokens: int
    noise: NoiseSource


class HopSession:
    """One session's hop; `run` owns it from attach to close."""

    def __init__(self, shop: Workshop, attach: Attach, credits: Credits) -> None:
        self.credits = credits
        self.replies = ReplyBuffer()
        self.log = HopLog(self._limits(shop, credits))
        self._shop = shop
        self._attach = attach
        self._arena: Arena | None = None
        self._role = HopRole(attach.route[attach.index].span, attach.open.codec, shop.valid_tokens, shop.noise)
        self._is_tail = attach.index == len(attach.route) - 1
        self._upstream: UpstreamSide | None = None
        self._downstream: Link | None = None
        self._running: SweepRun | None = None
        self._arrived: dict[int, float] = {}
        self._is_ready = False
        self._closed = asyncio.Event()
        self._reason = "closed"
        self._end_timer: asyncio.TimerHandle | None = None
        self._attaching: asyncio.Task[None] | None = None

    @property
    def is_tail(self) -> bool:
        """Whether this hop picks tokens and holds the reply stream."""
        return self._is_tail

    @property
    def max_row_bytes(self) -> int:
        """Most bytes of rows in a frame: every node that the session may have unanswered, in its codec."""
        return self._role.codec.row_bytes(self._shop.model.hidden_size) * self.credits.nodes

    @property
    def is_closed(self) -> bool:
        """Whether the session is over."""
        return self._closed.is_set()

    def attach(self, upstream: UpstreamSide, attach: Attach) -> None:
        """Hear this stream from now on, and no other (R3).

        Raises:
            HopClosed: a newer generation holds the session, or the new route needs a replay.
        """
        if self._upstream is not None and attach.generation <= self._attach.generation:
            raise HopClosed(self._shop.peer, str(self._role.span), f"generation {attach.generation} is not newer")
        if attach.route != self._attach.route or attach.index != self._attach.index:
            raise HopClosed(self._shop.peer, str(self._role.span), "cannot change a running session's route")
        self._end_upstream()
        self._upstream, self._attach = upstream, attach
        upstream.receipt = self._receipt
        self._end_unless_heard(IDLE_S, "nothing was heard of it")
        upstream.send(Attached(attach.generation, self.log.received.sequence or None))
        if self._is_ready:
            self._be_ready()

    def detach(self, upstream: UpstreamSide) -> None:
        """The stream ended. If it was the session's upstream, wait a while for another one."""
        if self._upstream is upstream:
            self._end_unless_heard(ORPHAN_S, "its upstream vanished")

    def receive(self, upstream: UpstreamSide, frame: SweepFrame) -> None:
        """Take one sweep off the session's stream; a header that breaks the rules is refused and changes nothing."""
        if upstream is not self._upstream or self.is_closed:
            return
        try:
            self._check(frame)
            is_new = self.log.receive(frame)
        except SwarmError as error:
            self._shop.tally.errors += 1
            self._report(error)
            return
        self._end_unless_heard(IDLE_S, "nothing was heard of it")
        self._shop.tally.frames_in += 1
        if is_new:
            self._arrived[frame.sweep.sequence] = time.perf_counter()
            self._shop.engine.submit(self)
        elif self._is_tail:
            self.replies.resend(frame.sweep.sequence)

    def closed_by(self, upstream: UpstreamSide, reason: str) -> None:
        """The session's upstream says that it is over."""
        if upstream is self._upstream:
            self.close(reason)

    def leave(self, reason: str) -> None:
        """End the session from this side, and say why."""
        self._report(HopClosed(self._shop.peer, str(self._role.span), reason))
        self.close(reason)

    def close(self, reason: str) -> None:
        """End the session; `run` frees everything."""
        if not self.is_closed:
            self._reason = reason
            self._closed.set()
            self.replies.close()
            if self._attaching is not None:
                self._attaching.cancel()

    async def run(self) -> None:
        """Reserve KV and attach what lies behind this hop, then wait for the end."""
        self._attaching = asyncio.current_task()
        try:
            self._arena = await self._make_arena()
            if self._is_tail:
                await self._serve()
            else:
                await self._run_linked()
        except SwarmError as error:
            self._report(error)
            self.close(str(error))
        finally:
            self._attaching = None
            self.close("ended")
            if self._end_timer is not None:
                self._end_timer.cancel()
            self._end_upstream()
            self._arena = self._running = None  # its KV is free now, whoever still holds this session
            logger.info("session over: %s; %d sweeps", self._reason, self.log.received.sequence)

    def next_run(self) -> SweepRun | None:
        """For the engine: the sweep to work on."""
        if self.is_closed or self._arena is None:
            return None
        if self._running is None:
            work = self.log.next_work()
            if work is not None:
                sampling = self.log.executed.sampling
                self._running = SweepRun(self._shop.model, self._arena, self._role, work, sampling)
        return self._running

    def finish(self, run: SweepRun) -> None:
        """For the engine: a sweep is done; send it on, or answer it."""
        self._running = None
        if self.is_closed:
            return
        sweep = run.work.frame.sweep
        stayed_ms = (time.perf_counter() - self._arrived.pop(sweep.sequence)) * 1e3
        waited_ms = stayed_ms - run.compute_ms - run.encode_ms
        link_ms = self.replies.link_ms if self._downstream is None else self._downstream.rtt_ms / 2
        times = (*run.work.frame.times, HopTime(max(waited_ms, 0.0), run.compute_ms, run.encode_ms, link_ms))
        tally = self._shop.tally
        tally.sweeps += 1
        tally.tree_nodes += len(run.work.run)
        tally.pruned_nodes = tally.pruned_nodes + len(sweep.tokens) - len(run.work.run)
        tally.frames_out += 1
        if self._is_tail:
            reply = Reply(sweep.sequence, sweep.generation, tuple(run.picks), times)
            self.replies.put(reply, self.log.received.acked)
            return
        assert self._downstream is not None, "sweeps come after Ready"
        kept = None if len(run.work.run) == len(sweep.tokens) else run.kept
        try:
            self._downstream.send(SweepFrame(sweep, kept, run.rows, times))
        except HopError as error:
            self._report(error)

    def fail(self, error: Exception) -> None:
        """For the engine: a sweep could not be run, so this hop is lost to the session."""
        self._running = None
        self._shop.tally.errors += 1
        if not isinstance(error, SwarmError) or isinstance(error, LocalProtocolError):
            logger.error("a forward failed", exc_info=error)
        self._report(error)
        self.close(f"failed: {error}")

    async def _make_arena(self) -> Arena:
        layout, tokens = self._shop.model.layout.within(self._role.span), self._attach.open.window_tokens
        tokens += self.credits.nodes
        try:
            return await self._shop.engine.on_thread(lambda: Arena(layout, tokens))
        except (RuntimeError, MemoryError) as error:  # torch's ways to say that there is no memory
            reason = f"has no memory for the KV of {tokens} tokens ({str(error).partition(chr(10))[0]})"
            raise Busy(self._shop.peer, str(self._role.span), reason) from error

    async def _run_linked(self) -> None:
        behind = replace(self._attach, index=self._attach.index + 1)
        address = await self._address_of(behind)
        channel, is_cold = self._shop.dialer.channel(address), self._shop.dialer.was_cold(address)
        async with open_link(channel, behind, self._on_downstream, is_cold=is_cold) as link:
            self._downstream = link
            try:
                self._take_credits(await link.ready())
                await self._serve()
            finally:
                self._end_upstream()  # whoever closed waits for this hop only, not for all behind it
                link.send(Close(self._reason))

    async def _serve(self) -> None:
        self._attaching = None
        self._be_ready()
        await self._closed.wait()

    def _be_ready(self) -> None:
        self._is_ready = True
        self._say(Ready(self._attach.generation, self.credits))

    def _receipt(self, parts: int) -> Ack:
        working = self._running.work.frame.sweep.sequence if self._running is not None else 0
        return Ack(self.log.received.sequence, parts, working)

    def _end_unless_heard(self, seconds: float, reason: str) -> None:
        """The session's lease: it ends in so many seconds unless it is renewed (R9)."""
        if self._end_timer is not None:
            self._end_timer.cancel()
        if not self.is_closed:
            self._end_timer = asyncio.get_running_loop().call_later(seconds, self.leave, reason)

    def _take_credits(self, theirs: Credits) -> None:
        ours = self.credits
        self.credits = Credits(
            min(ours.window_tokens, theirs.window_tokens),
            min(ours.sweeps, theirs.sweeps),
            min(ours.nodes, theirs.nodes),
        )
        self.log.limit(self._limits(self._shop, self.credits))

    async def _address_of(self, behind: Attach) -> str:
        """Where the next hop listens, from its own signed record and nothing else."""
        hop = behind.route[behind.index]
        for fresh in (False, True):
            records = await self._shop.registry.records(
                behind.open.fingerprint, self._shop.model.num_layers, fresh=fresh
            )
            for record in records:
                if record.peer == hop.peer and record.span.contains(hop.span):
                    return record.address
        raise Unreachable(hop.peer, str(hop.span), "has no valid record in the registry")

    def _on_downstream(self, message: Upstream | HopError) -> None:
        match message:
            case Fault():
                self._say(message)
            case HopError() if not self.is_closed:
                self._report(message)
            case _:
                pass

    def _check(self, frame: SweepFrame) -> None:
        """Sweeps come after Ready; rows from hops, never from a client, in the model's shape; sampling makes sense.

        Nobody holds a reply to what was not run here yet: whoever says so could fill this hop's queue beyond F1.
        """
        rows, sampling = frame.rows, frame.sweep.sampling
        if not self._is_ready:
            raise RemoteProtocolError("sequence", f"sweep {frame.sweep.sequence} came before Ready")
        if frame.sweep.acked > self.log.executed.sequence:
            raise RemoteProtocolError("acked", f"{frame.sweep.acked} is not answered")
        if frame.sweep.want is not None:
            raise RemoteProtocolError("want", "log-probabilities and hidden rows are not given by this version")
        if sampling is not None:
            try:
                check_sampling(sampling, self._shop.model.vocab_size)
            except ConfigError as error:
                raise RemoteProtocolError("sampling", str(error)) from None
        if (rows is None) != (self._attach.index == 0):
            raise RemoteProtocolError("rows", "hop 0 embeds ids, later hops take rows")
        if rows is not None:
            check_width(rows, self._shop.model.hidden_size)
            if rows.codec is not self._role.codec:
                raise RemoteProtocolError("codec", f"{rows.codec.value} rows in a session of {self._role.codec.value}")

    def _end_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.end()

    def _report(self, error: Exception) -> None:
        self._say(fault_of(error, self._attach.generation, self._shop.peer))

    def _say(self, message: Upstream) -> None:
        if self._upstream is not None:
            self._upstream.send(message)

    @staticmethod
    def _limits(shop: Workshop, credits: Credits) -> Limits:
        return Limits(shop.model.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)
