"""Makes canary generations on a schedule, one at a time and within a budget. Each runs in a process of its own.

`client.probe` is that program: a health service never imports torch, and a probe that hangs is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from swarm.errors import RemoteProtocolError
from swarm.health.state.model_slots import Standing
from swarm.health.state.node import Condition, NodeView, ReportedModel
from swarm.health.state.overview import Overview
from swarm.health.state.probe_results import Probe, ProbeBudget, ReplicaComparison, read_comparison, read_probe
from swarm.health.state.verdict import count_replicas
from swarm.ids import PeerId

logger = logging.getLogger(__name__)

PROMPT_TOKENS, NEW_TOKENS = 16, 16
PROBE_TOKENS = PROMPT_TOKENS + NEW_TOKENS
TIMEOUT_S = 60.0
LOOK_S = 2.0
AGAIN_S = 15.0
"""After a probe that failed: whether it was an accident. Twice as long after each that follows: one broken model, or
one that somebody made up, must not use up what there is to spend on all."""
SETTLE_S = 3.0
"""After a model has become complete."""
MAX_DOUBLED = 16
MAX_LINE_BYTES = 65_536

Run = Callable[[Sequence[str]], Awaitable[str]]
Clock = Callable[[], float]


@dataclass(slots=True)
class _Turn:
    """When a model is probed next, and whose answers were compared when."""

    due_at: float
    failures: int = 0
    compared: dict[PeerId, float] = field(default_factory=dict)


class Prober:
    """Probes every complete model in turn; `run` never ends by itself."""

    def __init__(self, overview: Overview, every_s: float, tokens_per_hour: int, run: Run, clock: Clock) -> None:
        self._overview, self._every_s, self._run, self._clock = overview, every_s, run, clock
        self._budget = ProbeBudget(tokens_per_hour)
        self._turns: dict[str, _Turn] = {}

    async def run(self) -> None:
        """Probe for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            due = self.due()
            if due is not None:
                await self.probe(*due)

    def due(self) -> tuple[ReportedModel, list[NodeView]] | None:
        """The model whose turn it is; None while there is none, or nothing left to spend."""
        now, complete = self._clock(), {}
        for fingerprint, (model, nodes) in self._overview.knowledge.nodes(now).items():
            serving = [node for node in nodes if node.condition is Condition.SERVING]
            if self._overview.knowledge.slots.standing(fingerprint) is Standing.TOLD:
                continue  # nobody could reach its nodes
            if serving and min(count_replicas(serving, model.num_layers), default=0) > 0:
                complete[fingerprint] = model, serving
        self._turns = {name: self._turns.get(name, _Turn(now + SETTLE_S)) for name in complete}
        ready = [name for name, turn in self._turns.items() if turn.due_at <= now]
        if not ready or self._budget.left(now) < PROBE_TOKENS:
            return None
        return complete[min(ready, key=lambda name: self._turns[name].due_at)]

    async def probe(self, model: ReportedModel, nodes: Sequence[NodeView]) -> None:
        """Make a generation, and compare one machine's answers with another's where that can be done."""
        self._budget.spend(PROBE_TOKENS, self._clock())
        probe = await self._generation(model)
        now = self._clock()
        self._overview.probed(model, probe, now)
        turn = self._turns.setdefault(model.fingerprint, _Turn(0.0))
        turn.failures = 0 if probe.ok else min(turn.failures + 1, MAX_DOUBLED)
        again_s = min(AGAIN_S * 2 ** (turn.failures - 1), self._every_s)
        turn.due_at = now + (self._every_s if probe.ok else again_s)
        peer = self.next_compared(model, nodes) if probe.ok else None
        if peer is not None and self._budget.left(now) >= 2 * PROBE_TOKENS:
            self._budget.spend(2 * PROBE_TOKENS, now)
            turn.compared[peer] = now
            self._overview.compared(model, await self._comparison(model, peer))

    def next_compared(self, model: ReportedModel, nodes: Sequence[NodeView]) -> PeerId | None:
        """The machine compared longest ago, of those that can be: with exact arithmetic, and a stand-in."""
        turn = self._turns.setdefault(model.fingerprint, _Turn(0.0))
        exact = [node for node in nodes if node.numeric_class.endswith("-float32")]
        able = [node.peer for node in exact if _has_stand_in(node, exact, model.num_layers)]
        turn.compared = {peer: at for peer, at in turn.compared.items() if peer in able}
        return min(able, key=lambda peer: (turn.compared.get(peer, 0.0), peer), default=None)

    def _arguments(self, model: ReportedModel) -> list[str]:
        options = ["--fingerprint", model.fingerprint, "--tokens", str(NEW_TOKENS)]
        for address in self._overview.join:
            options += ["--join", address]
        return options

    async def _generation(self, model: ReportedModel) -> Probe:
        try:
            return read_probe(await self._run(self._arguments(model)))
        except TimeoutError:
            return Probe(ok=False, error=f"no end within {TIMEOUT_S:.0f} s")
        except (OSError, RemoteProtocolError) as error:
            logger.warning("the probe of %s said nothing: %s", model.name, error)
            return Probe(ok=None, error=str(error))

    async def _comparison(self, model: ReportedModel, peer: PeerId) -> ReplicaComparison:
        try:
            return read_comparison(await self._run([*self._arguments(model), "--compare", peer]))
        except (TimeoutError, OSError, RemoteProtocolError) as error:
            logger.info("no comparison of %s: %s", peer, error)
            return ReplicaComparison(peer, (), None, 0, str(error))


def _has_stand_in(node: NodeView, exact: Sequence[NodeView], num_layers: int) -> bool:
    """Whether there is a chain of the same numeric class without it."""
    others = [one for one in exact if one.peer != node.peer and one.numeric_class == node.numeric_class]
    return min(count_replicas(others, num_layers), default=0) > 0


async def run_probe(arguments: Sequence[str]) -> str:
    """Run `client.probe`; the line that it printed.

    Raises:
        TimeoutError: it took too long, and was killed.
        OSError: it could not be started.
        RemoteProtocolError: it ended without a line.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "client.probe", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
        limit=MAX_LINE_BYTES,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, trouble = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    if process.returncode != 0 or not lines:
        last = (trouble.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise RemoteProtocolError("probe", last[:300])
    return lines[-1]
