"""Starts canary generations on a schedule, one at a time and within a budget. Each runs in a process of its own.

`client.terminal.probe` is that program: the health service never imports torch, and a probe that hangs is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.health.options import Health
from swarm.health.state.model_slots import SlotStanding
from swarm.health.state.node import Condition, NodeView
from swarm.health.state.overview import Overview
from swarm.health.state.probe_results import Probe, ProbeBudget, ReplicaComparison, read_comparison, read_probe
from swarm.health.state.verdict import count_replicas
from swarm.protocol.numeric_class import NumericClass
from swarm.status.messages import ServedModel

logger = logging.getLogger(__name__)

PROMPT_TOKENS, NEW_TOKENS = 16, 16
PROBE_TOKENS = PROMPT_TOKENS + NEW_TOKENS
TIMEOUT_S = 60.0
POLL_S = 2.0
RETRY_S = 15.0
"""Pause after a probe that failed, doubled after each that follows: one broken or invented model must not use up the
budget of all."""
SETTLE_S = 3.0
"""Pause before the first probe of a model that has become complete."""
MAX_DOUBLINGS = 16
MAX_LINE_BYTES = 65_536

RunProbe = Callable[[Sequence[str]], Awaitable[str]]
Clock = Callable[[], float]


@dataclass(slots=True)
class _ProbeSchedule:
    """When a model is probed next.

    Attributes:
        due_at: time of the next probe.
        failures: probes in a row that failed.
        compared: when each node's answers were last compared with those of another.
    """

    due_at: float
    failures: int = 0
    compared: dict[PeerId, float] = field(default_factory=dict)


class Prober:
    """Probes every complete model in turn; `run` never ends by itself."""

    def __init__(self, overview: Overview, command: Health, run: RunProbe, clocks: tuple[Clock, Clock]) -> None:
        """Prepare to probe; starts nothing.

        Args:
            command: how often a model is probed, what all probes may cost, and whether links may be plain text.
            clocks: Unix seconds, for what is known; and seconds that never jump, for when a probe is due.
        """
        self._overview, self._every_s, self._run = overview, command.probe_every, run
        self._insecure = command.insecure
        self._is_private = command.membership.network is not None
        self._clock, self._timer = clocks
        self._budget = ProbeBudget(command.probe_budget)
        self._schedules: dict[str, _ProbeSchedule] = {}

    async def run(self) -> None:
        """Probe every due model, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            due = self.due()
            if due is not None:
                await self.probe(*due)

    def due(self) -> tuple[ServedModel, list[NodeView]] | None:
        """The model to probe now, with its serving nodes; None if none is due or the budget is spent."""
        now, complete = self._timer(), {}
        for fingerprint, (model, nodes) in self._overview.knowledge.nodes(self._clock()).items():
            serving = [node for node in nodes if node.condition is Condition.SERVING]
            if self._overview.knowledge.slots.standing(fingerprint) is SlotStanding.REPORTED:
                continue  # without a DHT record no client can reach its nodes
            if serving and min(count_replicas(serving, model.num_layers), default=0) > 0:
                complete[fingerprint] = model, serving
        self._schedules = {name: self._schedules.get(name, _ProbeSchedule(now + SETTLE_S)) for name in complete}
        ready = [name for name, schedule in self._schedules.items() if schedule.due_at <= now]
        if not ready or self._budget.left(now) < PROBE_TOKENS:
            return None
        return complete[min(ready, key=lambda name: self._schedules[name].due_at)]

    async def probe(self, model: ServedModel, nodes: Sequence[NodeView]) -> None:
        """Make a generation; after a good one, compare one node's answers with another's where that can be done."""
        self._budget.spend(PROBE_TOKENS, self._timer())
        probe = await self._generation(model)
        self._overview.record_probe(model, probe, self._clock())
        now = self._timer()
        schedule = self._schedules.setdefault(model.fingerprint, _ProbeSchedule(0.0))
        schedule.failures = 0 if probe.ok else min(schedule.failures + 1, MAX_DOUBLINGS)
        retry_s = min(RETRY_S * 2 ** (schedule.failures - 1), self._every_s)
        schedule.due_at = now + (self._every_s if probe.ok else retry_s)
        peer = self.next_compared(model, nodes) if probe.ok else None
        if peer is not None and self._budget.left(now) >= 2 * PROBE_TOKENS:
            self._budget.spend(2 * PROBE_TOKENS, now)
            schedule.compared[peer] = now
            self._overview.record_comparison(model, await self._comparison(model, peer))

    def next_compared(self, model: ServedModel, nodes: Sequence[NodeView]) -> PeerId | None:
        """The node compared longest ago, of those that can be.

        These have a twin, with just their layers in their class, and are audited; or others have their layers in other
        parts and any two machines of their class give the same text, so whole texts are compared.
        """
        schedule = self._schedules.setdefault(model.fingerprint, _ProbeSchedule(0.0))
        parsed = [(node, NumericClass.parse(node.numeric_class)) for node in nodes]
        exact = [node for node, kind in parsed if kind is not None and kind.is_same_everywhere]
        twins = Counter((node.span, node.numeric_class) for node in nodes)
        comparable = {node.peer for node in exact if _has_stand_in(node, exact, model.num_layers)}
        comparable |= {node.peer for node in nodes if twins[node.span, node.numeric_class] > 1}
        schedule.compared = {peer: at for peer, at in schedule.compared.items() if peer in comparable}
        return min(comparable, key=lambda peer: (schedule.compared.get(peer, 0.0), peer), default=None)

    def _arguments(self, model: ServedModel) -> list[str]:
        options = ["--fingerprint", model.fingerprint, "--tokens", str(NEW_TOKENS)]
        for address in self._overview.join:
            options += ["--join", address]
        if self._is_private:
            options += ["--network-key", "-"]
        return [*options, "--insecure"] if self._insecure else options

    async def _generation(self, model: ServedModel) -> Probe:
        try:
            return read_probe(await self._run(self._arguments(model)))
        except TimeoutError:
            return Probe(ok=False, error=f"no end within {TIMEOUT_S:.0f} s")
        except (OSError, RemoteProtocolError) as error:
            logger.warning("the probe of %s gave no result: %s", model.name, error)
            return Probe(ok=None, error=str(error))

    async def _comparison(self, model: ServedModel, peer: PeerId) -> ReplicaComparison:
        try:
            return read_comparison(await self._run([*self._arguments(model), "--compare", peer]))
        except (TimeoutError, OSError, RemoteProtocolError) as error:
            logger.info("no comparison of %s: %s", peer, error)
            return ReplicaComparison(peer, (), None, 0, str(error))


def _has_stand_in(node: NodeView, exact: Sequence[NodeView], num_layers: int) -> bool:
    """Whether the other nodes of its numeric class cover the model."""
    others = [one for one in exact if one.peer != node.peer and one.numeric_class == node.numeric_class]
    return min(count_replicas(others, num_layers), default=0) > 0


async def run_probe(arguments: Sequence[str], network_key: bytes = b"") -> str:
    """Run `client.terminal.probe` and return the last line that it prints.

    Raises:
        TimeoutError: it took longer than `TIMEOUT_S`, and was killed.
        OSError: it could not be started.
        RemoteProtocolError: it failed, or printed no line.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "client.terminal.probe", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
        limit=MAX_LINE_BYTES,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, stderr = await process.communicate(network_key)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    if process.returncode != 0 or not lines:
        last = (stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise RemoteProtocolError("probe", last[:300])
    return lines[-1]
