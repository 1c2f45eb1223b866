"""Real nodes that lie: a whole `node serve` in the attacker's process, honest but for one thing.

What a node sends on, to its successor or as the tail's replies, passes a `Lie`. All else of it is the program that
honest machines run, so it keeps every rule of the protocol that it does not break on purpose.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.redteam.attack import Fight
from swarm.base.errors import SwarmError
from swarm.base.ids import SessionId
from swarm.directory.node_record import NodeState
from swarm.protocol.messages import Attach, Ping, Reply, SweepFrame

if TYPE_CHECKING:
    from node.life.serve import Node
    from node.session.hop_session import HopSession

QUICK = ((1, 0.05), (16, 0.06), (64, 0.08))
"""What a liar says of its speed, so that every client wants it."""
FRAMES_KEPT = 512


def as_it_is(message: object) -> Iterable[object]:
    """Send on what there is."""
    return (message,)


@dataclass(slots=True)
class Lie:
    """What is sent in place of a message.

    Attributes:
        sweeps: Of a sweep for the successor: what goes there, in its place.
        replies: Of a tail's reply: what the client gets.
        delay_s: How late all of it is.
    """

    sweeps: Callable[[SweepFrame], Iterable[SweepFrame]] = as_it_is  # type: ignore[assignment]
    replies: Callable[[Reply], Iterable[Reply]] = as_it_is  # type: ignore[assignment]
    delay_s: float = 0.0


@dataclass(slots=True)
class Insider:
    """A hostile node that runs.

    Attributes:
        frames: The newest sweeps that it passed on, by session.
    """

    node: Node
    frames: dict[SessionId, list[SweepFrame]] = field(default_factory=dict)
    taken: int = 0

    def sessions(self) -> list[Attach]:
        """The newest attach of each session that it holds."""
        return [hop._attach for hop in self.node.sessions._open.values()]

    async def announce(self) -> None:
        """List it as a quick machine that takes sessions."""
        running = self.node.running
        running.host.sweep_ms = QUICK
        with suppress(SwarmError):
            await running.announcer.announce(NodeState.SERVING)

    def report(self, fight: Fight) -> None:
        """Say in how many sessions it took part: a machine that nobody went over was not put to the test."""
        fight.tally.acts += self.taken
        fight.note(f"took part in {self.taken} sessions" if self.taken else "attracted nobody")

    async def hide(self) -> None:
        """List it as one that takes no sessions yet."""
        with suppress(SwarmError):
            await self.node.running.announcer.announce(NodeState.JOINING)


async def insider(fight: Fight, span: str, lie: Lie | None = None) -> Insider:
    """Start a hostile node for these layers; nobody is led to it before `announce`."""
    import torch

    from node.life.serve import Node
    from node.model.config import ServeConfig
    from swarm.demo import TARGET

    torch.set_num_threads(1)
    ground = fight.ground
    config = ServeConfig(
        layers=span,
        model=str(TARGET),
        join=(ground.join,),
        host="127.0.0.1",
        device="cpu",
        dtype="float32",
        threads=1,
        drain=0.0,
        kv_tokens=40_000,
        identity=Path(ground.folder) / f"liar {secrets.token_hex(4)}.key",
    )
    node: Node = await fight.kit.hold(Node(config, lambda _: None))
    fight.tally.identities += 1
    here = Insider(node)
    _lie(here, lie or Lie())
    await here.hide()
    return here


async def lying_hop(fight: Fight, span: str, lie: Lie) -> None:
    """An attack that is such a node and nothing else."""
    here = await insider(fight, span, lie)
    await fight.go()
    await here.announce()
    try:
        await fight.stay()
    finally:
        here.report(fight)


def _lie(here: Insider, lie: Lie) -> None:
    """Put the lie where the process's only node sends."""
    from node.session.table import SessionTable

    attach_session = SessionTable.attach

    def counting_attach(self: SessionTable, *arguments: Any) -> HopSession:  # noqa: ANN401 (passed on as they are)
        here.taken += 1
        return attach_session(self, *arguments)

    SessionTable.attach = counting_attach  # type: ignore[method-assign, assignment]
    _lie_to_successors(here, lie)
    _lie_to_clients(lie)


def _lie_to_successors(here: Insider, lie: Lie) -> None:
    from swarm.link.successor import SuccessorLink

    push = SuccessorLink.push

    def lying_push(self: SuccessorLink, frame: SweepFrame) -> None:
        attach = getattr(self._listener, "_attach", None)
        if attach is not None:
            here.frames.setdefault(attach.session, []).append(frame)
            del here.frames[attach.session][:-FRAMES_KEPT]
        for one in lie.sweeps(frame):
            _send(partial(push, self, one), lie.delay_s)

    SuccessorLink.push = lying_push  # type: ignore[method-assign]


def _lie_to_clients(lie: Lie) -> None:
    """Lie where replies leave: the buffer keeps one for each sweep, so a second would take its place."""
    from node.session.tail import ReplyBuffer

    put, stream = ReplyBuffer.put, ReplyBuffer.stream

    def late_put(self: ReplyBuffer, reply: Reply, acked: int) -> None:
        _send(partial(put, self, reply, acked), lie.delay_s)

    async def lying_stream(self: ReplyBuffer, acked: int) -> AsyncIterator[Reply | Ping]:
        async with aclosing(stream(self, acked)) as messages:  # type: ignore[type-var]
            async for message in messages:
                for one in lie.replies(message) if isinstance(message, Reply) else (message,):
                    yield one

    ReplyBuffer.put = late_put  # type: ignore[method-assign]
    ReplyBuffer.stream = lying_stream  # type: ignore[method-assign]


def _send(send: Callable[[], None], delay_s: float) -> None:
    if delay_s:
        asyncio.get_running_loop().call_later(delay_s, send)
    else:
        send()
