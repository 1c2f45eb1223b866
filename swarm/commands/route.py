"""`swarm route`: the chain that a client here would take, its cost hop by hop, and the next best chain."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.cli import fit
from swarm.base.cli_types import Count, Fingerprint, Found, Insecure, Model, NetworkKeyFile, OwnParts, Peer
from swarm.base.errors import ConfigError, UnknownModel
from swarm.base.ids import ModelIdentity, PeerId
from swarm.directory.coverage import shown_address
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import Registry, name_models
from swarm.protocol.numeric_class import with_rounding
from swarm.reach.paths.local_dialler import open_ways
from swarm.routing.latency import measure_delays, worth_measuring
from swarm.routing.own_layers import OwnLayers
from swarm.routing.plausible import plausible
from swarm.routing.route import Route, RouteQuery, best_route, runner_up
from swarm.routing.served import ServedModels

MeasureDelays = Callable[[Sequence[NodeRecord]], Awaitable[dict[PeerId, float]]]

_TITLES = ("peer", "name", "layers", "address", "delay in", "transfer in", "queue", "compute", "sum")
_WORDS = 4
_WHOLE = ("peer", "layers", "address")
"""Columns whose cells must not be wrapped."""


@dataclass(frozen=True, slots=True)
class ShowRoute:
    """Print the chain that a client on this machine would take now, and what a sweep should cost.

    Attributes:
        model: name or fingerprint of one model (default: the only one of the swarm).
        fingerprint: how its fingerprint begins, where models of one name differ (default: the one that is served best).
        join: multiaddress of a peer of the swarm, or an invite (also without --join); may be repeated (default: the
            swarm joined last).
        nodes: tree nodes per sweep (K); 0 is plain decoding.
        avoid: a peer to do without, its id or how that ends; may be repeated (default: none).
        trusted: peer id of a machine that you trust; may be repeated. Only these, and a node of this machine, compute
            (default: any).
        own: layers that only trusted machines compute, others any: first:4, last:2 or first:4,last:2 (default: all
            layers, where `trusted` is given).
        membership: of the swarm; not an option.
    """

    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    model: tyro.conf.Positional[Model | None] = None
    fingerprint: Fingerprint | None = None
    nodes: Count = 16
    avoid: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    trusted: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    own: OwnParts | None = None
    insecure: Insecure = False
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM


async def route(command: ShowRoute, console: Console) -> None:
    """Find the chain and print it.

    Raises:
        SwarmError: no such model or peer, or no chain.
    """
    if not command.join:
        raise ConfigError("which swarm? use an invite, or give a peer's address with --join")
    if command.nodes < 0:
        raise ConfigError(f"--nodes {command.nodes}: 0 is plain decoding, a tree has more")
    config = DhtConfig(join=command.join, client_mode=True, membership=command.membership)
    async with DhtRegistry.open(config) as registry:
        await show_route(command, registry, console)


async def show_route(command: ShowRoute, registry: Registry, console: Console) -> None:
    """The same through an open registry."""
    network = command.membership.network
    async with open_ways(egress=registry.egress) as ways:
        measure = partial(measure_delays, insecure=command.insecure, ways=ways, network=network)
        await _show(command, registry, console, measure)


async def _show(command: ShowRoute, registry: Registry, console: Console, measure: MeasureDelays) -> None:
    served = ServedModels(registry, measure)
    model = await select_model(served, command.model, command.fingerprint)
    records = plausible(await registry.records(model.fingerprint, model.num_layers, within_s=0.0))
    if (own := OwnLayers.read(command.own, command.trusted)) is not None:
        records = own.keep_to(records)
    avoid = frozenset(_peer_matching(records, peer) for peer in command.avoid)
    candidates = [one for one in records if one.peer not in avoid]
    measured = worth_measuring(candidates, model.num_layers, random.SystemRandom())
    query = RouteQuery(model.name, model.num_layers, command.nodes, command.join, avoid=avoid)
    query = replace(query, delays_ms=await measure(measured))
    best = best_route(records, query)
    console.print(Text(f"{model.name} · {model.num_layers} layers · tree of {command.nodes} nodes"))
    table = _table(best, model.num_layers)
    fit(table, console)
    console.print(table, soft_wrap=False)
    plain = best_route(records, replace(query, nodes=0))
    for line in _summary(best, plain, runner_up(records, query, best)):
        console.print(Text(line))


def _summary(best: Route, plain: Route, second: Route | None) -> list[str]:
    back = f"back from the tail {best.return_ms:.1f} ms"
    kind = with_rounding(best.numeric_class, best.rounding or "")
    lines = [f"{best.sweep_ms:.1f} ms per sweep, drafting not counted ({back}) · numeric class {kind}"]
    if best.rounding is None:
        lines.append("its processors round differently: a text may be another one over other machines")
    rate = f"{1e3 / max(plain.sweep_ms, 1e-3):.1f}"
    lines.append(f"plain decoding: at most {rate} tokens/s ({plain.sweep_ms:.1f} ms per sweep on its fastest chain)")
    if second is None:
        lines.append("no other chain: without one of these machines some layers have nobody")
    else:
        names = " → ".join(short(hop.peer) for hop in second.hops)
        lines.append(f"next best: {second.sweep_ms:.1f} ms per sweep over {names}")
    if any(not cost.is_measured for cost in best.costs):
        lines.append("≈ is a delay that nobody has measured yet")
    return lines


def _table(best: Route, num_layers: int) -> Table:
    table = Table()
    for number, title in enumerate(_TITLES):
        is_word = number < _WORDS
        table.add_column(title, overflow="fold", justify="left" if is_word else "right", no_wrap=title in _WHOLE)
    for hop, record, cost in zip(best.hops, best.records, best.costs, strict=True):
        cells = [short(hop.peer), record.name or "", hop.span.describe(num_layers).partition(" ")[2]]
        cells += [shown_address(record), f"{'' if cost.is_measured else '≈ '}{cost.delay_ms:.1f}"]
        cells += [f"{part:.1f}" for part in (cost.transfer_ms, cost.queue_ms, cost.compute_ms, cost.total_ms)]
        table.add_row(*map(Text, cells))
    return table


def short(peer: str) -> str:
    """A peer id as tables show it."""
    return f"{peer[:4]}…{peer[-6:]}"


async def select_model(served: ServedModels, selected: str | None, fingerprint: str | None = None) -> ModelIdentity:
    """The model that was asked for, or the only one; where several have one name, the one that is served best.

    Raises:
        UnknownModel: there is none, or several names.
    """
    models = await served.registry.models()
    chosen = [model for model in models if selected is None or model.is_called(selected)]
    chosen = [model for model in chosen if fingerprint is None or model.fingerprint.startswith(fingerprint)]
    names = name_models(models) or "nothing"
    if not chosen:
        raise UnknownModel(f"nobody serves {fingerprint or selected or 'anything'!r}; this swarm has: {names}")
    if len({model.name for model in chosen}) > 1:
        raise UnknownModel(f"say which model, by its fingerprint if need be; this swarm has: {names}")
    return await served.best(chosen)


def _peer_matching(records: Sequence[NodeRecord], selected: str) -> str:
    """The one peer whose id is `selected`, ends with it, or is shown like it."""
    found = [record.peer for record in records if record.peer.endswith(selected) or short(record.peer) == selected]
    if len(found) != 1 or not selected:
        known = ", ".join(short(record.peer) for record in records)
        raise ConfigError(
            f"--avoid {selected!r}: {'several peers end so' if found else 'no such peer'}; there are {known}"
        )
    return found[0]
