"""What a node decides by itself once the model is known: in which type it computes, how many layers it holds, which.

    records ──▶ device and type ──▶ self-benchmark ──▶ how many layers ──▶ reserve them ──▶ six lines for the user

Everything that can stop this machine from helping is found here, before anything large is downloaded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Final, cast

import torch

from node.life.joining import ClassChoice, Joiner, LayerCount, Rebalance, choose_class, choose_count
from node.life.machine import SharedMachine
from node.life.publisher import Outbox
from node.life.reach.ladder import Whereabouts
from node.model.checkpoint import Checkpoint
from node.model.config import Dtype, ServeConfig
from node.model.loading import (
    DTYPES,
    Say,
    check_dtype,
    compute_of,
    fitting_layers,
    format_of,
    kernels_read,
    pick_device,
    pick_dtype,
)
from node.model.span import ModelLayout, dissect
from node.session.counters import NodeCounters
from node.session.measure import LayerSpeed, benchmark
from node.session.receipts import ReceiptBook
from swarm.base.errors import ConfigError, LayersError, RegistryError, TooSlow
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.tasks import TaskScope
from swarm.compute.compute_thread import ComputeThread
from swarm.compute.devices import expected_class, free_bytes
from swarm.compute.kernels.support import CODES_VERSION
from swarm.compute.ordered_rows import codes_version
from swarm.compute.weights.format import BITS, WeightFormat, WeightsName
from swarm.directory.dialable import DialPolicy
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import Registry
from swarm.files.stored.source import WeightSource
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import Dialer
from swarm.link.endpoint import Ways
from swarm.link.link import Uplink
from swarm.protocol.manifest import Manifest
from swarm.protocol.numeric_class import NumericClass, promises_texts
from swarm.routing.latency import ghosts, measure_delays

# What a node holds from its start to its end, whichever layers it serves. Owns nothing: a value.
#
# The start-up fills it before any layer is chosen; the span's host and the announcer work with it.


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What exists once the ports are bound, the directory is joined and the model is found."""

    config: ServeConfig
    say: Say
    """Takes lines for the user."""
    registry: Registry
    whereabouts: Whereabouts
    """How others reach the gRPC service, now."""
    port: int
    """The TCP port that is bound for it."""
    certificate: ServerCertificate | None
    """With which it answers until it ends, whichever layers it serves; None with `--insecure`."""
    identity: ModelIdentity
    """Of the model."""
    manifest: Manifest
    """Of its weights."""
    left_behind: NodeRecord | None
    """The record of an earlier run of this machine that has not expired yet."""
    checkpoint: Checkpoint
    rebalance: Rebalance
    counters: NodeCounters
    uplink: Uplink
    """By which the rows of all sessions leave, whichever layers it serves."""
    outbox: Outbox
    receipts: ReceiptBook
    """What clients signed for, of this model."""
    loaded: ExitStack
    """Ends the loaded layers, after everything that computes with them."""
    dialer: Dialer
    ways: Ways | None
    """Lead past relays; None where the system has not what they need."""
    scope: TaskScope
    """Owns the node's background tasks."""
    compute: ComputeThread
    """Alone runs what torch computes."""
    hashing: ComputeThread
    """Commits to what travels, beside that."""
    machine: SharedMachine = field(default_factory=SharedMachine)
    """What it shares with nodes of other models."""

    @property
    def address(self) -> str:
        """Under which others reach the gRPC service now, as the record has it."""
        return self.whereabouts.now.address


