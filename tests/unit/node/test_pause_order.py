"""A pause beside what else a node does: a move is finished first, a reservation is given up, a deaf directory waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.base.errors import RegistryError
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.directory.node_record import NodeState

OWN, RESERVED = Span(0, 4), Span(4, 8)


class Parts:
    """What a running node consists of, as far as a pause touches it; everything that happens is written down."""

    def __init__(self, *, directory_fails: bool = False) -> None:
        self.done: list[str] = []
        self.span = RESERVED
        self.sessions = SimpleNamespace(draining=False)
        self.model, self.service = SimpleNamespace(span=OWN), object()
        self.rebalance = SimpleNamespace(keep_looking=self.keep_looking)
        self.outbox = SimpleNamespace(add_event=lambda _, text: self.done.append(text))
        self.identity = SimpleNamespace(num_layers=12)
        self.reservation: object | None = None
        self._directory_fails = directory_fails

    def choose(self, span: Span) -> None:
        self.span = span

    async def announce(self, state: NodeState) -> None:
        if self._directory_fails:
            raise RegistryError("no answer")
        self.done.append(f"{state.value} {self.span}")

    async def drain(self, reason: str) -> None:
        self.done.append(f"drained: {self.sessions.draining}")

    async def keep_looking(self, *_: object) -> None:
        self.done.append("looks for layers")
        await asyncio.Event().wait()

    def node(self, scope: TaskScope) -> Node:
        node = Node(ServeConfig(layers="auto"), lambda _: None)
        resources = SimpleNamespace(outbox=self.outbox, rebalance=self.rebalance, scope=scope, identity=self.identity)
        running = SimpleNamespace(host=self, announcer=self, resources=resources, reservation=self.reservation)
        node._running = cast("Any", running)
        return node


async def test_a_reservation_is_given_up_and_looking_begins_again_afterwards() -> None:
    parts = Parts()
    parts.reservation = object()
    async with TaskScope() as scope:
        node = parts.node(scope)
        node._look_for_layers()
        await asyncio.sleep(0)
        looking = node._looking
        await node.pause("a game runs")
        assert looking is not None
        assert looking.cancelled()
        assert parts.done == ["looks for layers", "draining 0-4", "paused: a game runs", "drained: True"]
        await node.resume()
        await asyncio.sleep(0)
    assert not parts.sessions.draining
    assert parts.done[4:] == ["serving 0-4", "serves layers 0…3 of 12 again", "looks for layers"]


async def test_a_move_is_finished_before_the_node_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, loaded = Parts(), asyncio.Event()

    async def move(self: Node, span: Span) -> None:
        await loaded.wait()
        parts.done.append("moved")

    monkeypatch.setattr(Node, "_move", move)
    async with TaskScope() as scope:
        node = parts.node(scope)
        scope.spawn(node.move(RESERVED))
        await asyncio.sleep(0)
        pausing = scope.spawn(node.pause("a game runs"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert parts.done == []
        loaded.set()
        await pausing
    assert parts.done[0] == "moved"
    assert parts.done[1].startswith("draining")


async def test_a_directory_that_does_not_answer_stops_no_pause(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(directory_fails=True)
    async with TaskScope() as scope:
        node = parts.node(scope)
        await node.pause("a game runs")
        assert "drained: True" in parts.done
        await node.resume()
    assert not parts.sessions.draining
    assert caplog.messages == [
        "draining, and could not say so at once: no answer",
        "serving, and could not say so at once: no answer",
    ]
