"""The models of a swarm with their records, where some are damaged, made up, or simply many. Owns no registry."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from swarm.discovery.node_record import NodeRecord
from swarm.discovery.registry import Registry
from swarm.errors import RegistryError
from swarm.ids import ModelIdentity

MODEL_S: Final = 10.0
"""Time for the records of one model."""
ALL_S: Final = 30.0
"""Time for the records of all models; what is not read by then is left out."""
AT_ONCE: Final = 8
"""Models that are read at a time."""
MODELS_NAMED: Final = 8
"""Models that a message names, at most."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What could be read, and what could not.

    Attributes:
        records: per fingerprint.
        failed: models without an answer, and why.
    """

    records: dict[str, list[NodeRecord]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


async def read_models(registry: Registry, models: Sequence[ModelIdentity]) -> Listing:
    """Read the records of each model; one that fails or takes long hinders no other."""
    listing, slots = (
        Listing(failed={model.fingerprint: "no time was left" for model in models}),
        asyncio.Semaphore(AT_ONCE),
    )

    async def read(model: ModelIdentity) -> None:
        async with slots:
            try:
                async with asyncio.timeout(MODEL_S):
                    found = await registry.records(model.fingerprint, model.num_layers, within_s=0.0)
            except TimeoutError:
                listing.failed[model.fingerprint] = f"no answer within {MODEL_S:.0f} s"
            except RegistryError as error:
                listing.failed[model.fingerprint] = str(error)
            else:
                listing.records[model.fingerprint] = found
                del listing.failed[model.fingerprint]

    with suppress(TimeoutError):
        async with asyncio.timeout(ALL_S), asyncio.TaskGroup() as tasks:
            for model in models:
                tasks.create_task(read(model))
    return listing


def name_models(models: Sequence[ModelIdentity]) -> str:
    """The first few models, by name and the beginning of their fingerprints, and how many more there are."""
    named = ", ".join(f"{model.name} ({model.fingerprint[:12]})" for model in models[:MODELS_NAMED])
    return named if len(models) <= MODELS_NAMED else f"{named} and {len(models) - MODELS_NAMED} more"
