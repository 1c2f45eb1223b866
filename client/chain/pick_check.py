"""May the picks of a reply follow one another under the session's grammar? A wrong one is its tail's fault alone.

The client follows the grammar itself, in a worker, while a sweep is away: what a tail ignores, or forges, is no text.
Penalties and biases move logits, which only the tail knows, so no pick contradicts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

from swarm.errors import RemoteProtocolError
from swarm.ids import TreeNodeId
from swarm.inference.grammars import GrammarPlace
from swarm.inference.path_rules import NodeMasks
from swarm.protocol.messages import Reply, Sweep
from swarm.protocol.session import SessionState
from swarm.runtime.tasks import TaskScope


class PickCheck:
    """What the tail may pick after the nodes of sweeps that are away."""

    def __init__(self) -> None:
        self._place: GrammarPlace | None = None
        self._masks: dict[int, asyncio.Task[None]] = {}
        self._found: dict[int, NodeMasks] = {}

    def follow(self, place: GrammarPlace | None) -> None:
        """Sweeps that leave from now on follow this grammar; None: any token may be picked."""
        self._place = place

    def expect(self, sweep: Sweep, state: SessionState, scope: TaskScope) -> None:
        """A sweep leaves now.

        Args:
            sweep: as it was made.
            state: of the session, with it.
            scope: owns the work.
        """
        if self._place is None:
            return
        nodes = [TreeNodeId(node) for node in range(sweep.picks_from, sweep.first_id + len(sweep.tokens))]
        if nodes:
            masks = self._place.masks(nodes, state)
            self._masks[sweep.sequence] = scope.spawn(self._find(sweep.sequence, masks))

    async def _find(self, sequence: int, masks: Awaitable[NodeMasks]) -> None:
        with suppress(RemoteProtocolError):  # it takes too much here, as it will at the tail
            self._found[sequence] = await masks

    def awaited(self, sequence: int) -> asyncio.Task[None] | None:
        """What must be done before a reply to this sweep is checked; None: nothing."""
        task = self._masks.get(sequence)
        return None if task is None or task.done() else task

    def check(self, reply: Reply) -> None:
        """Raise unless the grammar takes every pick.

        Raises:
            RemoteProtocolError: no honest tail picked that.
        """
        masks = self._found.get(reply.sequence)
        if masks is None:
            return
        for node, token in reply.picks:
            if not masks.allows(node, token):
                raise RemoteProtocolError("picks", f"token {token} after node {node}, which the grammar does not take")

    def answered(self, sequence: int) -> None:
        """A sweep has its answer."""
        self._masks.pop(sequence, None)
        self._found.pop(sequence, None)
