"""Which reports of strangers a node computes again, and that it does so one at a time and a few rows at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.session import refute
from node.session.context import NodeContext
from node.session.refute import MAX_POSITIONS, Refuter, received
from swarm.base.errors import Busy, RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.protocol.limits import MAX_REPORT_BYTES
from swarm.trust.bounds import Agrees, Differs, Judgement, Unclear
from swarm.trust.hop_evidence import CheckedHop
from swarm.trust.replay import ForwardSteps
from swarm.trust.verify import Refutation

DIFFERS = Differs("rows", (3, 4), 2, 0.5, 1e-5)


class Node:
    """A node whose computation a test decides.

    Attributes:
        told: what it found wrong.
        slices: forwards on the thread that computes.
    """

    def __init__(self, scope: TaskScope, free_tokens: int = 4_096) -> None:
        self.told: list[Refutation] = []
        self.slices = 0
        self.may_go_on = asyncio.Event()
        kind = "cpu-float32"
        model = SimpleNamespace(
            span=Span(0, 8), num_layers=12, numeric_class=kind, signed_class=kind, forwards=7, rows_in=9
        )
        engine = SimpleNamespace(on_thread=self.on_thread)
        context = SimpleNamespace(peer=PeerId("me"), model=model, engine=engine, refuted=self.told.append)
        self.model = model
        self.refuter = Refuter(cast("NodeContext", context), "f" * 64, scope, lambda: free_tokens)

    async def on_thread(self, call: Callable[[], object]) -> object:
        await self.may_go_on.wait()
        self.slices += 1
        return call()

    async def idle(self) -> None:
        assert self.refuter._computing is not None
        await asyncio.wait([self.refuter._computing])


def report(count: int = 20, **changes: Any) -> CheckedHop:  # noqa: ANN401
    """Evidence whose signatures hold."""
    own = {
        "peer": "liar",
        "fingerprint": "f" * 64,
        "span": Span(4, 8),
        "num_layers": 12,
        "numeric_class": "cpu-float32",
        "at": int(time.time()),
    }
    evidence = SimpleNamespace(nodes=range(count))
    return cast("CheckedHop", SimpleNamespace(settlement=SimpleNamespace(**(own | changes)), evidence=evidence))


@pytest.fixture(autouse=True)
def verdict(monkeypatch: pytest.MonkeyPatch) -> list[Judgement]:
    """What a recomputation finds, after three forwards."""
    found: list[Judgement] = [DIFFERS]

    def steps(model: Any, *_: object) -> ForwardSteps[Judgement]:  # noqa: ANN401
        for _sweep in range(3):
            model.forwards += 1
            yield
        if isinstance(found[0], Unclear):
            raise RuntimeError(found[0].reason)
        return found[0]

    stretch = SimpleNamespace(numeric_class="cpu-float32", layers=Span(4, 8))
    monkeypatch.setattr(refute, "judging_twice", steps)
    monkeypatch.setattr(refute, "hop_claim", lambda _: SimpleNamespace(stretch=stretch))
    return found


async def test_a_report_is_computed_once_a_forward_at_a_time_and_told() -> None:
    async with TaskScope() as scope:
        node = Node(scope)
        node.refuter.take(b"one", report())
        node.may_go_on.set()
        await node.idle()
        assert (node.slices, node.model.forwards) == (4, 7), "a report counts as no session's work"
        (told,) = node.told
        assert (told.peer, told.span, told.verdict) == ("liar", Span(4, 8), DIFFERS)
        node.refuter.take(b"one", report())
        assert not node.refuter.is_busy, "what is known is not computed again"
        assert len(told.evidence) == 64


async def test_one_at_a_time() -> None:
    async with TaskScope() as scope:
        node = Node(scope)
        node.refuter.take(b"one", report())
        with pytest.raises(Busy):
            node.refuter.take(b"other", report())
        node.may_go_on.set()
        await node.idle()
        node.refuter.take(b"other", report())
        await node.idle()
        assert len(node.told) == 2


@pytest.mark.parametrize("found", [Agrees(20, 0.0, 1e-5), Unclear("no memory")])
async def test_what_agrees_or_fails_accuses_nobody(found: Judgement, verdict: list[Judgement]) -> None:
    verdict[0] = found
    async with TaskScope() as scope:
        node = Node(scope)
        node.may_go_on.set()
        node.refuter.take(b"one", report())
        await node.idle()
        assert not node.told
        assert [type(one) for one in node.refuter.done.values()] == [type(found)]


async def test_a_recomputation_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refute, "RECOMPUTE_S", 0.0)
    async with TaskScope() as scope:
        node = Node(scope)
        node.refuter.take(b"one", report())
        await node.idle()
        assert isinstance(next(iter(node.refuter.done.values())), Unclear)
        assert not node.told


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": "e" * 64}, "model"),
        ({"num_layers": 13}, "model"),
        ({"span": Span(4, 9)}, "layers"),
        ({"numeric_class": "cuda-sm90-bfloat16", "span": Span(6, 12)}, "layers"),
        ({"count": MAX_POSITIONS + 1}, "positions"),
        ({"at": 1_700_000_000}, "more than a day ago"),
        ({"at": 9_700_000_000}, "or will be"),
    ],
)
async def test_what_cannot_be_decided_here_is_refused(changes: dict[str, Any], named: str) -> None:
    async with TaskScope() as scope:
        with pytest.raises(RemoteProtocolError, match=named):
            Node(scope).refuter.take(b"one", report(**changes))


async def test_nothing_is_computed_of_this_node_itself_nor_without_room() -> None:
    async with TaskScope() as scope:
        node = Node(scope, free_tokens=19)
        node.refuter.take(b"one", report(peer="me"))
        assert not node.refuter.is_busy
        with pytest.raises(Busy):
            node.refuter.take(b"one", report(20))


async def pieces(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield bytes(size)


async def test_a_report_is_bounded_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await received(pieces(3, 4)) == bytes(7)
    for sizes in ((MAX_REPORT_BYTES, 1), (1, 0, 1)):
        with pytest.raises(RemoteProtocolError):
            await received(pieces(*sizes))
    monkeypatch.setattr(refute, "RECEIVE_S", 0.0)

    async def silent() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(RemoteProtocolError, match="did not come"):
        await received(silent())