Compute = tuple[torch.device, torch.dtype, WeightsName]
READ_S: Final = 20.0
"""How long the swarm's records may take to come; without them a machine decides alone."""


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What this machine will do.

    Attributes:
        order: the configuration with device and type as chosen.
        layout: of the model.
        records: of the model, those of others, as they were read; without ghosts.
        ghosts: machines that are listed and do not answer.
        compute: device, type, and the name of the weights' format.
        kind: the numeric class, and why it.
        count: how many layers, and why so many.
        form: how weights are held.
        speed: what layers take here; None where it was not measured.
    """

    order: ServeConfig
    layout: ModelLayout
    records: tuple[NodeRecord, ...]
    compute: Compute
    kind: ClassChoice
    count: LayerCount
    form: WeightFormat
    speed: LayerSpeed | None = None
    ghosts: frozenset[PeerId] = frozenset()

    @property
    def joiner(self) -> Joiner:
        """This machine, to whoever places it."""
        capacity = None if self.speed is None else 1e3 / max(self.speed.layer_ms[1], 1e-6)
        return Joiner(self.kind.numeric_class, capacity, self.ghosts)


async def make_plan(resources: NodeResources) -> ServingPlan:
    """Decide.

    Raises:
        ConfigError: this machine cannot help; the message says what is missing and what would help.
    """
    config, checkpoint, compute = resources.config, resources.checkpoint, resources.compute
    layout = await compute.run(dissect, checkpoint.config)
    listed = await _records(resources)
    gone = await _ghosts(resources, listed)
    records = tuple(record for record in listed if record.peer not in gone)
    own = await compute.run(compute_of, checkpoint, config)
    able = await compute.run(_able, checkpoint, config, own)
    reads_codes = await compute.run(kernels_read, checkpoint)
    codes = codes_version(checkpoint.config.get_text_config())
    classes = _classes(config, able, checkpoint.source, reads_codes=reads_codes, codes=codes)
    kind = choose_class(records, list(classes))
    chosen, has_kernels = classes[kind.numeric_class]
    device, dtype, weights = chosen
    order = replace(config, device=str(device), dtype=_dtype(dtype), weights=weights, no_graphs=not has_kernels)
    order = replace(order, no_promise=not promises_texts(kind.numeric_class))
    has_kernels = has_kernels and not config.offload
    held = partial(format_of, has_kernels=has_kernels, experts=config.experts)
    form = await compute.run(held, checkpoint, layout, weights, dtype, device)
    plan = ServingPlan(order, layout, records, chosen, kind, LayerCount(0, ""), form, ghosts=gone)
    if not config.is_auto:
        return plan
    return await compute.run(_count, plan, partial(resources.machine.share_bytes, resources.identity.fingerprint))


def _count(plan: ServingPlan, share: Callable[[int], int]) -> ServingPlan:
    """Measure, and say how many layers; blocking. `share` is of memory that is free."""
    config, layout, device = plan.order, plan.layout, plan.compute[0]
    if config.num_layers is not None:
        if config.num_layers > layout.num_layers:
            raise LayersError(f"--num-layers {config.num_layers}: the model has {layout.num_layers} layers")
        count = LayerCount(config.num_layers, "as you asked")
        return replace(plan, count=count, speed=_benchmark(plan))
    host_bytes = share(free_bytes(torch.device("cpu")))
    fits = fitting_layers(layout, plan.form, share(free_bytes(device)), config.kv_tokens, host_bytes)
    speed = _benchmark(plan)
    try:
        count = _judged(plan, fits, speed)
    except TooSlow:  # perhaps it had something else to do just then
        speed = _benchmark(plan)
        count = _judged(plan, fits, speed)
    return replace(plan, count=count, speed=speed)


def _judged(plan: ServingPlan, fits: int, speed: LayerSpeed) -> LayerCount:
    judged = speed.layer_ms if speed.is_measured else None
    return choose_count(plan.records, plan.kind.numeric_class, plan.layout.num_layers, fits, judged)


def _benchmark(plan: ServingPlan) -> LayerSpeed:
    """Measure synthetic layers, which run the plain path and are not quantised.

    Where kernels will run, or weights stay as a quantised checkpoint has them, memory alone decides how many.
    """
    speed = benchmark(plan.layout, plan.form, plan.compute[0])
    kind = NumericClass.parse(plan.kind.numeric_class)
    if kind is None or not (kind.kernels or kind.stored):
        return speed
    how = "by the plain path" if kind.kernels else "which are not quantised"
    return replace(speed, is_measured=False, how=f"{speed.how}, {how}")


async def _records(resources: NodeResources) -> tuple[NodeRecord, ...]:
    identity, registry = resources.identity, resources.registry
    try:
        async with asyncio.timeout(READ_S):
            found = await registry.records(identity.fingerprint, identity.num_layers, within_s=0.0)
    except (RegistryError, TimeoutError):
        return ()
    return tuple(record for record in found if record.peer != registry.peer_id)


async def _ghosts(resources: NodeResources, records: Sequence[NodeRecord]) -> frozenset[PeerId]:
    config = resources.config
    policy = await DialPolicy.of(resources.address, allow_private=config.allow_private)
    asked = [record for record in records if policy.allows(record.address)]
    return await ghosts(asked, partial(measure_delays, insecure=config.insecure), random.SystemRandom())


def _able(checkpoint: Checkpoint, config: ServeConfig, own: tuple[torch.device, torch.dtype]) -> list[Compute]:
    """Where and in which types and formats this machine can compute, as far as its user left that open.

    Its own choice comes first.
    """
    devices = [own[0]]
    if config.device == "auto" and own[0].type != "cpu":
        devices.append(pick_device("cpu"))
    formats: Iterable[WeightsName] = BITS if config.weights == "auto" else [config.weights]
    able: list[Compute] = [(*own, config.weights)]
    for device in devices:
        types = DTYPES.values() if config.dtype == "auto" else [pick_dtype(config, device, checkpoint)]
        for dtype in types:
            try:
                check_dtype(dtype, device)
            except ConfigError:
                continue
            able += [(device, dtype, weights) for weights in formats]
    return list(dict.fromkeys(able))


def _classes(
    config: ServeConfig,
    able: Sequence[Compute],
    source: WeightSource,
    *,
    reads_codes: bool = True,
    codes: int = CODES_VERSION,
) -> dict[str, tuple[Compute, bool]]:
    """The classes in which this machine can compute: by what, and whether with kernels; its own choice first.

    `reads_codes` is whether a card's kernels read the source's own format of weights, `codes` the version of a CPU's
    products with its integers where these promise texts. A
    machine can also do without kernels, and without that promise, for a swarm that does. A class is what the loaded
    layers will have, unless they turn out to run another path.
    """
    classes: dict[str, tuple[Compute, bool]] = {}
    versions = (CODES_VERSION, codes) if config.no_promise else (codes, CODES_VERSION)
    for wants_kernels, version in product((False,) if config.no_graphs else (True, False), versions):
        for device, dtype, weights in able:
            form = WeightFormat.of(weights, dtype, device, source.encoding, has_codes=source.has_codes)
            is_unread = form.stored and not form.codes and not reads_codes
            is_plain = config.offload or config.experts == "cpu" or is_unread
            kind = expected_class(device, form, has_kernels=wants_kernels and not is_plain, codes=version)
            classes.setdefault(str(kind), ((device, dtype, weights), wants_kernels))
    return classes


def _dtype(dtype: torch.dtype) -> Dtype:
    return cast("Dtype", next(name for name, known in DTYPES.items() if known is dtype))
