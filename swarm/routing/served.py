"""Which of several listed models is really served: by machines that answer, from the first layer to the last.

Anybody can list a model, also one that has the name, the config and the tokenizer of another and other weights. Listing
costs nothing, so it decides nothing here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.base.errors import RegistryError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.directory.coverage import cover
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import Registry
from swarm.routing.latency import chain_ends, measure_delays

AT_A_TIME: Final = 8
"""Models whose records are read at a time; the search ends with the first of these in which one is served."""
MAX_CANDIDATES: Final = 32
"""Models whose records are read at most."""


@dataclass(frozen=True, slots=True, order=True)
class Evidence:
    """How well a model is served; the greater the better, compared from the first field on.

    Attributes:
        answers: machines with the first layer and with the last one answer a call.
        is_complete: every layer is listed as served.
        nodes: how many nodes are listed as serving.
    """

    answers: bool
    is_complete: bool
    nodes: int


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Finds the model that is served best.

    Attributes:
        registry: the directory.
        probe: measures delays to machines; those that do not answer are left out.
        rng: chooses which ends of chains are called, where there are many.
    """

    registry: Registry
    probe: Callable[[Sequence[NodeRecord]], Awaitable[dict[PeerId, float]]] = measure_delays
    rng: random.Random = field(default_factory=random.SystemRandom)

    async def best(self, candidates: Sequence[ModelIdentity]) -> ModelIdentity:
        """The candidate that is served best; of equals the first. One candidate is taken as it is.

        Args:
            candidates: at least one; those beyond `MAX_CANDIDATES` are not looked at.
        """
        if len(candidates) == 1:
            return candidates[0]
        found: list[tuple[Evidence, ModelIdentity]] = []
        for start in range(0, min(len(candidates), MAX_CANDIDATES), AT_A_TIME):
            some = candidates[start : start + AT_A_TIME]
            evidence = await asyncio.gather(*map(self._evidence, some))
            found += zip(evidence, some, strict=True)
            if any(one.answers for one in evidence):
                break
        return max(found, key=lambda pair: pair[0])[1]

    async def served(self, candidates: Sequence[ModelIdentity]) -> list[ModelIdentity]:
        """Those of the first candidates that machines serve which answer."""
        some = candidates[:AT_A_TIME]
        evidence = await asyncio.gather(*map(self._evidence, some))
        return [model for one, model in zip(evidence, some, strict=True) if one.answers]

    async def _evidence(self, model: ModelIdentity) -> Evidence:
        try:
            records = await self.registry.records(model.fingerprint, model.num_layers)
        except RegistryError:  # of this one alone
            return Evidence(answers=False, is_complete=False, nodes=0)
        is_complete = cover(model, records).complete
        nodes = sum(record.state is NodeState.SERVING for record in records)
        return Evidence(is_complete and await self._answer(records, model.num_layers), is_complete, nodes)

    async def _answer(self, records: Sequence[NodeRecord], num_layers: int) -> bool:
        asked = chain_ends(records, num_layers, self.rng)
        answered = await self.probe(asked)
        alive = [record.span for record in asked if record.peer in answered]
        return any(span.start == 0 for span in alive) and any(span.end == num_layers for span in alive)
